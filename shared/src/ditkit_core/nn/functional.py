"""The elementwise work between a block's matmuls, in as few passes over memory as eager mode
allows.

These are autograd functions, because composed eager operations pay for every pass twice, in time
and in saved tensors. The plain composition of RMS norm and rotation reads and writes the fp32 copy
of q eleven times in the forward, these functions five times, and they save the matmul's own output
instead of fp32 copies.

With `kernels = "triton"` in force, what computes in fp32 runs as a kernel of `nn/kernels/` instead,
which passes over memory once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.nn.context import device_kind
from ditkit_core.nn.kernels import ops as kernels
from ditkit_core.nn.kernels.launch import kernels_in_force
from ditkit_core.nn.rope import rotate


def normalised_heads(
    x: Float[Tensor, "batch tokens dim"],
    norm: nn.RMSNorm,
    heads: int,
    precision: Precision,
    rotary: Float[Tensor, "tables tokens 1 pairs 2"] | None = None,
) -> Float[Tensor, "batch tokens heads head_dim"]:
    """RMS norm, then rotation of each head; rounded once to attention's dtype where both run in one
    dtype, fp32 or fp64.

    Args:
        x: Output of the q or k projection.
        norm: As wide as `x`, or as one head; each head is then normalised on its own.
        precision: The dtypes of norm (`qk_norms`), rotation (`rotary`) and result (`attention`).
        rotary: From `rope.rotary_table`; None applies no positions (cross-attention).
    """
    dtype = precision.qk_norms
    # Complex numbers exist for fp32 and fp64 only, and a rounding between norm and rotation needs
    # two steps.
    at_once = dtype in (torch.float32, torch.float64) and (
        rotary is None or precision.rotary == dtype
    )
    if not at_once:
        return _norm_rotate(x, norm, heads, precision, rotary)
    if _fused(x, dtype):
        table = None if rotary is None else _as(rotary, dtype)
        return kernels.NormRotation.apply(
            x, _as(norm.weight, dtype), table, norm.eps, heads, precision.attention
        )
    # A view, if the tables have the dtype of the norm: what each call saves for its backward is
    # then the carry's own tensor.
    rotation = None if rotary is None else torch.view_as_complex(rotary.to(dtype))
    out: Tensor = _NormRotate.apply(
        x, norm.weight.to(dtype), rotation, norm.eps, dtype, heads, precision.attention
    )
    return out


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype: where it has that, the host saves a call."""
    return x if x.dtype == dtype else x.to(dtype)


def _fused(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel of `nn/kernels/` computes in `dtype` what is to be computed of `x`."""
    return dtype == torch.float32 and x.dtype.itemsize <= 4 and kernels_in_force(x)


def _norm_rotate(
    x: Tensor, norm: nn.RMSNorm, heads: int, precision: Precision, rotary: Tensor | None
) -> Tensor:
    """The plain composition, for any dtypes."""
    dtype = precision.qk_norms
    wide = torch.promote_types(dtype, torch.float32)
    groups = x.to(wide).unflatten(-1, (-1, *norm.normalized_shape))
    if dtype == wide:
        y = F.rms_norm(groups, norm.normalized_shape, norm.weight.to(wide), norm.eps)
    else:  # the order of the official models: rounded before the weight is applied
        y = F.rms_norm(groups, norm.normalized_shape, eps=norm.eps).to(dtype) * norm.weight
    y = y.flatten(-2).unflatten(-1, (heads, -1))
    if rotary is not None:
        cos, sin = rotary.to(precision.rotary).unbind(-1)
        y = rotate(y.to(precision.rotary), cos, sin)
    return y.to(precision.attention)


class _NormRotate(torch.autograd.Function):
    """y = rotate(x · rsqrt(mean x² + eps) · weight); a rotation is a product with a unit complex
    number."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rotation: Tensor | None,
        eps: float,
        dtype: torch.dtype,
        heads: int,
        result: torch.dtype,
    ) -> Tensor:
        wide = x.to(dtype).unflatten(-1, (-1, len(weight)))  # one group, or a group per head
        inverse = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            .square_()
            .div_(len(weight))
            .add_(eps)
            .rsqrt_()
        )
        # In place from here on: one tensor of the size of q, in the norm's dtype.
        y = torch.mul(wide, inverse).mul_(weight).flatten(-2).unflatten(-1, (heads, -1))
        if rotation is not None:
            _as_pairs(y).mul_(rotation)
        ctx.save_for_backward(x, weight, rotation, inverse)
        return y.to(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rotation, inverse = ctx.saved_tensors
        # A copy even where the dtype is right already: autograd may need the gradient elsewhere,
        # and `g` is overwritten below.
        g = gradient.to(inverse.dtype, memory_format=torch.contiguous_format, copy=True)
        if rotation is not None:
            _as_pairs(g).mul_(rotation.conj())
        g = g.flatten(-2).unflatten(-1, (-1, len(weight)))
        normed = (
            x.to(inverse.dtype, memory_format=torch.contiguous_format, copy=True)
            .view_as(g)
            .mul_(inverse)
        )
        # Before g is multiplied by the weight below.
        d_weight = (g * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        g.mul_(weight)
        # With n = x · r the normalised input: dx = r · (g - n · mean(g · n)). In place, so that two
        # tensors of the size of q suffice.
        inner = torch.linalg.vecdot(g, normed).unsqueeze(-1).div_(len(weight))
        d_x = g.addcmul_(normed, inner, value=-1).mul_(inverse).to(x.dtype).flatten(-2)
        return d_x, d_weight, None, None, None, None, None


def _as_pairs(x: Float[Tensor, "*batch head_dim"]) -> Tensor:
    """Adjacent features as complex numbers, in the same memory."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def modulated_norm(
    x: Float[Tensor, "batch tokens dim"],
    scale: Float[Tensor, "batch times dim"],
    shift: Float[Tensor, "batch times dim"],
    eps: float,
    norms: torch.dtype,
    result: torch.dtype,
) -> Float[Tensor, "batch tokens dim"]:
    """Layer norm without weights in the dtype `norms`, times (1 + scale), plus shift in the dtype
    of both; rounded to `result`.

    Args:
        x: The residual stream.
        scale: One row per sample, per timestep or per token; `shift` has its shape and dtype.
    """
    is_trained = scale.requires_grad and torch.is_grad_enabled()
    # Rows per token with gradients are as large as the tokens; only timesteps per token that are
    # trained have them.
    if norms == scale.dtype and _fused(x, norms) and (scale.shape[1] == 1 or not is_trained):
        return kernels.AffineNorm.apply(x, scale, shift, eps, 1.0, result)
    x = x.to(norms)
    if norms != scale.dtype:
        y = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=eps).to(scale.dtype), 1 + scale)
    elif scale.shape[:2] == (1, 1):
        # one sample, one timestep: the modulation is the norm's affine part, one pass less
        y = F.layer_norm(x, x.shape[-1:], (1 + scale)[0, 0], shift[0, 0], eps)
    else:
        y = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=eps), 1 + scale)
    return y.to(result)


def affine_norm(
    norm: nn.LayerNorm, x: Float[Tensor, "*batch dim"], dtype: torch.dtype, result: torch.dtype
) -> Float[Tensor, "*batch dim"]:
    """The norm of `x`, computed in `dtype`, whatever its parameters are stored in, and rounded to
    `result`."""
    if x.ndim == 3 and _fused(x, dtype):
        rows = [row.to(dtype).expand(len(x), 1, -1) for row in (norm.weight, norm.bias)]
        return kernels.AffineNorm.apply(x, *rows, norm.eps, 0.0, result)
    weight, bias = norm.weight.to(dtype), norm.bias.to(dtype)
    return F.layer_norm(x.to(dtype), norm.normalized_shape, weight, bias, norm.eps).to(result)


def per_token(
    rows: Float[Tensor, "batch times dim"], late: Bool[Tensor, "batch tokens"] | None
) -> Float[Tensor, "batch tokens_or_times dim"]:
    """For each token one of its sample's two rows: the second where `late` is true. Without `late`,
    the rows themselves."""
    return rows if late is None else torch.where(late[..., None], rows[:, 1:], rows[:, :1])


def gated_sum(
    y: Float[Tensor, "batch tokens dim"],
    x: Float[Tensor, "batch tokens dim"],
    gate: Float[Tensor, "batch times dim"],
    late: Bool[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, "batch tokens dim"]:
    """x + y · gate, rounded once to the residual's dtype.

    With one or two gates per sample, the backward keeps them outside autograd's saved tensors. That
    costs a row or two per block, and it lets a checkpoint that recomputes the block stop before the
    matmul that made `y`, a tenth to a seventh of its forward. A gate per token is as large as the
    tokens and is saved as usual.

    Args:
        y: The output of a sub-layer, in the matmuls' dtype.
        x: The residual stream.
        gate: One row per sample or per token, or two per sample, in the modulation's dtype.
        late: With two rows per sample, the tokens that take the second.
    """
    if late is None and gate.shape[1] != 1:
        return _sum(y, x, per_token(gate, late))
    out: Tensor = _GatedSum.apply(y, x, gate, late)
    return out


def _sum(y: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Compute in the wider dtype of stream and gate. torch's kernel for narrow dtypes computes in
    fp32 and rounds its result."""
    wide = x.dtype if gate.dtype == x.dtype else torch.promote_types(x.dtype, gate.dtype)
    if device_kind(x) == "cuda" and torch.promote_types(y.dtype, wide) == wide:
        # A GPU's kernel reads each dtype as it is and computes in the widest; a CPU's would make
        # the same copies as below.
        return torch.addcmul(x, y, gate).to(x.dtype)
    return torch.addcmul(x.to(wide), y.to(wide), gate.to(wide)).to(x.dtype)


def plain_sum(y: Float[Tensor, "batch tokens dim"], x: Float[Tensor, "batch tokens dim"]) -> Tensor:
    """x + y, rounded once to the dtype of the residual stream x."""
    return (x + y).to(x.dtype)


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, gate: Tensor, late: Tensor | None) -> Tensor:
        # On ctx and not saved: a saved tensor would be the last of the block, and a recompute would
        # run up to it.
        ctx.dtype, ctx.gate, ctx.late = y.dtype, gate, late
        itemsize = max(x.dtype.itemsize, y.dtype.itemsize, gate.dtype.itemsize)
        ctx.fused = late is None and itemsize <= 4 and kernels_in_force(x)
        ctx.save_for_backward(y if ctx.needs_input_grad[2] else None)
        return kernels.sum_with_gate(y, x, gate) if ctx.fused else _sum(y, x, per_token(gate, late))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        d_gate = None if y is None else _summed(gradient * y, ctx.late).to(ctx.gate.dtype)
        if ctx.fused:
            return kernels.gated_sum_backward(gradient, ctx.gate, ctx.dtype), gradient, d_gate, None
        gate = per_token(ctx.gate, ctx.late)
        # rounded in the kernel; a CPU would make the same copy as below
        if device_kind(gradient) == "cuda":
            d_y = torch.mul(gradient, gate, out=torch.empty_like(gradient, dtype=ctx.dtype))
        else:
            d_y = (gradient * gate).to(ctx.dtype)
        return d_y, gradient, d_gate, None


def _summed(gradient: Tensor, late: Tensor | None) -> Tensor:
    """Gradients of all tokens, summed to one or two rows per sample."""
    if late is None:
        return gradient.sum(1, keepdim=True)
    # Masked, not multiplied: 0 times a value that is not finite would be NaN in the other row.
    late = late[..., None]
    return torch.cat(
        [gradient.masked_fill(mask, 0).sum(1, keepdim=True) for mask in (late, ~late)], 1
    )


def gated_unit(x: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch half"]:
    """silu(a) · b of the halves [a | b] of a matmul's output. Only that output is kept for the
    backward."""
    out: Tensor = (kernels.GatedUnit if _fused(x, torch.float32) else _GatedUnit).apply(x)
    return out


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, -1)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, -1)
        # Both gradients are written into halves of one tensor, which is the matmul's gradient: no
        # concatenation.
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        d_a, d_b = d_x.chunk(2, -1)
        torch.mul(F.silu(a), gradient, out=d_b)
        d_a.copy_(torch.ops.aten.silu_backward(gradient * b, a))
        return d_x
