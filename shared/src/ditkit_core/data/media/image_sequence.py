"""A folder of numbered images as one clip."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.data.media import image as still
from ditkit_core.data.media.files import is_regular, read_dataset_text, refuse_shortage
from ditkit_core.data.side_names import entries
from ditkit_core.errors import UserError
from ditkit_core.io.files import inside

FPS_FILE = "fps.txt"
"""File in the folder with the number of images per second."""
_ROUNDING = 0.01
"""Tolerance in frames when a time is converted to an index: in floats, 3 / 24 * 24 need not be
3."""
_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.ASCII | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """The images of a clip."""

    files: Sequence[Path]
    """The image files in order, at least two."""
    fps: float
    """Images per second; 0 means that every image is one frame at whatever rate the clip is
    read."""

    def size(self) -> tuple[int, int]:
        """Height and width of every image in pixels, from their headers."""
        sizes = {still.image_size(file): file.name for file in reversed(self.files)}
        if len(sizes) > 1:
            one, other = list(sizes.values())[:2]
            raise UserError(
                f"{self.files[0].parent}: {one} and {other} have different sizes; make all images "
                f"of a clip the same size"
            )
        return next(iter(sizes))

    def frames(self, fps: float) -> int:
        """Number of frames at a frame rate."""
        return max(1, math.ceil(len(self.files) * fps / (self.fps or fps) - _ROUNDING))

    def at(
        self, times: Sequence[float], fps: float, *, as_stored: bool = False
    ) -> Iterator[still.RgbImage]:
        """The image on screen at each time, in seconds since the first image. The folder's own rate
        takes precedence over the clip's, `fps`."""
        for time in times:
            position = time * (self.fps or fps)
            if position >= len(self.files):
                raise UserError(
                    f"{self.files[0].parent} has {len(self.files)} images, but a frame at "
                    f"{time:.2f} s was requested; lower data.frames"
                )
            index = min(math.floor(position + _ROUNDING), len(self.files) - 1)
            yield still.read_image(self.files[index], as_stored=as_stored)


def numbered(names: Sequence[str]) -> dict[int, str]:
    """The images among the names of a folder by number, in order, if the folder is one clip; empty
    if it is not.

    A folder is a clip if it has at least two images, all with the same prefix and a number, and no
    other file but `fps.txt` and hidden ones.
    """
    images: dict[tuple[str, int], str] = {}
    for name in names:
        path = Path(name)
        if name.startswith(".") or name.lower() == FPS_FILE:
            continue
        match = _NUMBERED.fullmatch(path.stem)
        if match is None or path.suffix.lower() not in still.SUFFIXES:
            return {}
        # 1.png and 01.png: the order would be a guess
        if images.setdefault((match[1], int(match[2])), name) != name:
            return {}
    if len(images) < 2 or len({prefix for prefix, _ in images}) > 1:
        return {}
    return {number: images[prefix, number] for prefix, number in sorted(images)}


def open_folder(folder: Path) -> ImageFolder:
    """Open a folder of numbered images; no number may be missing."""
    try:
        images = numbered(sorted(os.listdir(folder)))
    except OSError as error:
        refuse_shortage(folder, error)
        raise UserError(
            f"{folder} cannot be read ({error.strerror}); correct its permissions or remove it"
        ) from error
    if not images:
        raise UserError(
            f"{folder} does not contain only numbered images (0001.png, 0002.png, …); rename the "
            f"images or move other files away"
        )
    for number, (stored_number, name) in enumerate(images.items(), start=min(images)):
        if number != stored_number:
            # A missing image is an error and not skipped: motion would jump there, and nothing
            # would show it.
            raise UserError(
                f"{folder} has no image {number}, before {name}; add it, or number the images "
                f"without a gap"
            )
    files = [folder / name for name in images.values()]
    for file in [*files, *_rate_files(folder)]:
        if not is_regular(file):
            raise UserError(f"{file} is not a regular file; remove it from the images")
    return ImageFolder(files=files, fps=_fps(folder))


def check_inside(images: Path, folder: Path, *, allow_outside: bool) -> None:
    """Refuse images (and `fps.txt`) that are links to files outside a folder."""
    for file in [*open_folder(images).files, *_rate_files(images)]:
        inside(folder, os.path.abspath(file), allow_outside=allow_outside)


def _rate_files(folder: Path) -> list[Path]:
    return [folder / name for name in entries(folder) if name.lower() == FPS_FILE]


def _fps(folder: Path) -> float:
    """The rate in `fps.txt`; 0 if there is no such file."""
    files = _rate_files(folder)
    if len(files) > 1:
        raise UserError(
            f"{' and '.join(map(str, files))} are both the rate of these images; remove one of them"
        )
    if not files or not files[0].exists():
        return 0.0
    path = files[0]
    try:
        # `check_inside` has looked where it is
        fps = float(read_dataset_text(folder, path.name, allow_outside=True))
    except ValueError:
        fps = 0.0
    if not 0 < fps <= 1000:
        raise UserError(
            f"{path} does not contain a number of images per second; write one number, such as 24"
        )
    return fps
