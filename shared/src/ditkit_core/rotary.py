"""Positions and times as angles, in fp64, and the rotation by them.

Tables are computed by `embed` and travel in the carry: a buffer would be rounded by a `.to(dtype)`, an attribute would stay behind on
another device. fp64 matters for the angles only; a rotation in fp32 loses nothing beside bf16 q and k.
"""

import torch
from jaxtyping import Float, Num
from torch import Tensor


def axis_angles(positions: Num[Tensor, "*axis"], pairs: int, theta: float) -> Float[Tensor, "*axis pairs"]:
    """fp64 angles of positions along one axis: position · theta^(-i / pairs) for each of the axis's rotated pairs."""
    frequencies = theta ** -(torch.arange(pairs, dtype=torch.float64, device=positions.device) / pairs)
    return positions.double()[..., None] * frequencies


def timestep_features(timestep: Float[Tensor, "*batch"], dim: int) -> Float[Tensor, "*batch dim"]:
    """Sinusoidal features of t = 1000 · σ in fp64: cosines, then sines.

    fp32 here costs 7.6e-5 at worst; a timestep rounded to bf16 costs 1.7, which nothing later repairs.

    Source: `sinusoidal_embedding_1d` in Wan-Video/Wan2.1, wan/modules/model.py; `timestep_embedding` in
    black-forest-labs/flux2, src/flux2/model.py.
    """
    angles = axis_angles(timestep, dim // 2, 10_000.0)
    return torch.cat([angles.cos(), angles.sin()], -1)


def rotate(
    x: Float[Tensor, "batch tokens heads head_dim"],
    cos: Float[Tensor, "tables tokens 1 pairs"],
    sin: Float[Tensor, "tables tokens 1 pairs"],
) -> Float[Tensor, "batch tokens heads head_dim"]:
    """Rotate adjacent pairs of features, in the tables' dtype; `tables` is 1 when all samples share a layout."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
