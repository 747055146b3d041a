"""Aspect-ratio buckets: image sizes of about the same area, and the bucket that each image is assigned to."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ditkit_core.errors import UserError

Size = tuple[int, int]
"""Height and width in pixels."""


def bucket_sizes(height: int, width: int, *, step: int, max_aspect: float) -> tuple[Size, ...]:
    """The bucket sizes: for each length of one side, the other side is chosen to match the area.

    Args:
        height: Pixels; `height * width` is the target area.
        width: Pixels.
        step: Both sides are multiples of this number of pixels.
        max_aspect: Largest ratio of the longer side to the shorter, at least 1.

    Returns:
        Height and width of each bucket, sorted.

    Raises:
        UserError: If no size fits the step and the aspect ratio.
    """
    area = height * width
    sizes: set[Size] = set()
    for side in range(step, math.isqrt(int(area * max_aspect)) + step, step):
        other = (2 * area + side * step) // (2 * side * step) * step  # rounded to a multiple, without floats
        if other and max(side, other) <= min(side, other) * max_aspect:
            sizes |= {(side, other), (other, side)}
    if not sizes:
        raise UserError(
            f"data.buckets: no size of about {height} x {width} has sides that are multiples of {step} and an aspect up to "
            f"{max_aspect:g}; lower data.bucket_step or raise data.max_aspect"
        )
    return tuple(sorted(sizes))


def nearest_size(height: int, width: int, sizes: Sequence[Size]) -> Size:
    """The bucket whose aspect ratio is nearest to that of an image; of equally near ones the largest."""
    aspect = math.log(height / width)  # logarithms make twice as wide and half as wide equally far from square
    return min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - aspect), -size[0] * size[1], size))


def describe_sizes(sizes: Iterable[Size]) -> str:
    """The number of samples of each size, on one line."""
    counts = sorted(Counter(sizes).items())
    return ", ".join(f"{height} x {width}: {count}" for (height, width), count in counts)


def describe_lengths(lengths: Iterable[int]) -> str:
    """The number of samples of each clip length in frames, on one line."""
    return ", ".join(f"{frames}: {count}" for frames, count in sorted(Counter(lengths).items()))
