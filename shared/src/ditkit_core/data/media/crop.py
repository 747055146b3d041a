"""Where an image is cropped."""

from typing import NamedTuple


class Crop(NamedTuple):
    """Where the part is that remains of an image, as shares of what is cut away that are to its
    left and above it."""

    right: float = 0.5
    """From 0, the left end, to 1, the right end."""
    down: float = 0.5
    """From 0, the upper end, to 1, the lower end."""


CENTRE = Crop()
