"""Rotary angles over (frame, height, width), from fp64 positions."""

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.nn.rope import axis_angles

THETA = 10_000.0


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """Number of rotated pairs of each axis (frame, height, width); 22, 21, 21 for a head of 128.

    Source: the frequency split in Wan-Video/Wan2.1, wan/modules/model.py: real sizes d − 4⌊d/6⌋, 2⌊d/6⌋, 2⌊d/6⌋.
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
        step: Positions per frame. The last frame is at the last position of its step, as in WanToDance.
    """
    parts = []
    for axis, (size, pairs) in enumerate(zip(grid, axis_pairs(head_dim), strict=True)):
        spacing = 1 if axis else step
        starts = torch.arange(0, spacing * (size - 1), spacing, device=device)
        last = torch.arange(spacing * size - 1, spacing * size, device=device)
        angles = axis_angles(torch.cat([starts, last]), pairs, THETA)
        shape = [1, 1, 1, pairs]
        shape[axis] = size
        parts.append(angles.reshape(shape).expand(*grid, pairs))
    return torch.cat(parts, -1).flatten(0, 2)
