"""Windows: the parts of a video file that are used as clips. They depend only on its length, its
name and the configuration."""

from collections.abc import Sequence
from typing import NamedTuple

from ditkit_core.data.config import DataConfig
from ditkit_core.io.rng import seed_of


class Window(NamedTuple):
    """A part of a file, counted in frames at the rate that clips are read at."""

    number: int
    """Index among the file's windows; the same index gives the same random window however many are
    asked for."""
    first: int
    frames: int


def longest_that_fits(available_frames: int, lengths: Sequence[int]) -> int:
    """The longest of the lengths (sorted, longest first) that fits into a file of
    `available_frames` frames; 0 if none fits."""
    return next((length for length in lengths if length <= available_frames), 0)


def windows_of(available_frames: int, config: DataConfig, name: str) -> list[Window]:
    """The different windows of a file with so many frames at the clips' rate, enough for one
    window, in order of number.

    The file's `name` seeds random windows.
    """
    frames = longest_that_fits(available_frames, config.lengths)
    assert frames, "shorter than every length"
    if config.windows == "all":
        return _one_after_the_other(available_frames, config.lengths)
    room, count = available_frames - frames, config.clips_per_file
    if config.windows == "uniform":
        firsts = (
            [(2 * room * i + count - 1) // (2 * (count - 1)) for i in range(count)]
            if count > 1
            else [room // 2]
        )
    elif config.windows == "random":
        firsts = [seed_of(config.seed, "window", name, i) % (room + 1) for i in range(count)]
    else:
        firsts = [0]
    # Duplicates are dropped without renumbering the rest: the number is part of the sample's name,
    # and so of its cache key.
    return [Window(i, first, frames) for i, first in enumerate(firsts) if first not in firsts[:i]]


def _one_after_the_other(available_frames: int, lengths: Sequence[int]) -> list[Window]:
    """Windows without gaps, each the longest that fits into the remaining frames; a remainder that
    is too short is dropped."""
    windows: list[Window] = []
    at = 0
    while frames := longest_that_fits(available_frames - at, lengths):
        windows.append(Window(len(windows), at, frames))
        at += frames
    return windows
