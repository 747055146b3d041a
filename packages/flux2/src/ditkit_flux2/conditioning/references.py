"""The size at which a reference image, the image to edit, is encoded."""

import math

from ditkit_core.errors import UserError

PATCH = 16
"""Pixels on a side of the square that becomes one token."""

_MIN_SIDE = 64
_MAX_ASPECT = 8
_MAX_PIXELS_OF_ONE, _MAX_PIXELS_OF_SEVERAL = 2024**2, 1024**2


def reference_size(height: int, width: int, count: int) -> tuple[int, int]:
    """Height and width at which a reference image is encoded, in pixels.

    As in the official code: an image is shrunk to at most 2024² pixels, or to 1024² if there are
    several. It keeps its aspect ratio, its sides are cropped to multiples of 16, and it is never
    enlarged.

    Args:
        height: Height of the file's image in pixels.
        width: Width of the file's image in pixels.
        count: Number of references that the sample has.

    Raises:
        UserError: If the image is smaller than 64 pixels on a side, or longer than 8:1.
    """
    if min(height, width) < _MIN_SIDE:
        raise UserError(
            f"a reference image of {width}x{height} pixels is too small; each side needs at least "
            f"{_MIN_SIDE}"
        )
    if max(height, width) > _MAX_ASPECT * min(height, width):
        raise UserError(
            f"a reference image of {width}x{height} pixels is too long; crop it to at most "
            f"{_MAX_ASPECT}:1"
        )
    most = _MAX_PIXELS_OF_ONE if count == 1 else _MAX_PIXELS_OF_SEVERAL
    scale = min(1.0, math.sqrt(most / (height * width)))
    return int(height * scale) // PATCH * PATCH, int(width * scale) // PATCH * PATCH
