"""Sizes of about the same area and different aspects, and which of them a picture gets."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ditkit_core.errors import UserError

Size = tuple[int, int]
"""Height and width in pixels."""


def bucket_sizes(height: int, width: int, *, step: int, max_aspect: float) -> tuple[Size, ...]:
    """The sizes that pictures are brought to: for each length of one side the other one that gives the area.

    Args:
        height: With `width`, the area in pixels.
        width: As `height`.
        step: Both sides are multiples of it.
        max_aspect: Largest ratio of the longer side to the shorter.

    Raises:
        UserError: If there is no such size.
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
    """The size whose aspect is nearest to that of a picture, as a ratio; of equals the largest."""
    aspect = math.log(height / width)
    return min(sizes, key=lambda size: (abs(math.log(size[0] / size[1]) - aspect), -size[0] * size[1], size))


def describe_sizes(sizes: Iterable[Size]) -> str:
    """How many samples have each size, on one line."""
    counts = sorted(Counter(sizes).items())
    return ", ".join(f"{height} x {width}: {count}" for (height, width), count in counts)


def describe_lengths(lengths: Iterable[int]) -> str:
    """How many samples have each number of frames, on one line."""
    return ", ".join(f"{frames}: {count}" for frames, count in sorted(Counter(lengths).items()))
