"""Chooses how samples are decoded by the memory that the GPU has left."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ditkit_core.api.auxiliary import Auxiliary
from ditkit_core.io.console import say
from ditkit_core.models.encoders import AuxiliaryModel, Decoder, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.planner.auxiliary import measure_model
from ditkit_core.planner.planned_step import Size


class FittingDecoder:
    """A `Decoder` that decodes in the first configured way that the GPU has room for when the first
    sample is done; it prints which."""

    def __init__(self, auxiliary: Auxiliary, sizes: Sequence[Size]):
        """Choose nothing yet: transformers may not be loaded."""
        self._auxiliary, self._sizes = auxiliary, sizes
        self._chosen: Decoder | None = None

    def decode(self, latents: Tensor, seed: int = 0) -> Tensor:
        """As `Decoder.decode`."""
        if self._chosen is None:
            auxiliary = self._auxiliary
            index = self._first_that_fits(auxiliary.decodings)
            sampler = (
                auxiliary.sampler
                if index == 0
                else auxiliary.sampler_with(auxiliary.decodings[index:])
            )
            self._chosen = sampler.decoder
        return self._chosen.decode(latents, seed)

    @property
    def decoded(self) -> str:
        """As `Decoder.decoded`."""
        return self._chosen.decoded if self._chosen else ""

    def unload(self) -> None:
        """As `Decoder.unload`."""
        if self._chosen:
            self._chosen.unload()

    def _first_that_fits(self, decodings: Sequence[VaeMode]) -> int:
        """Index of the first way that fits; 0 on a CPU, and the last where none does: what is left
        is tried, and then the host."""
        device = self._auxiliary.device_of_sampler()
        if device.type != "cuda":
            return 0
        # What torch keeps for reuse counts as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
        index, needed = first_that_fits(decodings, self._needed, free)
        if index:
            say(
                f"samples are decoded {decodings[index].label}: {device} has {free / 2**30:.1f} "
                f"GiB left, and the VAE needs "
                f"{needed[0] / 2**30:.1f} GiB {decodings[0].label}, {needed[-1] / 2**30:.1f} GiB so"
            )
        return index

    def _needed(self, decoding: VaeMode) -> int:
        auxiliary = self._auxiliary
        models, arch, paths = auxiliary.spec.auxiliary.models, auxiliary.arch, auxiliary.paths
        return max(_decoding_bytes(models, arch, paths, size, decoding) for size in self._sizes)


def first_that_fits(
    decodings: Sequence[VaeMode], needed: Callable[[VaeMode], int], free: int
) -> tuple[int, list[int]]:
    """The index of the first way that memory has room for, or of the last one; and the bytes of all
    ways up to it."""
    counted: list[int] = []
    for decoding in decodings:
        counted.append(needed(decoding))
        if counted[-1] <= free:
            break
    return len(counted) - 1, counted


@cache  # previews ask again and again, and each measurement runs the VAE on fake tensors
def _decoding_bytes(
    models: Callable[[Any, ModelPaths], Sequence[AuxiliaryModel]],
    arch: Any,
    components: ModelPaths,
    size: Size,
    decoding: VaeMode,
) -> int:
    mode: Literal["whole", "in tiles"] = "in tiles" if decoding.tiled else "whole"
    decoders = [model for model in models(arch, components) if model.stage == "sample"]
    return max(
        (measure_model(model, size, dtype=decoding.dtype, mode=mode).peak for model in decoders),
        default=0,
    )
