"""Reading still images with Pillow: upright, in 8-bit sRGB."""

import importlib.util
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ditkit_core.data.media.colours import StoredColours, stored_colours
from ditkit_core.data.media.files import refuse_foreign, refuse_shortage
from ditkit_core.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

RgbImage = NDArray[np.uint8]
"""One upright image: height × width × RGB."""

MOST_PIXELS = 2**27
"""Largest image or frame (11585 x 11585). The header of a tiny file can claim any size, and opening
it would take gigabytes."""

MOST_ASPECT = 1000

_READS_HEIC = importlib.util.find_spec("pillow_heif") is not None
HEIC_SUFFIXES = frozenset({".heic", ".heif"})
"""Extensions of images that only the extra `heic` reads."""
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif"}) | (
    HEIC_SUFFIXES if _READS_HEIC else frozenset()
)

# Pillow detects the format from the content and starts other programs for some (EPS), so only these
# are opened.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "AVIF")

_RAISED_BY_PILLOW = (
    OSError,
    MemoryError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
)
"""What Pillow's readers raise for damaged files, besides its own errors; a TIFF without its
dimensions gives a TypeError."""

# EXIF orientations that rotate the image by 90 degrees, so that height and width swap.
_ROTATED = (5, 6, 7, 8)
_ORIENTATION_TAG = 0x0112
_PHOTOMETRIC_TAG = 262
_WIDTH_TAG, _HEIGHT_TAG = 256, 257

_PNG_MARK = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
"""Chunks that may have EXIF or XMP, and with it the orientation."""
_MOST_CHUNKS = 1_000_000


@contextmanager
def _opened(path: Path) -> Iterator["Image"]:
    """Open an image; Pillow's errors inside the block become one line about this file."""
    from PIL import Image, UnidentifiedImageError

    formats: tuple[str, ...] = _FORMATS
    if path.suffix.lower() in HEIC_SUFFIXES:
        from pillow_heif import register_heif_opener

        register_heif_opener()
        formats = ("HEIF",)
    try:
        with warnings.catch_warnings():
            # check_pixels below has our own limit
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(path, formats=formats)
        with opened as image:
            check_pixels(path, *image.size)
            # Only formats with several images have the attribute. The second image in a phone's MPO
            # is a gain map.
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise UserError(
                    f"{path} is animated or has several pages; convert it to a video (mp4) or one "
                    f"still image"
                )
            # of 32 bits or with a point: nothing says which number is white
            if image.mode in ("I", "F"):
                raise UserError(
                    f"{path} has numbers of 32 bits (mode {image.mode}); convert it to 8 or 16 bits"
                )
            yield image
    except (Image.DecompressionBombError, *_RAISED_BY_PILLOW) as error:
        if isinstance(error, OSError | MemoryError):
            refuse_shortage(path, error)
        refuse_foreign(path, "image")
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "unknown or damaged content" if unknown else " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be read as an image ({reason}); convert it again or remove it"
        ) from error


def check_pixels(path: Path, width: int, height: int, *, most: int = MOST_PIXELS) -> None:
    """Refuse an image with more pixels than any training image has, or that is little more than a
    line."""
    if width * height > most:
        raise UserError(
            f"{path} claims to have {width} x {height} pixels, more than {most} in total; make it "
            f"smaller or remove it"
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise UserError(
            f"{path} has {width} x {height} pixels, an aspect ratio above {MOST_ASPECT}; crop it "
            f"yourself or remove it"
        )


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an upright image in pixels, from its header alone where that has all of
    them."""
    from PIL import Image

    with _opened(path) as image:
        # Of a TIFF, newer versions of Pillow have turned the size already.
        tags = getattr(image, "tag_v2", {})
        width, height = (
            (tags[_WIDTH_TAG], tags[_HEIGHT_TAG]) if image.format == "TIFF" else image.size
        )
        # Pillow decodes a PNG to find what may follow its pixels, and every start of a run asks for
        # the size of each file.
        read = (
            Image.Image.getexif
            if image.format == "PNG" and _ends_with_pixels(path)
            else type(image).getexif
        )
        rotated = read(image).get(_ORIENTATION_TAG) in _ROTATED
    return (width, height) if rotated else (height, width)


def _ends_with_pixels(path: Path) -> bool:
    """Whether a PNG is complete and says nothing after its pixels, by the lengths and kinds of its
    chunks."""
    with path.open("rb") as file:
        file.seek(len(_PNG_MARK))
        has_pixels = False
        for _ in range(_MOST_CHUNKS):
            length, kind = struct.unpack(">I4s", file.read(8).ljust(8, b"\0"))
            if kind == b"IEND":
                return has_pixels
            if kind in (b"\0\0\0\0", *(_PNG_TEXTS if has_pixels else ())):
                return False
            has_pixels |= kind == b"IDAT"
            file.seek(length + 4, os.SEEK_CUR)  # and its checksum
    return False


def image_colours(path: Path) -> StoredColours | None:
    """How a file stores its colours, by its header; None for sRGB."""
    with _opened(path) as image:
        return stored_colours(image, path)


def read_image(path: Path, *, as_stored: bool = False, at_least: int | None = None) -> RgbImage:
    """An upright image in sRGB, height × width × RGB; transparency is composited on white.

    With `as_stored` colours are not converted to sRGB: the values mean something else, as in a
    mask. With `at_least`, sides of this many pixels are enough, and a JPEG is decoded at a fraction
    of its size if that leaves as many.
    """
    from PIL import Image, ImageOps

    with _opened(path) as image:
        if at_least is not None:
            image.draft(None, (at_least, at_least))
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):
            upright = _in_8_bits(
                upright, is_negative=getattr(image, "tag_v2", {}).get(_PHOTOMETRIC_TAG) == 0
            )
        colours = None if as_stored else stored_colours(image, path)
        if colours is not None and colours.to_srgb is not None:
            upright = colours.to_srgb(upright)
        if upright.has_transparency_data:
            rgba = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
        return np.array(upright.convert("RGB"))


def _in_8_bits(image: "Image", *, is_negative: bool) -> "Image":
    """A grey image of 16 bits with 8 bits; in a negative one 0 is white, which Pillow inverts in
    images of 8 bits only."""
    from PIL import Image

    levels = np.asarray(image).astype(np.uint32)
    levels = 65535 - levels if is_negative else levels
    return Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
