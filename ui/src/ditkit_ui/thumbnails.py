"""Small pictures of media files, kept in a cache of the page."""

import os
import threading
from pathlib import Path

from PIL import Image

from ditkit_core.data.media.crop import Crop
from ditkit_core.data.media.image import SUFFIXES, read_image
from ditkit_core.data.media.image_sequence import open_folder
from ditkit_core.data.media.video import frames_at
from ditkit_core.io.files import atomic_write, json_hash

SIDE = 256
"""Longest side in pixels: a tile of the page has half, screens with fine pixels show all."""
_AT_ONCE = threading.Semaphore(2)
"""A run may train on this machine."""


def cache_folder() -> Path:
    """Where thumbnails are kept: in the user's cache, and not next to the pictures."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ditkit" / "thumbnails"


def thumbnail(path: Path) -> Path:
    """The JPEG thumbnail of a picture, or of the first frame of a clip or folder of images; made at
    the first call.

    Raises:
        UserError: If the file cannot be read.
    """
    if path.is_dir():
        path = Path(open_folder(path).files[0])
    status = path.stat()
    key = json_hash([str(path), status.st_size, status.st_mtime_ns, SIDE])
    file = cache_folder() / key[:2] / f"{key}.jpg"
    if not file.exists():
        with _AT_ONCE:
            is_picture = path.suffix.lower() in SUFFIXES
            pixels = read_image(path) if is_picture else next(iter(frames_at(path, [0.0])))
            image = Image.fromarray(pixels)
            image.thumbnail((SIDE, SIDE))
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as temporary:
                image.save(temporary, "JPEG", quality=85)
    return file


def crop_frame(stored: tuple[int, int], trained: tuple[int, int]) -> tuple[float, float]:
    """The shares of height and width that remain where a picture is resized to cover a size and
    cropped to its centre."""
    scale = max(trained[0] / stored[0], trained[1] / stored[1])
    return trained[0] / (scale * stored[0]), trained[1] / (scale * stored[1])


def frame_style(kept: tuple[float, float], crop: Crop) -> str:
    """The frame around what remains of a picture, its shares of height and width, as CSS."""
    tall, wide = kept
    top, left = (1 - tall) * crop.down, (1 - wide) * crop.right
    sizes = {"width": wide, "height": tall, "left": left, "top": top}
    return "; ".join(f"{name}: {100 * share:.2f}%" for name, share in sizes.items())
