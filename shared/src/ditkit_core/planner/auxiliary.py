"""Memory of encoding and sampling: each encoder alone, and sampling in addition to the memory of
training.

Fake tensors run through the functions that the encoders and the sampler call themselves, so that a
plan cannot diverge from them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ditkit_core.io.console import doing
from ditkit_core.models.encoders import WHOLE, AuxiliaryModel, LayerContext, VaeMode
from ditkit_core.planner.measurement_cache import (
    content_key,
    measured_once,
    module_key,
    step_key,
)
from ditkit_core.planner.memory_tracker import MemoryTracker, TooMuchMemory, fake_tensors
from ditkit_core.planner.planned_step import Size, StepJob
from ditkit_core.planner.reduced_model import give_memory, materialise, reduced_model
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.weights.layer_streaming import too_large

_DEVICE = torch.device("cpu", 1)
"""With fake tensors, a device other than the host."""
_SMALLER = "a smaller sample.height and sample.width"
Mode = Literal["whole", "layer by layer", "in bf16", "in tiles", "in bf16 tiles"]


class MeasuredModel(NamedTuple):
    """Bytes of an auxiliary model at its peak."""

    weights: int
    peak: int
    """The weights included."""


@dataclass(frozen=True, kw_only=True)
class AuxiliaryRow:
    """One line of a plan: the memory of a stage other than training on its device."""

    stage: str
    """`encode`, `sample`, or `preview` where these are generated on a device of their own."""
    name: str
    device: str
    size: Size | None
    """Size of the largest sample; None if the stage does not depend on it."""
    mode: Mode
    weights: int
    """Bytes of its own weights."""
    in_use: int
    """Bytes that training occupies on the device meanwhile, `DeviceMemory.in_use`, and the bytes of
    the adapters of [sample]."""
    peak: int
    """Bytes in total."""
    available: int | None
    remedy: str
    """The setting to change if it does not fit, with the memory needed then; empty if it fits."""

    @property
    def fits(self) -> bool | None:
        """Whether there is room; None if unknown."""
        return None if self.available is None else self.peak <= self.available

    @property
    def missing(self) -> int:
        """Missing bytes; 0 if it fits or the memory is unknown."""
        return 0 if self.available is None else max(0, self.peak - self.available)


class DeviceMemory(NamedTuple):
    """A device with its available memory."""

    device: str
    available: int | None
    """Bytes without those reserved for other programs; None if unknown."""
    kind: str = "cuda"
    """`cuda` or `cpu`."""
    in_use: int = 0
    """Bytes that are in use meanwhile: the trained model while it generates samples, or its copy
    for previews."""

    def fits(self, peak: int) -> bool:
        """Whether there is room; True if the memory is unknown."""
        return self.available is None or peak <= self.available

    def row(self, needed: int, remedy: Callable[[], str], **about: Any) -> AuxiliaryRow:
        """The line of a stage that needs so many bytes here, and its remedy if it does not fit."""
        peak = self.in_use + needed
        missing = "" if self.fits(peak) else remedy()
        return AuxiliaryRow(
            device=self.device,
            in_use=self.in_use,
            peak=peak,
            available=self.available,
            remedy=missing,
            **about,
        )


def measure_model(
    model: AuxiliaryModel,
    size: Size,
    *,
    dtype: torch.dtype,
    mode: Literal["whole", "layer by layer", "in tiles"] = "whole",
    kind: str = "cuda",
    limit: int | None = None,
) -> MeasuredModel:
    """Measure an auxiliary model on fake tensors: as a whole, layer by layer, or on the largest
    tile of an input of this size, if it supports that.

    Raises:
        TooMuchMemory: If its peak is above the limit, as soon as it is; what a film needs is known
            after its first frames.
    """
    module = model.build(dtype)
    key = cache(lambda: (content_key(model), module_key(module), size, mode, kind))
    least = measured_once(lambda: ("least", *key()), lambda: [0])
    if limit is not None and least[0] > limit:
        raise TooMuchMemory(least[0])
    try:
        measured = measured_once(
            lambda: (measure_model, *key()),
            lambda: _measured_module(model, module, size, mode, kind, limit),
        )
    except TooMuchMemory as error:
        least[0] = error.num_bytes
        raise
    if limit is not None and measured.peak > limit:  # it was kept
        raise TooMuchMemory(measured.peak)
    return measured


def _measured_module(
    model: AuxiliaryModel, module: nn.Module, size: Size, mode: str, kind: str, limit: int | None
) -> MeasuredModel:
    with fake_tensors(kind) as tracker, torch.no_grad():
        if limit is not None:
            tracker.limits[_DEVICE] = limit
        if mode == "layer by layer":
            assert model.run_streamed is not None
            model.run_streamed(module, _DEVICE, lambda: _passing(module, tracker))
        else:
            with tracker.purpose("weights"):
                give_memory(module, _DEVICE)
            if mode == "in tiles":
                assert model.tiles is not None
                size = model.tiles.largest(size)
            model.run(module, size, _DEVICE)
    return MeasuredModel(tracker.at_peak[_DEVICE]["weights"], tracker.peak[_DEVICE])


def _passing(module: nn.Module, tracker: MemoryTracker) -> LayerContext:
    """Buffers for streamed layers, as `LayerStreamer` keeps them: one tensor per name and shape,
    reused by the next layer."""
    kept: dict[tuple[str, torch.Size], nn.Parameter] = {}

    @contextmanager
    def loaded(name: str) -> Iterator[nn.Module]:
        part, before = module.get_submodule(name), []
        with tracker.purpose("weights"):
            for inner, tensor in list(part.named_parameters(remove_duplicate=False)):
                key = (inner, tensor.shape)
                if key not in kept:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=_DEVICE)
                    kept[key] = nn.Parameter(fake, requires_grad=False)
                owner, _, leaf = inner.rpartition(".")
                before.append((part.get_submodule(owner), leaf, tensor))
                before[-1][0]._parameters[leaf] = kept[key]
        yield part
        for holder, leaf, tensor in before:
            holder._parameters[leaf] = tensor

    return loaded


def denoising_bytes(job: StepJob, size: Size, references: Sequence[tuple[int, int]] = ()) -> int:
    """Peak bytes of one call of a job's transformer without gradients, above its weights and
    including inputs; references are images to edit (height, width).

    Three blocks of each kind are run: without gradients only the output of a block stays alive.
    """
    # Nothing is trained in it.
    forward = replace(job, batch=(), micro_batches=1, optim=OptimConfig(), ema=EMAConfig())
    forward = replace(forward, flow=FlowConfig()).with_execution(checkpointing="none")
    return measured_once(
        lambda: (denoising_bytes, step_key(forward), size, tuple(references)),
        lambda: _measured_denoising(job, size, references),
    )


def _measured_denoising(job: StepJob, size: Size, references: Sequence[tuple[int, int]]) -> int:
    spec, dtype = job.spec, job.precision.matmul
    model = reduced_model(job)
    with torch.device("meta"):
        item = spec.training.empty_item(job.arch, size, references)
    with fake_tensors(job.kind) as tracker, torch.no_grad():
        with tracker.purpose("weights"):
            names = {id(module): name for name, module in model.full_model.named_modules()}
            for stage in model.stages():
                materialise(stage.eval(), names[id(stage)], spec, dtype=dtype, device=_DEVICE)
        weights = tracker.total(_DEVICE)
        item = {
            name: torch.empty(t.shape, dtype=t.dtype, device=_DEVICE) for name, t in item.items()
        }
        sigma = torch.empty(1, device=_DEVICE)
        model(spec.training.make_inputs([item["latents"].float()], sigma, [item], 1.0))
    return tracker.peak[_DEVICE] - weights


def held_while_sampling(purposes: Mapping[str, int], *, averages: bool = False) -> int:
    """Bytes in use on a device, of these by purpose, while samples are generated between two steps:
    no gradients and no activations. `averages`: whether the optimizer averages the weights itself.
    """
    held = sum(purposes.get(name, 0) for name in ("weights", "adapters", "optimizer", "average"))
    # Samples are generated with averaged weights, and a copy of the trained ones is kept meanwhile.
    return held + (purposes.get("adapters", 0) if averages or purposes.get("average") else 0)


@dataclass(frozen=True, kw_only=True)
class AuxiliaryPlanner:
    """Plans the memory of encoding and sampling, stage by stage."""

    models: Sequence[AuxiliaryModel]
    """The family's auxiliary models, from `AuxiliarySpec.models`."""
    text_dtype: torch.dtype
    """`encode.text_dtype`."""
    streaming: str = "auto"
    """`encode.streaming`."""
    encoding: VaeMode = WHOLE
    """How the VAE encodes: `encode.vae_dtype` and `encode.vae_tiling`."""
    decodings: Sequence[VaeMode] = (WHOLE,)
    """The ways to decode a sample, the most exact first: a GPU takes the first that it has room
    for."""

    def encode_rows(self, sizes: Sequence[Size], memory: DeviceMemory) -> list[AuxiliaryRow]:
        """The encoders, which run one at a time with nothing else on their device, for the sizes of
        all clips and references that are encoded."""
        rows, encoding = list[AuxiliaryRow](), self.encoding
        for model in self.models if sizes else ():
            if model.stage == "encode" and model.tiles:
                row = self._row(model, sizes, memory, tiled=encoding.tiled, dtype=encoding.dtype)
                rows.append(replace(row, mode=encoding.label))
            elif model.stage == "encode":
                rows.append(self._row(model, sizes, memory))
        return rows

    def sample_rows(
        self,
        sizes: Sequence[Size],
        memories: Sequence[DeviceMemory],
        *,
        denoising: int,
        num_samples: int = 1,
        adapter_bytes: Sequence[int] = (),
    ) -> list[AuxiliaryRow]:
        """The transformer's denoising on each of the model's devices, and the decoder on the first.

        Args:
            sizes: Sizes of the samples; empty for none.
            denoising: `denoising_bytes` of the largest sample.
            num_samples: Samples generated in a row; from the second on, the decoder stays loaded
                while the model runs.
            adapter_bytes: Bytes of the adapters of [sample] on each device; empty for none. They stay there
                while a sample is decoded.
        """
        rows: list[AuxiliaryRow] = []
        memories = [
            memory._replace(in_use=memory.in_use + more)
            for memory, more in zip(memories, adapter_bytes or [0] * len(memories), strict=True)
        ]
        for model in self.models if sizes else ():
            if model.stage != "sample":
                continue
            decoder = self._decoder_row(model, sizes, memories[0])
            for index, memory in enumerate(memories):
                kept = decoder.weights if num_samples > 1 and not index else 0
                about = {
                    "stage": "sample",
                    "name": "denoising",
                    "size": decoder.size,
                    "mode": "whole",
                    "weights": kept,
                }
                rows.append(memory.row(kept + denoising, lambda: _SMALLER, **about))
            rows.append(decoder)
        return rows

    def _decoder_row(
        self, model: AuxiliaryModel, sizes: Sequence[Size], memory: DeviceMemory
    ) -> AuxiliaryRow:
        """The decoder as a run decodes: a CPU always in the first way, a GPU in the first that
        fits."""
        decodings = [
            candidate for candidate in self.decodings if model.tiles or not candidate.tiled
        ] or [WHOLE]
        *others, last = decodings if memory.kind == "cuda" else decodings[:1]
        left = None if memory.available is None else memory.available - memory.in_use
        for decoding, limit in (*((other, left) for other in others), (last, None)):
            with suppress(TooMuchMemory):
                row = self._row(
                    model, sizes, memory, tiled=decoding.tiled, dtype=decoding.dtype, limit=limit
                )
                break
        return replace(row, mode=decoding.label)

    def _row(
        self,
        model: AuxiliaryModel,
        sizes: Sequence[Size],
        memory: DeviceMemory,
        *,
        tiled: bool = False,
        dtype: torch.dtype | None = None,
        limit: int | None = None,
    ) -> AuxiliaryRow:
        doing(f"planning the {model.name}")
        streams = self.streaming == "always"
        if self.streaming == "auto" and model.run_streamed and memory.available is not None:
            # A state dict counts a shared weight twice, as the encoder does when it decides whether
            # to stream.
            needed = sum(
                tensor.nbytes for tensor in model.build(self.text_dtype).state_dict().values()
            )
            streams = too_large(needed, memory.available)
        mode: Literal["whole", "layer by layer", "in tiles"] = (
            "in tiles" if tiled and model.tiles else "whole"
        )
        if model.run_streamed and streams:
            mode = "layer by layer"
        # Either the largest image or the largest clip needs most, so both are measured.
        worst = {
            max(sizes, key=lambda size: size[1] * size[2]),
            max(sizes, key=lambda size: size[0] * size[1] * size[2]),
        }
        measure = partial(measure_model, model, dtype=dtype or self.text_dtype, kind=memory.kind)
        by_size = {size: measure(size, mode=mode, limit=limit) for size in sorted(worst)}
        size, measured = max(by_size.items(), key=lambda entry: entry[1].peak)
        return memory.row(
            measured.peak,
            lambda: _remedy(model, mode, memory, partial(measure, size)),
            stage=model.stage,
            name=model.name,
            size=size if model.tiles else None,
            mode=mode,
            weights=measured.weights,
        )


def _remedy(
    model: AuxiliaryModel, mode: Mode, memory: DeviceMemory, measure: Callable[..., MeasuredModel]
) -> str:
    """The setting that lets a stage fit, with the memory needed then; if it is not enough, also
    what to do after it."""
    if model.stage == "sample":  # it has tried every way
        return _SMALLER
    last = 'encode.device = "cpu"'
    setting, other = "encode.vae_tiling = true", "in tiles"
    if not model.tiles:
        setting, other = 'encode.streaming = "always"', "layer by layer"
    if mode != "whole" or not (model.tiles or model.run_streamed):
        return last
    needed = memory.in_use + measure(mode=other).peak
    then = f"{setting} would need {needed / 2**30:.1f} GiB"
    return then if memory.fits(needed) else f"{then}, which is still too much; {last}"
