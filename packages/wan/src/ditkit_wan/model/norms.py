"""The layer norms that have weights of their own."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def affine_norm(norm: nn.LayerNorm, x: Float[Tensor, "*batch dim"], dtype: torch.dtype) -> Float[Tensor, "*batch dim"]:
    """The norm of `x`, computed in and returned as `dtype`, whatever its parameters are stored in."""
    return F.layer_norm(x.to(dtype), norm.normalized_shape, norm.weight.to(dtype), norm.bias.to(dtype), norm.eps)
