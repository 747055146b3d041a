"""A folder of numbered images as a clip: which file is shown when."""

import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.data.media import image as still
from ditkit_core.errors import UserError
from ditkit_core.io.files import inside

FPS_FILE = "fps.txt"
"""Says how many images of a folder are shown in a second."""
_ROUNDING = 0.01
"""Part of a frame by which a time may miss it: 3 / 24 * 24 need not be 3."""
_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.ASCII | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """The images of a clip."""

    files: Sequence[Path]
    """In order, at least two."""
    fps: float
    """Images in a second; 0: each is a frame of whatever clip is read."""

    def size(self) -> tuple[int, int]:
        """Height and width of every image in pixels, from their headers.

        Raises:
            UserError: If one cannot be read, or they are of different sizes.
        """
        sizes = {still.image_size(file): file.name for file in reversed(self.files)}
        if len(sizes) > 1:
            one, other = list(sizes.values())[:2]
            raise UserError(
                f"{self.files[0].parent}: {one} and {other} are of different sizes; make all images of a clip one size"
            )
        return next(iter(sizes))

    def frames(self, fps: float) -> int:
        """Frames that there are at a rate."""
        return max(1, math.ceil(len(self.files) * fps / (self.fps or fps) - _ROUNDING))

    def at(self, times: Sequence[float], fps: float) -> Iterator[still.Picture]:
        """The image on screen at each time.

        Args:
            times: Seconds since the first image.
            fps: The clip's frames per second, which the folder's own rate goes before.

        Raises:
            UserError: If one cannot be read, or the folder ends before the last time.
        """
        for time in times:
            place = time * (self.fps or fps)
            if place >= len(self.files):
                raise UserError(
                    f"{self.files[0].parent} has {len(self.files)} images, a frame at {time:.2f} s was asked for; lower data.frames"
                )
            yield still.read_image(self.files[min(math.floor(place + _ROUNDING), len(self.files) - 1)])


def numbered(names: Sequence[str]) -> list[str]:
    """The images among names in the order of their numbers, if all images are numbered alike and nothing else is there but `fps.txt`.

    Args:
        names: Of the files of a folder; hidden ones do not count.

    Returns:
        At least two names; none if these are no clip.
    """
    images: dict[tuple[str, int], str] = {}
    for name in names:
        path = Path(name)
        if name.startswith(".") or name == FPS_FILE:
            continue
        match = _NUMBERED.fullmatch(path.stem)
        if match is None or path.suffix.lower() not in still.SUFFIXES:
            return []
        if images.setdefault((match[1], int(match[2])), name) != name:
            return []
    if len(images) < 2 or len({prefix for prefix, _ in images}) > 1:
        return []
    return [images[place] for place in sorted(images)]


def open_folder(folder: Path) -> ImageFolder:
    """The images of a folder; no number may be missing.

    Raises:
        UserError: If it is no folder of numbered images, or `fps.txt` says no rate.
    """
    try:
        names = numbered(sorted(os.listdir(folder)))
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}); correct its permissions or remove it") from error
    if not names:
        raise UserError(
            f"{folder} is no folder of numbered images (0001.png, 0002.png, …) and of nothing else; rename them"
        )
    numbers = [int(Path(name).stem[len(_prefix(name)) :]) for name in names]
    for number, there, name in zip(range(numbers[0], numbers[-1] + 1), numbers, names, strict=False):
        if number != there:
            raise UserError(f"{folder} has no image {number}, before {name}; add it, or number them without a gap")
    files = [folder / name for name in names]
    for file in [*files, *_rate_files(folder)]:
        _check_regular(file)
    return ImageFolder(files=files, fps=_fps(folder))


def check_inside(images: Path, folder: Path, *, allow_outside: bool) -> None:
    """Refuse images, and what says their rate, that are links out of a folder.

    Args:
        images: The folder of images.
        folder: What they must stay in.
        allow_outside: Whether they need not.

    Raises:
        UserError: Naming the file; or as `open_folder`.
    """
    for file in [*open_folder(images).files, *_rate_files(images)]:
        inside(folder, os.path.abspath(file), allow_outside=allow_outside)


def _rate_files(folder: Path) -> list[Path]:
    path = folder / FPS_FILE
    return [path] if os.path.lexists(path) else []


def _check_regular(path: Path) -> None:
    """Refuse what is no file: opening a named pipe waits until somebody writes to it.

    Raises:
        UserError: Naming it.
    """
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its permissions or remove it") from error
    raise UserError(f"{path} is no file; remove it from the images")


def _prefix(name: str) -> str:
    match = _NUMBERED.fullmatch(Path(name).stem)
    assert match is not None
    return match[1]


def _fps(folder: Path) -> float:
    """What `fps.txt` says; 0 without one."""
    path = folder / FPS_FILE
    if not path.exists():
        return 0.0
    try:
        fps = float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        fps = 0.0
    if not 0 < fps <= 1000:
        raise UserError(f"{path} does not say how many images are shown in a second; write one number, such as 24")
    return fps
