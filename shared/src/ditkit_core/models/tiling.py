"""Running a VAE on large images in overlapping tiles, one after the other; the results are blended
on the host.

Only one tile is on the device at a time, so its memory does not depend on the size of the image,
and a plan measures a single tile. Results differ from those for the whole image: a VAE's receptive
field is larger than the overlap, and some norms and attention are global.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Tiles(NamedTuple):
    """How an image is split into tiles, in pixels; both values are multiples of the VAE's
    stride."""

    side: int
    """Height and width of a tile."""
    overlap: int
    """Minimum overlap with the next tile; the last tile of a row overlaps more, because it ends at
    the image's edge."""

    def __str__(self) -> str:
        return f"tiles of {self.side}, overlapping by {self.overlap}"

    def largest(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """Frames, height and width of the largest tile of a clip."""
        frames, height, width = size
        return frames, min(height, self.side), min(width, self.side)


def in_tiles(
    work: Callable[[Tensor], Tensor],
    clip: Float[Tensor, "c frames h w"],
    tiles: Tiles,
    *,
    pixels: int,
    scale: Fraction,
) -> Float[Tensor, "channels length height width"]:
    """Apply `work` to a clip, in pixels or in latents, tile by tile; the result is on the CPU,
    bitwise `work(clip)` if one tile covers the clip.

    Args:
        work: From a part of the clip to its result, which is `scale` times as high and wide.
        pixels: Side of one element of `clip` in pixels: 1 for pixels, the VAE's stride for latents.
    """
    side, overlap = tiles.side // pixels, tiles.overlap // pixels
    rows, columns = (_starts(length, side, overlap) for length in clip.shape[-2:])
    if len(rows) == len(columns) == 1:
        return work(clip).cpu()
    total, weight = torch.zeros(()), torch.zeros(())
    for top in rows:
        for left in columns:
            tile = work(clip[..., top : top + side, left : left + side]).cpu()
            if not total.ndim:
                height, width = (int(length * scale) for length in clip.shape[-2:])
                total = tile.new_zeros(*tile.shape[:-2], height, width)
                weight = tile.new_zeros(height, width)
            ramp = int(overlap * scale)
            tile_weight = _rise(tile.shape[-2], ramp)[:, None] * _rise(tile.shape[-1], ramp)
            down, right = int(top * scale), int(left * scale)
            region = (..., slice(down, down + tile.shape[-2]), slice(right, right + tile.shape[-1]))
            total[region] += tile * tile_weight
            weight[region] += tile_weight
    # Dividing by the summed weights works for any number of tiles at a pixel: corners have four,
    # and the last tile overlaps more.
    return total.div_(weight)


def _starts(length: int, side: int, overlap: int) -> list[int]:
    """Start positions of the tiles; all tiles have the same size, and the last one ends at the
    image's edge."""
    last = max(0, length - side)
    return [*range(0, last, side - overlap), last]


def _rise(length: int, ramp: int) -> Float[Tensor, " length"]:
    """The weight of a tile's result along one side: rising linearly over the overlap, and falling
    at the other end."""
    steps = torch.arange(1, length + 1, dtype=torch.float32)
    return torch.minimum(steps, steps.flip(0)).clamp(max=ramp + 1)
