"""Positions over four axes (image, row, column, text row), and their rotary angles."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ditkit_core.nn.rope import axis_angles

REFERENCE_STEP = 10
"""The target image is at 0 on the first axis, the references are at 10, 20, …"""

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


def token_positions(
    text_rows: int, target: Grid, references: Sequence[Grid], device: torch.device
) -> Int[Tensor, "tokens 4"]:
    """Positions of text, target and references, in this order.

    Source: `prc_txt`, `prc_img` and `listed_prc_img` in black-forest-labs/flux2,
    src/flux2/sampling.py.
    """
    grids = [(0, 1, 1, text_rows), (0, *target, 1)]
    grids += [(REFERENCE_STEP * (index + 1), *grid, 1) for index, grid in enumerate(references)]
    parts = []
    for start, *sizes in grids:
        axes = [torch.arange(start, start + 1, device=device)]
        axes += [torch.arange(size, device=device) for size in sizes]
        parts.append(torch.cartesian_prod(*axes))
    return torch.cat(parts)


def rotary_angles(
    positions: Int[Tensor, "tokens 4"], axes: Sequence[int], theta: float
) -> Float[Tensor, "tokens pairs"]:
    """fp64 angles, one for each pair of features; the axes are concatenated along the head's
    features."""
    parts = [axis_angles(positions[:, axis], size // 2, theta) for axis, size in enumerate(axes)]
    return torch.cat(parts, -1)
