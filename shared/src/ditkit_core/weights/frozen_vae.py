"""A library's VAE as an encoder and a decoder: whole or tile by tile, and where memory lacks in another way."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.io.console import NullProgress, warn
from ditkit_core.io.memory import is_out_of_memory, release_memory
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.precision import dtype_name
from ditkit_core.models.tiling import Tiles, in_tiles
from ditkit_core.weights.frozen import FrozenModule, fingerprint

Pass = Callable[[Any, Tensor, torch.device], Tensor]
"""From the module, a part of a clip and the device to the part's result, in fp32."""


@dataclass(eq=False, kw_only=True)
class FrozenVae(FrozenModule, ABC):
    """Pixels to normalised latents and back; an `Encoder` and a `Decoder`, and the base class of the families'."""

    items_at_once = 1
    recipe = "{}"
    """How latents are made, for `identity`; `{}` stands for the dtype."""

    mode: VaeMode
    """How it encodes; the module's dtype is the mode's."""
    decodings: Sequence[VaeMode]
    """The ways to decode; the first that memory has room for is taken. Empty: as it encodes."""
    tiles: Tiles
    """For modes that work tile by tile."""
    encode_clip: Pass
    decode_clip: Pass
    decoded: str = field(default="", init=False)
    """How the last sample was decoded, in words; empty before the first."""
    _failed: int = field(default=0, init=False)
    """Number of ways to decode for which memory had no room."""

    @property
    @abstractmethod
    def strides(self) -> tuple[int, int]:
        """Pixel frames per latent frame after the first, and pixels per latent pixel."""

    @cached_property
    def identity(self) -> str:
        """Digest of the weights and of how latents are made from them."""
        tiles = (str(self.tiles),) if self.mode.tiled else ()  # none untiled: caches from before tiles stay valid
        return fingerprint(self.source.path, self.recipe.format(dtype_name(self.mode.dtype)), *tiles)

    @torch.no_grad()
    def encode(
        self,
        items: Sequence[Float[Tensor, "3 frames height width"]],
        advance: Callable[[float], None] = NullProgress.advance,
    ) -> list[dict[str, Tensor]]:
        """Latents [channels, f, h, w] of one clip, fp32, on the CPU, of about unit variance.

        The clip has pixels in [-1, 1]; `strides` divide its sides and all frames but the first, because a VAE silently drops the rest."""
        (clip,) = items
        (_, length, height, width), (frames, pixels) = clip.shape, self.strides
        assert (length - 1) % frames == height % pixels == width % pixels == 0, f"{length} frames of {height} x {width}"
        tiles = self.tiles if self.mode.tiled else None
        latents = self._run(self.encode_clip, clip, self.device, tiles, 1, Fraction(1, pixels))
        advance(1.0)
        return [{"latents": latents}]

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "channels f h w"]) -> Float[Tensor, "3 frames height width"]:
        """Load the VAE and decode latents to pixels in [0, 1], fp32, on the CPU.

        The first way that memory has room for is taken; if there is no room for any, the host's. A way that failed is not tried again until the weights
        are freed.
        """
        decodings, pixels = self.decodings or (self.mode,), self.strides[1]
        host = VaeMode(torch.float32, decodings[-1].tiled)
        ways = [*((self.device, decoding) for decoding in decodings), (torch.device("cpu"), host)]
        while True:
            device, way = ways[self._failed]
            try:
                self.load_as(device, way.dtype)
                tiles = self.tiles if way.tiled else None
                result = self._run(self.decode_clip, latents, device, tiles, pixels, Fraction(pixels))
                self.decoded = way.label if device == self.device else f"{way.label} on the CPU"
                return result
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self._failed == len(ways) - 1:
                    raise
            # Here and not above: the error kept the tensors of the attempt alive.
            failed, self._failed = self._failed, self._failed + 1
            super().unload()
            release_memory()
            following = ways[self._failed]
            where = "on the CPU" if following[0] != device else following[1].label
            warn(f"no room on {device} to decode a sample {ways[failed][1].label}; decoding it {where}")

    def unload(self) -> None:
        """Free the weights."""
        super().unload()
        self._failed = 0  # the next samples may find more room

    def _run(
        self, work: Pass, clip: Tensor, device: torch.device, tiles: Tiles | None, pixels: int, scale: Fraction
    ) -> Tensor:
        """The result on the CPU for a clip, whole or tile by tile; `pixels` and `scale` as for `in_tiles`."""

        def part_result(part: Tensor) -> Tensor:
            return work(self.module, part, device)

        return (
            part_result(clip).cpu() if tiles is None else in_tiles(part_result, clip, tiles, pixels=pixels, scale=scale)
        )
