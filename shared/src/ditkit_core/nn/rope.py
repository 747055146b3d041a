"""Positions and times as angles, in fp64, and the rotation by them.

Tables are computed by `embed` and travel in the carry: a buffer would be rounded by a `.to(dtype)`, an attribute would stay behind on
another device. fp64 matters for the angles only; a rotation in fp32 loses nothing beside bf16 q and k.
"""

import math

import torch
from jaxtyping import Float, Num
from torch import Tensor

_MAX_PERIOD = 10_000.0


def axis_angles(positions: Num[Tensor, "*axis"], pairs: int, theta: float) -> Float[Tensor, "*axis pairs"]:
    """fp64 angles of positions along one axis: position · theta^(-i / pairs) for each of the axis's rotated pairs."""
    frequencies = theta ** -(torch.arange(pairs, dtype=torch.float64, device=positions.device) / pairs)
    return positions.double()[..., None] * frequencies


def timestep_features(
    timestep: Float[Tensor, "*batch"], dim: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*batch dim"]:
    """Sinusoidal features of t = 1000 · σ: cosines, then sines, in `dtype`, or in fp32 if that is wider.

    fp32 here costs 7.6e-5 at worst; a timestep rounded to bf16 costs 1.7, which nothing later repairs.

    Args:
        timestep: t, which is rounded to `dtype` first.
        dim: Number of features; even.
        dtype: Of the place `timestep`.

    Source: `sinusoidal_embedding_1d` in Wan-Video/Wan2.1, wan/modules/model.py; `timestep_embedding` in
    black-forest-labs/flux2, src/flux2/model.py.
    """
    if dtype == torch.float64:
        angles = axis_angles(timestep, dim // 2, _MAX_PERIOD)
    else:  # in this order of operations, as the official FLUX.2 and diffusers have it
        steps = torch.arange(dim // 2, dtype=torch.float32, device=timestep.device)
        frequencies = torch.exp(-math.log(_MAX_PERIOD) * steps / (dim // 2))
        angles = timestep.to(dtype).float()[..., None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def rotate(
    x: Float[Tensor, "batch tokens heads head_dim"],
    cos: Float[Tensor, "tables tokens 1 pairs"],
    sin: Float[Tensor, "tables tokens 1 pairs"],
) -> Float[Tensor, "batch tokens heads head_dim"]:
    """Rotate adjacent pairs of features, in the tables' dtype or that of `x` if it is wider; `tables` is 1 when all samples share a layout."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
