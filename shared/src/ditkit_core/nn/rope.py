"""Positions and timesteps as angles, in fp64, and the rotation by them.

`embed` computes the tables, and they travel in the carry: a buffer would be rounded by a
`.to(dtype)`, and an attribute would stay on another device. fp64 matters for the angles only; next
to bf16 q and k, a rotation in fp32 loses nothing.
"""

import math

import torch
from jaxtyping import Float, Num
from torch import Tensor

_MAX_PERIOD = 10_000.0


def axis_angles(
    positions: Num[Tensor, "*axis"], pairs: int, theta: float
) -> Float[Tensor, "*axis pairs"]:
    """Angles of positions along one axis: position · theta^(-i / pairs) for each rotated pair i of
    the axis.

    Args:
        positions: Positions in tokens or frames.
        pairs: Number of pairs of features for this axis.
        theta: Base of the frequencies.

    Returns:
        fp64 angles, in radians.
    """
    frequencies = theta ** -(
        torch.arange(pairs, dtype=torch.float64, device=positions.device) / pairs
    )
    return positions.double()[..., None] * frequencies


def timestep_features(
    timestep: Float[Tensor, "*batch"], dim: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "*batch dim"]:
    """Sinusoidal features of t = 1000 · σ: cosines, then sines, in `dtype`, or in fp32 if that is
    wider.

    fp32 costs an error of at most 7.6e-5; a timestep that is rounded to bf16 costs 1.7, and no
    later precision restores it.

    Args:
        timestep: t, 0 to 1000; rounded to `dtype` first.
        dim: Number of features; even.
        dtype: The dtype of `Precision.timestep`.

    Source: `sinusoidal_embedding_1d` in Wan-Video/Wan2.1, wan/modules/model.py;
        `timestep_embedding` in black-forest-labs/flux2, src/flux2/model.py.
    """
    if dtype == torch.float64:
        angles = axis_angles(timestep, dim // 2, _MAX_PERIOD)
    else:  # the order of operations of the official FLUX.2 and of diffusers, for the same rounding
        steps = torch.arange(dim // 2, dtype=torch.float32, device=timestep.device)
        frequencies = torch.exp(-math.log(_MAX_PERIOD) * steps / (dim // 2))
        angles = timestep.to(dtype).float()[..., None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def rotary_table(
    angles: Float[Tensor, "tables tokens 1 pairs"], dtype: torch.dtype
) -> Float[Tensor, "tables tokens 1 pairs 2"]:
    """Cosine and sine of each angle, side by side, which `torch.view_as_complex` reads as a
    rotation without a copy."""
    return torch.stack((angles.cos().to(dtype), angles.sin().to(dtype)), -1)


def rotate(
    x: Float[Tensor, "batch tokens heads head_dim"],
    cos: Float[Tensor, "tables tokens 1 pairs"],
    sin: Float[Tensor, "tables tokens 1 pairs"],
) -> Float[Tensor, "batch tokens heads head_dim"]:
    """Rotate adjacent pairs of features, in the wider dtype of `x` (queries or keys) and the
    tables.

    `tables` is 1 if all samples have one layout, else the number of samples.
    """
    # Not from even and odd features, which would have to be stacked again.
    pairs = x.unflatten(-1, (-1, 2))
    signs = 2 * torch.arange(2, dtype=sin.dtype, device=x.device) - 1
    return (pairs * cos[..., None] + pairs.flip(-1) * (sin[..., None] * signs)).flatten(-2)
