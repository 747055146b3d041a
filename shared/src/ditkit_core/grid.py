"""Pictures side by side in one."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

GAP = 4
"""Pixels of white between two pictures."""


def grid(pictures: Sequence[Float[Tensor, "3 _ _"]], *, columns: int = 0) -> Float[Tensor, "3 height width"]:
    """Lay pictures out row by row, each in the middle of a cell as large as the largest of them.

    Args:
        pictures: At least one, values in [0, 1].
        columns: How many lie side by side; 0 makes rows and columns about as many.
    """
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    height, width = max(p.shape[1] for p in pictures), max(p.shape[2] for p in pictures)
    whole = torch.ones(3, rows * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        top = row * (height + GAP) + (height - picture.shape[1]) // 2
        left = column * (width + GAP) + (width - picture.shape[2]) // 2
        whole[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
    return whole
