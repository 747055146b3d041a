"""Which parts of a video file are clips to train on: a function of its length, its name and the configuration."""

from collections.abc import Sequence
from typing import NamedTuple

from ditkit_core.data.config import DataConfig
from ditkit_core.io.rng import seed_of


class Window(NamedTuple):
    """A part of a file, in frames of the rate that clips are read at."""

    number: int
    """Which of the file's; the same however many there are of random ones."""
    first: int
    frames: int


def longest_that_fits(there: int, lengths: Sequence[int]) -> int:
    """The longest of the lengths (longest first) that a file of so many frames fills; 0: it fills none."""
    return next((length for length in lengths if length <= there), 0)


def windows_of(there: int, config: DataConfig, name: str) -> list[Window]:
    """The windows of a file, no two alike.

    Args:
        there: Frames that it has at the rate of the clips; enough for one window.
        config: The `[data]` section.
        name: The file's id, by which random windows are drawn.
    """
    frames = longest_that_fits(there, config.lengths)
    assert frames, "shorter than every length"
    if config.windows == "all":
        return _one_after_the_other(there, config.lengths)
    room, count = there - frames, config.clips_per_file
    if config.windows == "uniform":
        firsts = [(2 * room * i + count - 1) // (2 * (count - 1)) for i in range(count)] if count > 1 else [room // 2]
    elif config.windows == "random":
        firsts = [seed_of(config.seed, "window", name, i) % (room + 1) for i in range(count)]
    else:
        firsts = [0]
    # A window keeps its number where an equal one was left out, so that its name, and with it the cache, stays.
    return [Window(i, first, frames) for i, first in enumerate(firsts) if first not in firsts[:i]]


def _one_after_the_other(there: int, lengths: Sequence[int]) -> list[Window]:
    """Windows without a gap, each the longest that what is left fills; what fills none is left over."""
    found: list[Window] = []
    at = 0
    while frames := longest_that_fits(there - at, lengths):
        found.append(Window(len(found), at, frames))
        at += frames
    return found
