"""Analysis of windows of clips, each decoded once at low size: cuts, blank and frozen frames,
near-duplicates.

Differences are mean absolute differences between thumbnails, in levels of 0…255. The limits were
chosen on generated clips (pans, fades, flashes, cuts, re-encoded copies); so their findings are
warnings and never exclude a sample.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ditkit_core.data.media.clip import stored_images
from ditkit_core.data.media.image import RgbImage
from ditkit_core.data.media.video import has_no_matrix
from ditkit_core.diagnostics.doctor.findings import FileRow
from ditkit_core.errors import UserError

SIDE = 32
"""Side of a thumbnail, in pixels."""

CUT_LEVELS = 12.0
"""Smallest difference of two frames with a cut between them."""
CUT_RATIO = 4.0
"""Smallest ratio of the difference at a cut to the usual difference around it."""
STILL_LEVELS = 1.0
"""A clip does not move if all its frames differ from the first by less."""
FROZEN_LEVELS = 0.05
"""Frames that differ by less count as the same image."""
HD_LINES = 720
"""Height from which on videos are usually BT.709."""
BLANK_LEVELS = 1.5
"""Standard deviation below which a frame counts as one colour."""

NEAR_BITS = 15
"""Largest distance of two fingerprints of 189 bits that may show the same clip; fingerprints of
different clips are about 95 apart."""
NEAR_LEVELS = 12.0
"""Largest difference of the colours of near-duplicates."""

_AROUND = 4
_HASH_SIDE = 8
_BANDS = NEAR_BITS + 1  # of two prints within NEAR_BITS at least one band is equal
_MOST_COMPARED = 16  # bounds the time per clip: a dataset of look-alikes would need all pairs
_ONES = np.array([byte.bit_count() for byte in range(256)])

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A perceptual hash of the first, middle and last frame of a window; near-duplicates have
    nearly the same."""

    bits: NDArray[np.bool_] = field(repr=False)
    """Signs of the lowest frequencies of each frame's brightness against their median, 63 a
    frame."""
    colours: Floats = field(repr=False)
    """[3, 8, 8, 3] levels."""

    def near(self, other: "Fingerprint") -> bool:
        """Whether both may show the same clip."""
        if np.count_nonzero(self.bits != other.bits) > NEAR_BITS:
            return False
        return float(np.abs(self.colours - other.colours).mean()) <= NEAR_LEVELS


@dataclass(frozen=True, kw_only=True)
class WindowLook:
    """Measurements on the thumbnails of a window."""

    frames: int
    cuts: tuple[float, ...]
    """Times at which another shot begins, in seconds since the file's first frame, to the precision
    of a frame."""
    blank: int
    """Number of frames of one colour."""
    is_black: bool
    """Whether there are blank frames and all of them are black."""
    is_still: bool
    """Whether a clip of several frames does not move at all."""
    frozen_seconds: float
    """Longest time that one frame is frozen, in a clip that otherwise moves."""
    fingerprint: Fingerprint | None
    """None if all frames are blank: blank frames would all look alike."""


def look_at_window(
    path: Path, *, frames: int, fps: float, start_seconds: float = 0.0
) -> WindowLook:
    """Decode a window at low size and measure it.

    Args:
        frames: Frames of the window; 1 for an image.
        fps: Frames per second of the window; 0 for an image.
        start_seconds: Time of its first frame, counted from the file's first.
    """
    images = stored_images(path, frames=frames, fps=fps, start_seconds=start_seconds)
    return judge_thumbnails(
        np.stack(list(_thumbnails(images))), fps=fps, start_seconds=start_seconds
    )


def thumbnail(image: RgbImage) -> Floats:
    """An image resized to [32, 32, 3], in levels; the aspect ratio is not kept."""
    from PIL import Image

    small = Image.fromarray(np.ascontiguousarray(image)).resize(
        (SIDE, SIDE), Image.Resampling.BOX, reducing_gap=2.0
    )
    return np.asarray(small, dtype=np.float32)


def _thumbnails(images: Iterable[RgbImage]) -> Iterator[Floats]:
    last, small = None, None
    for image in images:
        # the decoder yields the same object again for a repeated frame
        if image is not last or small is None:
            last, small = image, thumbnail(image)
        yield small


def judge_thumbnails(thumbnails: Floats, *, fps: float, start_seconds: float = 0.0) -> WindowLook:
    """Measure a window on its thumbnails [frames, 32, 32, 3].

    Args:
        thumbnails: In levels of 0…255.
        fps: Frames per second; 0 for a still image.
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
        cuts=tuple(start_seconds + (index + 1) / fps for index in _cuts(thumbnails, steps)),
        blank=int(blank.sum()),
        is_black=bool(blank.any()) and float(thumbnails[blank].max()) < 24,
        is_still=is_still,
        frozen_seconds=0.0 if is_still or not fps else longest / fps,
        fingerprint=None if blank.all() else window_fingerprint(thumbnails[~blank]),
    )


def _differences(a: Floats, b: Floats) -> Floats:
    return np.abs(a - b).mean(axis=(1, 2, 3))


def _cuts(thumbnails: Floats, steps: Floats) -> Iterator[int]:
    """Indices of steps from one shot to another: large, much larger than the steps around, and not
    a flash of one frame."""
    for index, step in enumerate(steps):
        around = np.concatenate(
            [steps[max(0, index - _AROUND) : index], steps[index + 1 : index + 1 + _AROUND]]
        )
        # Repeated frames (24 fps shown at 30) would lower the usual difference.
        around = around[around >= FROZEN_LEVELS]
        usual = float(np.median(around)) if len(around) else 0.0
        # In a fast pan all steps are as large as a cut; a cut is one large step among small ones.
        if step < CUT_LEVELS or step < CUT_RATIO * usual:
            continue
        flashed = [
            float(np.abs(thumbnails[after] - thumbnails[before]).mean()) < step / 2
            for before, after in ((index, index + 2), (index - 1, index + 1))
            if before >= 0 and after < len(thumbnails)
        ]
        if not any(flashed):
            yield index


@cache
def _cosines() -> Floats:
    """The rows of the discrete cosine transform with the lowest frequencies."""
    positions = np.arange(SIDE) + 0.5
    rows = np.cos(np.pi / SIDE * np.arange(_HASH_SIDE)[:, None] * positions)
    return rows.astype(np.float32)


def window_fingerprint(thumbnails: Floats) -> Fingerprint:
    """The fingerprint of a window.

    Source: the perceptual hash by DCT (Zauner, "Implementation and Benchmarking of Perceptual Image
    Hash Functions", 2010), here of three frames.
    """
    chosen = thumbnails[[0, len(thumbnails) // 2, -1]]
    cosines = _cosines()
    # Without the mean brightness: it is above the median in nearly every frame, so its bit would
    # tell nothing.
    frequencies = (cosines @ chosen.mean(axis=3) @ cosines.T).reshape(3, -1)[:, 1:]
    bits = frequencies > np.median(frequencies, axis=1, keepdims=True)
    side = SIDE // _HASH_SIDE
    colours = chosen.reshape(3, _HASH_SIDE, side, _HASH_SIDE, side, 3).mean(axis=(2, 4))
    return Fingerprint(bits=bits.reshape(-1), colours=colours)


def near_duplicates(prints: Mapping[str, tuple[Hashable, Fingerprint]]) -> list[tuple[str, ...]]:
    """Groups of windows that look nearly alike, in the given order.

    The time is linear in their number. The bits of a fingerprint are split into bands, and
    near-duplicates have at least one equal band; so candidates are found by band, and each window
    is compared with at most 16 others per band. Later windows are compared with the first of a
    group only.

    Args:
        prints: Maps each name to its source (a file, whose own windows are not duplicates of each
            other) and its fingerprint.
    """
    if not prints:
        return []
    names, groups = list(prints), dict[str, list[str]]()
    bits = np.stack([print.bits for _, print in prints.values()])
    packed = np.packbits(bits, axis=1)
    pieces = np.array_split(bits, _BANDS, axis=1)
    values = np.stack([piece @ (1 << np.arange(piece.shape[1])) for piece in pieces], axis=1)
    # For each band and value of its bits, a ring of the latest windows with it: a fixed size, so
    # that each window takes the same time.
    latest = np.full((_BANDS, int(values.max()) + 1, _MOST_COMPARED), -1)
    count = np.zeros(latest.shape[:2], int)
    every = np.arange(_BANDS)
    for index, name in enumerate(names):
        source, fingerprint = prints[name]
        candidates = latest[every, values[index]].ravel()
        far = _ONES[packed[candidates] ^ packed[index]].sum(axis=1) > NEAR_BITS
        near = (names[other] for other in np.unique(candidates[~far & (candidates >= 0)]))
        original = next(
            (
                other
                for other in near
                if prints[other][0] != source and fingerprint.near(prints[other][1])
            ),
            None,
        )
        if original is not None:
            groups.setdefault(original, [original]).append(name)
            continue
        latest[every, values[index], count[every, values[index]] % _MOST_COMPARED] = index
        count[every, values[index]] += 1
    return [tuple(group) for group in groups.values()]


def without_matrix(rows: Sequence[FileRow]) -> list[str]:
    """The HD videos among these files that do not name their matrix of colours."""
    files = []
    for row in rows:
        path = Path(row.file)
        with suppress(UserError):  # damaged after its windows, which is reported already
            if row.seconds and row.height >= HD_LINES and path.is_file() and has_no_matrix(path):
                files.append(row.file)
    return files
