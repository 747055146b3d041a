"""Rotary angles over (frame, height, width), from fp64 positions."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor

from ditkit_core.nn.rope import axis_angles

THETA = 10_000.0


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """Number of rotated pairs of each axis (frame, height, width); 22, 21, 21 for a head of 128.

    Source: the frequency split in Wan-Video/Wan2.1, wan/modules/model.py: real sizes d − 4⌊d/6⌋,
    2⌊d/6⌋, 2⌊d/6⌋.
    """
    side = head_dim // 6
    return head_dim // 2 - 2 * side, side, side


def rotary_angles(
    grid: tuple[int, int, int], head_dim: int, device: torch.device, step: int = 1
) -> Float[Tensor, "tokens pairs"]:
    """fp64 angles of every token of a grid, tokens in (frame, height, width) order.

    Args:
        grid: Tokens along each axis.
        head_dim: Width of an attention head.
        device: Device of the angles.
        step: Positions per frame. The last frame is at the last position of its step, as in
            WanToDance.
    """
    positions = []
    for axis, size in enumerate(grid):
        spacing = 1 if axis else step
        starts = torch.arange(0, spacing * (size - 1), spacing, device=device)
        positions.append(
            torch.cat([starts, torch.arange(spacing * size - 1, spacing * size, device=device)])
        )
    return angles_at(positions, head_dim)


def angles_at(
    positions: Sequence[Num[Tensor, " axis"]], head_dim: int
) -> Float[Tensor, "tokens pairs"]:
    """fp64 angles of tokens at all combinations of positions, in (frame, height, width) order.

    Args:
        positions: Positions of the frames, of the rows and of the columns; negative ones rotate the
            other way.
        head_dim: Width of an attention head.
    """
    parts, grid = [], [len(axis) for axis in positions]
    for axis, pairs in enumerate(axis_pairs(head_dim)):
        angles = axis_angles(positions[axis], pairs, THETA)
        shape = [1, 1, 1, pairs]
        shape[axis] = grid[axis]
        parts.append(angles.reshape(shape).expand(*grid, pairs))
    return torch.cat(parts, -1).flatten(0, 2)
