"""RMS norms of the residual stream, and a gated unit of two matmuls, in as few passes over memory as
eager mode allows.

Scale or gate of a modulation is one factor with the norm's weight: `scaled_norm`
begins a sub-layer, `normed_sum` adds the norm of its result to the stream. As in `functional.py`
these are autograd functions, which save a matmul's output in its own dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.nn.kernels import ops as kernels
from ditkit_core.nn.kernels.launch import kernels_in_force

Factor = Float[Tensor, "samples rows dim"]
"""The weight of a norm, times what the modulation makes of it: one row for all samples, one for each
sample, or one for each token."""


class OffsetNorm(nn.RMSNorm):
    """An RMS norm whose parameter is its weight minus 1, as some files have it."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps=eps, elementwise_affine=False)
        self.offset = nn.Parameter(torch.zeros(dim))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter in other norms
        """What the normalised features are multiplied by."""
        return 1 + self.offset


def scaled_norm(
    x: Float[Tensor, "batch tokens dim"],
    factor: Factor,
    eps: float,
    norms: torch.dtype,
    result: torch.dtype,
    shift: Factor | None = None,
) -> Float[Tensor, "batch tokens dim"]:
    """The RMS norm of `x`, in the dtype `norms`, times `factor`, plus `shift` if there is one,
    rounded to `result`. Statistics are fp32 or wider; `shift` has the rows and the dtype of
    `factor`."""
    if shift is None and _fused(x, factor, norms):
        return kernels.NormRotation.apply(x, factor[0, 0], None, eps, 1, result).flatten(2)
    out: Tensor = _ScaledNorm.apply(x, factor, shift, eps, norms, result)
    return out


def normed_sum(
    y: Float[Tensor, "batch tokens dim"],
    x: Float[Tensor, "batch tokens dim"],
    factor: Factor,
    eps: float,
    norms: torch.dtype,
) -> Float[Tensor, "batch tokens dim"]:
    """The residual stream `x` plus the RMS norm of `y` times `factor`, rounded once to the dtype of
    `x`."""
    if _fused(y, factor, norms):
        return x + kernels.NormRotation.apply(y, factor[0, 0], None, eps, 1, x.dtype).flatten(2)
    out: Tensor = _NormedSum.apply(y, x, factor, eps, norms)
    return out


def gated_product(
    a: Float[Tensor, "*batch hidden"], b: Float[Tensor, "*batch hidden"]
) -> Float[Tensor, "*batch hidden"]:
    """silu(a) · b. Only `a` and `b` are kept for the backward."""
    out: Tensor = _GatedProduct.apply(a, b)
    return out


def _fused(x: Tensor, factor: Tensor, norms: torch.dtype) -> bool:
    """Whether the core's kernel of norms takes this: it has one row of weights for all samples."""
    is_fp32 = norms == factor.dtype == torch.float32
    return is_fp32 and factor.shape[:2] == (1, 1) and x.dtype.itemsize <= 4 and kernels_in_force(x)


def _statistics(x: Tensor, eps: float, norms: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` normalised, as a tensor of its own in the dtype `norms`, and 1 / rms of each token."""
    wide = x.to(norms).to(torch.promote_types(norms, torch.float32))
    inverse = (
        torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        .square_()
        .div_(x.shape[-1])
        .add_(eps)
        .rsqrt_()
    )
    return torch.mul(wide, inverse).to(norms), inverse


def _times(normed: Tensor, factor: Tensor) -> Tensor:
    """The product, in place where its dtype allows that."""
    fits = torch.promote_types(normed.dtype, factor.dtype) == normed.dtype
    return normed.mul_(factor) if fits else normed * factor


def _gradients(
    gradient: Tensor,
    x: Tensor,
    factor: Tensor,
    inverse: Tensor,
    norms: torch.dtype,
    is_trained: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a norm's input and of its factor. With n = x · r the normalised input and g the
    gradient of n: dx = r · (g - n · mean(g · n))."""
    wide = torch.promote_types(inverse.dtype, factor.dtype)
    normed, g = torch.mul(x.to(norms).to(wide), inverse), gradient.to(wide)
    d_factor = (g * normed).sum_to_size(factor.shape).to(factor.dtype) if is_trained else None
    g = torch.mul(g, factor)
    inner = torch.linalg.vecdot(g, normed).unsqueeze(-1).div_(-x.shape[-1])
    return g.addcmul_(normed, inner).mul_(inverse).to(x.dtype), d_factor


class _ScaledNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        factor: Tensor,
        shift: Tensor | None,
        eps: float,
        norms: torch.dtype,
        result: torch.dtype,
    ) -> Tensor:
        normed, inverse = _statistics(x, eps, norms)
        ctx.norms = norms
        ctx.save_for_backward(x, factor, inverse)
        scaled = _times(normed, factor)
        if shift is not None:
            ctx.shift_shape, ctx.shift_dtype = shift.shape, shift.dtype
            scaled = scaled + shift if scaled.dtype != shift.dtype else scaled.add_(shift)
        return scaled.to(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, factor, inverse = ctx.saved_tensors
        d_x, d_factor = _gradients(gradient, x, factor, inverse, ctx.norms, ctx.needs_input_grad[1])
        d_shift = None
        if ctx.needs_input_grad[2]:
            wide = torch.promote_types(gradient.dtype, ctx.shift_dtype)
            d_shift = gradient.to(wide).sum_to_size(ctx.shift_shape).to(ctx.shift_dtype)
        return d_x, d_factor, d_shift, None, None, None


class _NormedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, factor: Tensor, eps: float, norms: torch.dtype
    ) -> Tensor:
        normed, inverse = _statistics(y, eps, norms)
        ctx.norms = norms
        ctx.save_for_backward(y, factor, inverse)
        wide = torch.promote_types(torch.promote_types(normed.dtype, factor.dtype), x.dtype)
        return torch.addcmul(x.to(wide), normed.to(wide), factor.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        y, factor, inverse = ctx.saved_tensors
        d_y, d_factor = _gradients(gradient, y, factor, inverse, ctx.norms, ctx.needs_input_grad[2])
        return d_y, gradient, d_factor, None, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient * b, a), F.silu(a).mul_(gradient)
