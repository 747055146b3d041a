"""Large pictures through a VAE piece by piece: overlapping tiles, one after the other, whose results are blended on the host.

Only one tile is on the device at a time, so that what it takes there does not depend on the picture, and a plan measures one tile.
Results differ from those of the whole picture: a VAE looks farther than the overlap, and some of its norms and attention at all of it.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Tiles(NamedTuple):
    """How a picture is cut, in pixels; multiples of the size step of every latent."""

    side: int
    overlap: int
    """With the next tile, at least: the last one of a row ends where the picture ends."""

    def __str__(self) -> str:
        return f"tiles of {self.side}, overlapping by {self.overlap}"

    def largest(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """Frames, height and width of the largest tile of a clip."""
        frames, height, width = size
        return frames, min(height, self.side), min(width, self.side)


def in_tiles(
    work: Callable[[Tensor], Tensor],
    whole: Float[Tensor, "c frames h w"],
    tiles: Tiles,
    *,
    pixels: int,
    scale: Fraction,
) -> Float[Tensor, "channels length height width"]:
    """What `work` makes of a clip, tile by tile.

    Args:
        work: Makes of a part of the clip what belongs there, `scale` times as high and wide.
        whole: The clip, in pixels or in latents.
        tiles: How it is cut.
        pixels: Pixels on a side of one of its elements: 1, or the stride of latents.
        scale: Height of the result for a height of 1.

    Returns:
        The result on the CPU; to the bit what `work` makes of the whole if that is one tile.
    """
    side, overlap = tiles.side // pixels, tiles.overlap // pixels
    rows, columns = (_starts(length, side, overlap) for length in whole.shape[-2:])
    if len(rows) == len(columns) == 1:
        return work(whole).cpu()
    total, weight = torch.zeros(()), torch.zeros(())
    for top in rows:
        for left in columns:
            made = work(whole[..., top : top + side, left : left + side]).cpu()
            if not total.ndim:
                height, width = (int(length * scale) for length in whole.shape[-2:])
                total = made.new_zeros(*made.shape[:-2], height, width)
                weight = made.new_zeros(height, width)
            ramp = int(overlap * scale)
            own = _rise(made.shape[-2], ramp)[:, None] * _rise(made.shape[-1], ramp)
            down, right = int(top * scale), int(left * scale)
            place = (..., slice(down, down + made.shape[-2]), slice(right, right + made.shape[-1]))
            total[place] += made * own
            weight[place] += own
    return total.div_(weight)


def _starts(length: int, side: int, overlap: int) -> list[int]:
    """Where tiles begin; all are of one size, and the last ends with the picture."""
    last = max(0, length - side)
    return [*range(0, last, side - overlap), last]


def _rise(length: int, ramp: int) -> Float[Tensor, " length"]:
    """The weight of a tile's result from edge to edge: rising over the overlap, and falling again."""
    steps = torch.arange(1, length + 1, dtype=torch.float32)
    return torch.minimum(steps, steps.flip(0)).clamp(max=ramp + 1)
