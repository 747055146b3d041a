"""What the windows of clips show, each seen once at low size: cuts, blank and frozen pictures, near-duplicates.

Differences are mean absolute ones between thumbnails, in levels of 0…255. The limits were chosen on made clips (pans, fades,
flashes, cuts, re-encoded copies), so that whatever they report is a warning, never an exclusion.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ditkit_core.data.media import video
from ditkit_core.data.media.clip import pictures

SIDE = 32
"""Pixels of a thumbnail's sides."""

CUT_LEVELS = 12.0
"""Least difference of two frames with a cut between them."""
CUT_RATIO = 4.0
"""How many times the usual difference around it a cut is."""
STILL_LEVELS = 1.0
"""A clip whose frames all differ from the first by less does not move."""
FROZEN_LEVELS = 0.05
"""Frames that differ by less are the same picture."""
BLANK_LEVELS = 1.5
"""Standard deviation of a picture below which it is of one colour."""

NEAR_BITS = 15
"""Largest distance of two fingerprints of 189 bits that may be the same clip; unlike ones are about 95 apart."""
NEAR_LEVELS = 12.0
"""Largest difference of their colours."""

_AROUND = 4
_HASH_SIDE = 8
_BANDS = NEAR_BITS + 1  # of two prints within NEAR_BITS at least one band is equal
_MOST_COMPARED = 16
_ONES = np.array([byte.bit_count() for byte in range(256)])

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What near-duplicates have nearly in common: first, middle and last frame of a window."""

    bits: NDArray[np.bool_] = field(repr=False)
    """Signs of the lowest frequencies of each frame's brightness against their median, 63 a frame."""
    colours: Floats = field(repr=False)
    """[3, 8, 8, 3] levels."""

    def near(self, other: "Fingerprint") -> bool:
        """Whether both may show the same."""
        if np.count_nonzero(self.bits != other.bits) > NEAR_BITS:
            return False
        return float(np.abs(self.colours - other.colours).mean()) <= NEAR_LEVELS


@dataclass(frozen=True, kw_only=True)
class WindowLook:
    """What a window shows."""

    frames: int
    cuts: tuple[float, ...]
    """Seconds since the file's first frame at which another shot begins, in steps of a frame."""
    blank: int
    """Frames of one colour."""
    is_black: bool
    """Whether all that is blank is black."""
    is_still: bool
    """Whether a clip of several frames does not move at all."""
    frozen_seconds: float
    """The longest time that one picture stays, in a clip that moves otherwise."""
    fingerprint: Fingerprint | None
    """None where there is nothing to tell pictures apart by."""


def look_at_window(path: Path, *, frames: int, fps: float, start_seconds: float = 0.0) -> WindowLook:
    """Decode what training reads of a file.

    Args:
        path: A media file.
        frames: Frames of the window; 1 for an image.
        fps: Frames per second of the window; 0 for an image.
        start_seconds: Time of its first frame, counted from the file's first.

    Raises:
        UserError: If a frame of the window cannot be decoded: encoding would meet the same.
    """
    shown = pictures(path, frames=frames, fps=fps, start_seconds=start_seconds)
    return judge_thumbnails(np.stack(list(_thumbnails(shown))), fps=fps, start_seconds=start_seconds)


def thumbnail(picture: video.Picture) -> Floats:
    """A picture squeezed to [32, 32, 3], in levels."""
    from PIL import Image

    small = Image.fromarray(np.ascontiguousarray(picture)).resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    return np.asarray(small, dtype=np.float32)


def _thumbnails(shown: Iterable[video.Picture]) -> Iterator[Floats]:
    last, small = None, None
    for picture in shown:
        if picture is not last or small is None:  # what stays on screen is given as often as it is due
            last, small = picture, thumbnail(picture)
        yield small


def judge_thumbnails(thumbnails: Floats, *, fps: float, start_seconds: float = 0.0) -> WindowLook:
    """What the thumbnails [frames, 32, 32, 3] of a window say about it.

    Args:
        thumbnails: In levels of 0…255.
        fps: Frames per second; 0 for a still image.
        start_seconds: As for `look_at_window`.
    """
    count = len(thumbnails)
    blank = thumbnails.reshape(count, -1, 3).std(axis=1).max(axis=1) < BLANK_LEVELS
    steps = _differences(thumbnails[1:], thumbnails[:-1])
    is_still = count > 1 and bool((_differences(thumbnails, thumbnails[:1]) < STILL_LEVELS).all())
    longest = run = 0
    for step in steps:
        run = run + 1 if step < FROZEN_LEVELS else 0
        longest = max(longest, run)
    return WindowLook(
        frames=count,
        cuts=tuple(start_seconds + (place + 1) / fps for place in _cuts(thumbnails, steps)),
        blank=int(blank.sum()),
        is_black=bool(blank.any()) and float(thumbnails[blank].max()) < 24,
        is_still=is_still,
        frozen_seconds=0.0 if is_still or not fps else longest / fps,
        fingerprint=None if blank.all() else window_fingerprint(thumbnails[~blank]),
    )


def _differences(a: Floats, b: Floats) -> Floats:
    return np.abs(a - b).mean(axis=(1, 2, 3))


def _cuts(thumbnails: Floats, steps: Floats) -> Iterator[int]:
    """Places of steps from one shot to another: large, much larger than those around, and no flash that is over at once."""
    for place, step in enumerate(steps):
        around = np.concatenate([steps[max(0, place - _AROUND) : place], steps[place + 1 : place + 1 + _AROUND]])
        around = around[around >= FROZEN_LEVELS]  # between frames that are shown twice nothing happens
        usual = float(np.median(around)) if len(around) else 0.0
        # Fast pans differ as much as cuts do, but all along: a cut is alone among small differences.
        if step < CUT_LEVELS or step < CUT_RATIO * usual:
            continue
        flashed = [
            float(np.abs(thumbnails[after] - thumbnails[before]).mean()) < step / 2
            for before, after in ((place, place + 2), (place - 1, place + 1))
            if before >= 0 and after < len(thumbnails)
        ]
        if not any(flashed):
            yield place


@cache
def _cosines() -> Floats:
    """The lowest rows of the discrete cosine transform."""
    positions = np.arange(SIDE) + 0.5
    rows = np.cos(np.pi / SIDE * np.arange(_HASH_SIDE)[:, None] * positions)
    return rows.astype(np.float32)


def window_fingerprint(thumbnails: Floats) -> Fingerprint:
    """The fingerprint of a window.

    Source: the perceptual hash by DCT (Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010), here of three frames.
    """
    chosen = thumbnails[[0, len(thumbnails) // 2, -1]]
    cosines = _cosines()
    frequencies = (cosines @ chosen.mean(axis=3) @ cosines.T).reshape(3, -1)[:, 1:]  # without the mean brightness
    bits = frequencies > np.median(frequencies, axis=1, keepdims=True)
    side = SIDE // _HASH_SIDE
    colours = chosen.reshape(3, _HASH_SIDE, side, _HASH_SIDE, side, 3).mean(axis=(2, 4))
    return Fingerprint(bits=bits.reshape(-1), colours=colours)


def near_duplicates(prints: Mapping[str, tuple[Hashable, Fingerprint]]) -> list[tuple[str, ...]]:
    """Groups of windows that look nearly alike, in the order given.

    Linear in their number: prints are looked up by bands of their bits, one of which is equal if they are near, and each is compared
    with no more than 16 others in a band. Of a group only the first is compared with what comes later.

    Args:
        prints: By name, what its windows have in common (a file, whose windows are no duplicates of each other) and how it looks.
    """
    if not prints:
        return []
    names, groups = list(prints), dict[str, list[str]]()
    bits = np.stack([print.bits for _, print in prints.values()])
    packed = np.packbits(bits, axis=1)
    pieces = np.array_split(bits, _BANDS, axis=1)
    values = np.stack([piece @ (1 << np.arange(piece.shape[1])) for piece in pieces], axis=1)
    # by band and value of its bits the latest prints with it: as many places for each, so that each print takes the same time
    latest = np.full((_BANDS, int(values.max()) + 1, _MOST_COMPARED), -1)
    count = np.zeros(latest.shape[:2], int)
    every = np.arange(_BANDS)
    for index, name in enumerate(names):
        source, own = prints[name]
        candidates = latest[every, values[index]].ravel()
        far = _ONES[packed[candidates] ^ packed[index]].sum(axis=1) > NEAR_BITS
        near = (names[other] for other in np.unique(candidates[~far & (candidates >= 0)]))
        found = next((other for other in near if prints[other][0] != source and own.near(prints[other][1])), None)
        if found is not None:
            groups.setdefault(found, [found]).append(name)
            continue
        latest[every, values[index], count[every, values[index]] % _MOST_COMPARED] = index
        count[every, values[index]] += 1
    return [tuple(group) for group in groups.values()]
