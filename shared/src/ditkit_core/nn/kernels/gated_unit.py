"""silu(a) · b in one pass, forward and backward; reference: `nn/functional.py: _GatedUnit`."""

import triton
import triton.language as tl
from torch import Tensor

from ditkit_core.nn.kernels.launch import blocks_of, launcher

_BLOCK = 1024


@launcher(enable_fp_fusion=True)
@triton.jit
def _forward(x, out, x_row, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row, features = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = features < HALF
    a = tl.load(x + row * x_row + features, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * x_row + HALF + features, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * HALF + features, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=inside
    )


@launcher(enable_fp_fusion=True)
@triton.jit
def _backward(gradient, x, d_x, g_row, x_row, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row, features = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = features < HALF
    g = tl.load(gradient + row * g_row + features, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(x + row * x_row + features, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * x_row + HALF + features, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(a)
    d_a = g * b * gate * (1.0 + a * (1.0 - gate))
    at = row * (2 * HALF) + features
    tl.store(d_x + at, d_a.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_x + at + HALF, (g * a * gate).to(d_x.dtype.element_ty), mask=inside)


def forward(x: Tensor) -> Tensor:
    """silu(a) · b of the halves [a | b] of the last dimension, contiguous."""
    rows, half = x.flatten(0, -2), x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], half)
    _forward(
        (rows.shape[0], blocks_of(half, _BLOCK), 1), (rows, out), (rows.stride(0),), (half, _BLOCK)
    )
    return out


def backward(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of x; both halves are written into one tensor."""
    rows, gradients, half = x.flatten(0, -2), gradient.flatten(0, -2), gradient.shape[-1]
    d_x = x.new_empty(x.shape)
    grid = (rows.shape[0], blocks_of(half, _BLOCK), 1)
    strides = (gradients.stride(0), rows.stride(0))
    _backward(grid, (gradients, rows, d_x), strides, (half, _BLOCK))
    return d_x
