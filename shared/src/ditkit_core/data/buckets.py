"""Aspect-ratio buckets: image sizes of about the same area, and the bucket that each image is
assigned to."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ditkit_core.data.config import DataConfig
from ditkit_core.errors import UserError

_LITTLE = 0.1
"""Share of a picture that may be cut away before it gets another size than the configured one:
fewer sizes make fuller micro-batches."""

Size = tuple[int, int]
"""Height and width in pixels."""


def bucket_sizes(height: int, width: int, *, step: int, max_aspect: float) -> tuple[Size, ...]:
    """The sizes (height, width) of about height × width pixels, sorted: for each length of one
    side, the other side is chosen to match the area.

    Sides are multiples of `step` pixels, and the longer one is at most `max_aspect` times the
    shorter.
    """
    area = height * width
    sizes: set[Size] = set()
    for side in range(step, math.isqrt(int(area * max_aspect)) + step, step):
        # rounded to a multiple, without floats
        other = (2 * area + side * step) // (2 * side * step) * step
        if other and max(side, other) <= min(side, other) * max_aspect:
            sizes |= {(side, other), (other, side)}
    if not sizes:
        raise UserError(
            f"data.buckets: no size of about {height} x {width} has sides that are multiples of "
            f"{step} and an aspect up to "
            f"{max_aspect:g}; lower data.bucket_step or raise data.max_aspect"
        )
    return tuple(sorted(sizes))


def sizes_within(height: int, width: int, *, step: int, max_aspect: float) -> tuple[Size, ...]:
    """A size, the same one on its side, and sizes of other shapes (as of `bucket_sizes`) that have
    at most as many pixels.

    So a step on any of them needs no more memory than on the first.
    """
    area = height * width
    sizes: set[Size] = {(height, width), (width, height)}
    for side in range(step, math.isqrt(int(area * max_aspect)) + 1, step):
        other = area // side // step * step
        if other and max(side, other) <= min(side, other) * max_aspect:
            sizes |= {(side, other), (other, side)}
    return tuple(sorted(sizes))


def cut_share(height: int, width: int, size: Size) -> float:
    """Share of a picture that is cut away where it is resized to cover a size and cropped to it,
    from 0 to below 1."""
    ratio = (height * size[1]) / (width * size[0])
    return 1 - min(ratio, 1 / ratio)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The sizes that samples may have at one resolution."""

    sizes: tuple[Size, ...]
    kept: Size | None = None
    """The size of samples that it cuts little of, whichever is nearest; None if the nearest is
    always chosen."""

    def of(self, height: int, width: int) -> Size:
        """The size of a sample at this resolution, by the size of its file in pixels."""
        if self.kept is not None and cut_share(height, width, self.kept) <= _LITTLE:
            return self.kept
        return nearest_size(height, width, self.sizes)


def resolutions_of(config: DataConfig, size_step: int) -> tuple[Resolution, ...]:
    """The sizes that samples may have, by resolution, the largest first; sides are multiples of
    `size_step` pixels."""
    step, aspect = config.bucket_step or 4 * size_step, config.max_aspect
    sizes = [(side, side) for side in sorted(config.resolutions, reverse=True)] or [
        (config.height, config.width)
    ]
    if config.buckets == "auto":
        within = [sizes_within(*size, step=step, max_aspect=aspect) for size in sizes]
        return tuple(
            Resolution(sizes=some, kept=size) for some, size in zip(within, sizes, strict=True)
        )
    if config.buckets:
        return tuple(
            Resolution(sizes=bucket_sizes(*size, step=step, max_aspect=aspect)) for size in sizes
        )
    return tuple(Resolution(sizes=(size,)) for size in sizes)


def size_of(height: int, width: int, resolutions: Sequence[Resolution]) -> Size:
    """The size of a sample whose file has height × width pixels: of the largest resolution at which
    it is not enlarged, or of the smallest."""
    sizes = [resolution.of(height, width) for resolution in resolutions]
    return next((size for size in sizes if size[0] <= height and size[1] <= width), sizes[-1])


def nearest_size(height: int, width: int, sizes: Sequence[Size]) -> Size:
    """The bucket whose aspect ratio is nearest to an image's; of equally near ones the largest."""
    # logarithms make twice as wide and half as wide equally far from square
    aspect = math.log(height / width)
    return min(
        sizes,
        key=lambda size: (abs(math.log(size[0] / size[1]) - aspect), -size[0] * size[1], size),
    )


def describe_sizes(sizes: Iterable[Size]) -> str:
    """The number of samples of each size, on one line."""
    counts = sorted(Counter(sizes).items())
    return ", ".join(f"{height} x {width}: {count}" for (height, width), count in counts)


def describe_lengths(lengths: Iterable[int]) -> str:
    """The number of samples of each clip length in frames, on one line."""
    return ", ".join(f"{frames}: {count}" for frames, count in sorted(Counter(lengths).items()))
