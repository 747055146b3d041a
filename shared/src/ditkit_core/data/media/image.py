"""Still images through Pillow: upright, in 8-bit RGB."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ditkit_core.errors import UserError
from ditkit_core.io.files import atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image

Picture = NDArray[np.uint8]
"""One upright picture: height × width × RGB."""

MOST_PIXELS = 2**27
"""Of a picture or a frame, 11585 in the square. A file of a few bytes can say that it has any number, and would take gigabytes to open."""

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
"""What files of still images are called."""

# Pillow goes by content, and for some formats starts other programs (EPS): only these are opened.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")

# EXIF orientations that turn the picture by a quarter.
_LYING = (5, 6, 7, 8)
_ORIENTATION_TAG = 0x0112


@contextmanager
def _opened(path: Path) -> Iterator["Image"]:
    """Open an image; Pillow's errors inside the block become one line about this file."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is ours, below
            opened = Image.open(path, formats=_FORMATS)
        with opened as image:
            check_pixels(path, *image.size)
            # Only formats that can hold several pictures have the attribute; a phone's MPO holds a gain map besides.
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise UserError(
                    f"{path} is animated or has several pages; convert it to a video (mp4) or one still image"
                )
            if image.mode.startswith(("I", "F")):
                raise UserError(f"{path} has more than 8 bits per pixel (mode {image.mode}); convert it to 8-bit RGB")
            yield image
    # Pillow raises SyntaxError and ValueError for some damaged files.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "unknown or damaged content" if unknown else " ".join(str(error).split())
        raise UserError(f"{path} cannot be read as an image ({reason}); convert it again or remove it") from error


def check_pixels(path: Path, width: int, height: int, *, most: int = MOST_PIXELS) -> None:
    """Refuse more pixels than any picture that models are trained on has.

    Raises:
        UserError: Naming the file.
    """
    if width * height > most:
        raise UserError(
            f"{path} says that it has {width} x {height} pixels, more than {most} in all; make it smaller or remove it"
        )


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an upright image in pixels, from its header alone."""
    with _opened(path) as image:
        width, height = image.size
        lying = image.getexif().get(_ORIENTATION_TAG) in _LYING
    return (width, height) if lying else (height, width)


def read_image(path: Path) -> Picture:
    """An upright image, height × width × RGB; a transparent one lies on white.

    Raises:
        UserError: If the file cannot be read.
    """
    from PIL import Image, ImageOps

    with _opened(path) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:
            rgba = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
        return np.array(upright.convert("RGB"))


def save_image(path: Path, picture: Picture) -> None:
    """Write a png atomically.

    Raises:
        UserError: If the file cannot be written.
    """
    from PIL import Image

    with atomic_write(path) as temporary:
        Image.fromarray(picture).save(temporary, format="PNG")
