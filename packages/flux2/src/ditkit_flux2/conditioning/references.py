"""The size at which a reference image, the image to edit, is encoded."""

from ditkit_core.families.references import cropped_size

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
    return cropped_size(height, width, _MAX_PIXELS_OF_ONE if count == 1 else _MAX_PIXELS_OF_SEVERAL)
