"""Rotary positions over (frame, height, width), from fp64 angles.

The tables are computed by `embed` and travel in the carry: a buffer would be rounded by a `.to(dtype)`, an attribute would
stay behind on another device. fp64 matters for the angles only; a rotation in fp32 loses nothing beside bf16 q and k.
"""

import torch
from jaxtyping import Float
from torch import Tensor

THETA = 10_000.0


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """How many rotated pairs each axis (frame, height, width) gets; 22, 21, 21 for a head of 128.

    Source: the frequency split in Wan-Video/Wan2.1, wan/modules/model.py: real sizes d − 4⌊d/6⌋, 2⌊d/6⌋, 2⌊d/6⌋.
    """
    side = head_dim // 6
    return head_dim // 2 - 2 * side, side, side


def rotary_angles(grid: tuple[int, int, int], head_dim: int, device: torch.device) -> Float[Tensor, "tokens pairs"]:
    """fp64 angles of every token of a grid, tokens in (frame, height, width) order."""
    parts = []
    for axis, (size, pairs) in enumerate(zip(grid, axis_pairs(head_dim), strict=True)):
        frequencies = THETA ** -(torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
        angles = torch.arange(size, dtype=torch.float64, device=device)[:, None] * frequencies
        shape = [1, 1, 1, pairs]
        shape[axis] = size
        parts.append(angles.reshape(shape).expand(*grid, pairs))
    return torch.cat(parts, -1).flatten(0, 2)


def rotate(
    x: Float[Tensor, "batch tokens heads head_dim"],
    cos: Float[Tensor, "tables tokens 1 pairs"],
    sin: Float[Tensor, "tables tokens 1 pairs"],
) -> Float[Tensor, "batch tokens heads head_dim"]:
    """Rotate adjacent pairs of features, in the tables' dtype; `tables` is 1 when all samples share a grid."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
