"""Reference images, the images to edit: their latents in an item, and the size at which they are
encoded."""

import math
from collections.abc import Callable, Mapping
from itertools import count, takewhile

import torch
from torch import Tensor

from ditkit_core.errors import UserError

PATCH = 16
"""Pixels on a side of the square that becomes one token."""

_MIN_SIDE = 64
_MAX_VISIBLE_ASPECT = 200
_MAX_ASPECT = 8


def numbered_tensors(item: Mapping[str, Tensor], name: str, device: torch.device) -> list[Tensor]:
    """The tensors `name.0`, `name.1`, … of a training item, in order, on a device: with the name
    `reference`, latents of its reference images."""
    keys = takewhile(item.__contains__, (f"{name}.{index}" for index in count()))
    return [item[key].to(device) for key in keys]


def cropped_size(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Height and width at which a reference image is encoded, in pixels: shrunk to at most
    `max_pixels` in its aspect ratio, its sides cropped to multiples of 16. It is never enlarged.

    Args:
        height: Height of the file's image in pixels.
        width: Width of the file's image in pixels.
        max_pixels: Most pixels of the shrunk image.

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
    scale = min(1.0, math.sqrt(max_pixels / (height * width)))
    return int(height * scale) // PATCH * PATCH, int(width * scale) // PATCH * PATCH


def area_size(area: int, step: int = 32) -> Callable[[int, int, int], tuple[int, int]]:
    """A `DataSpec.reference_size` or `picture_size`: a reference enlarged or shrunk to about `area`
    pixels in its aspect ratio, its sides multiples of `step`. It raises UserError for one longer
    than 200:1.

    Source: `calculate_dimensions` of diffusers' pipeline_qwenimage_edit.py, and `smart_resize` of
        transformers, which refuses longer ones.
    """

    def size(height: int, width: int, count: int) -> tuple[int, int]:
        if max(height, width) > _MAX_VISIBLE_ASPECT * min(height, width):
            raise UserError(
                f"a reference image of {width}x{height} pixels is too long; crop it to at most "
                f"{_MAX_VISIBLE_ASPECT}:1"
            )
        long = math.sqrt(area * (width / height))
        return round(long / (width / height) / step) * step, round(long / step) * step

    return size
