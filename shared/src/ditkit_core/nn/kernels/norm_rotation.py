"""RMS norm, weight and rotation of q or k in one pass, forward and backward; reference:
`nn/functional.py: _NormRotate`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ditkit_core.nn.kernels.launch import launcher, summing_programs, tile, warps


@triton.jit
def _cosines(
    rotary,
    row,
    tokens,
    stride_table,
    stride_token,
    offsets,
    HEAD: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
):
    """A row's cosines and sines, one of each per pair of features [G, W / 2]."""
    at = (row // tokens) * stride_table + (row % tokens) * stride_token + offsets % HEAD
    return tl.split(tl.reshape(tl.load(rotary + at), (G, W // 2, 2)))


@triton.jit
def _rotated(y, cos, sin, G: tl.constexpr, W: tl.constexpr):
    """Adjacent features as complex numbers, multiplied by cos + i·sin."""
    even, odd = tl.split(tl.reshape(y, (G, W // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (G, W))


# Token counts differ between micro-batches: a kernel for each of their properties (16 divides it,
# it is 1) would be compiled in the middle of a run.
@launcher(enable_fp_fusion=True)
@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x, weight, rotary, out, inverse, eps, tokens, x_batch, x_token, stride_table, stride_token,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, ROTATES: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    groups, features = tl.arange(0, G)[:, None], tl.arange(0, W)[None, :]
    inside, offsets = (groups < GROUPS) & (features < WIDTH), groups * WIDTH + features
    start = (row // tokens) * x_batch + (row % tokens) * x_token
    wide = tl.load(x + start + offsets, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    group = tl.arange(0, G)
    tl.store(inverse + row * GROUPS + group, scale, mask=group < GROUPS)
    y = wide * scale[:, None] * tl.load(weight + features, mask=features < WIDTH, other=0.0)
    if ROTATES:
        cos, sin = _cosines(rotary, row, tokens, stride_table, stride_token, offsets, HEAD, G, W)
        y = _rotated(y, cos, sin, G, W)
    tl.store(out + row * (GROUPS * WIDTH) + offsets, y.to(out.dtype.element_ty), mask=inside)


@launcher(enable_fp_fusion=True)
@triton.jit(do_not_specialize=["rows", "tokens"])
def _backward(
    gradient, x, weight, rotary, inverse, d_x, d_weight, rows, tokens, g_batch, g_token, g_head, x_batch, x_token,
    stride_table, stride_token, WIDTH: tl.constexpr, GROUPS: tl.constexpr, HEAD: tl.constexpr, ROTATES: tl.constexpr,
    TRAINED: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    groups, features = tl.arange(0, G)[:, None], tl.arange(0, W)[None, :]
    inside = (groups < GROUPS) & (features < WIDTH)
    offsets = groups * WIDTH + features
    group = tl.arange(0, G)
    weights = tl.load(weight + features, mask=features < WIDTH, other=0.0)
    total = tl.zeros((G, W), tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        batch, token = row // tokens, row % tokens
        # 64 bits: a gradient of attention may have its heads before its tokens, so that a step to
        # the next head is over all tokens.
        at = (
            batch * g_batch
            + token * g_token
            + (offsets // HEAD).to(tl.int64) * g_head
            + offsets % HEAD
        )
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if ROTATES:  # the rotation backwards: the complex conjugate
            cos, sin = _cosines(
                rotary, row, tokens, stride_table, stride_token, offsets, HEAD, G, W
            )
            g = _rotated(g, cos, -sin, G, W)
        scale = tl.load(inverse + row * GROUPS + group, mask=group < GROUPS, other=0.0)[:, None]
        normed = (
            tl.load(x + batch * x_batch + token * x_token + offsets, mask=inside, other=0.0).to(
                tl.float32
            )
            * scale
        )
        if TRAINED:
            total += g * normed
        g = g * weights
        inner = tl.sum(g * normed, 1)[:, None] / WIDTH
        result = (g - normed * inner) * scale
        tl.store(
            d_x + row * (GROUPS * WIDTH) + offsets, result.to(d_x.dtype.element_ty), mask=inside
        )
    if TRAINED:
        feature = tl.arange(0, W)
        tl.store(
            d_weight + tl.program_id(0) * WIDTH + feature, tl.sum(total, 0), mask=feature < WIDTH
        )


def forward(
    x: Tensor, weight: Tensor, rotary: Tensor | None, eps: float, heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The result [batch, tokens, heads, head_dim] in `dtype`, and 1 / rms of each group [batch,
    tokens, groups] in fp32."""
    (batch, tokens, dim), width = x.shape, weight.shape[0]
    groups, head = dim // width, dim // heads
    out = x.new_empty(batch, tokens, heads, head, dtype=dtype)
    inverse = weight.new_empty(batch, tokens, groups)
    g, w = tile(groups), tile(width)
    _forward(
        (batch * tokens, 1, 1), (x, weight, weight if rotary is None else rotary, out, inverse),
        (eps, tokens, *x.stride()[:2], *_strides(rotary)),
        (width, groups, head, rotary is not None, g, w), warps(g * w),
    )  # fmt: skip
    return out, inverse


def backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    rotary: Tensor | None,
    inverse: Tensor,
    trained: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of the weight, in fp32: one row per program, and none
    unless `trained`."""
    (batch, tokens, dim), width = x.shape, weight.shape[0]
    groups, head, rows = dim // width, gradient.shape[-1], batch * tokens
    d_x = x.new_empty(x.shape)
    programs = summing_programs(rows) if trained else rows
    d_weight = inverse.new_empty(programs if trained else 0, width)
    g, w = tile(groups), tile(width)
    _backward(
        (programs, 1, 1), (gradient, x, weight, weight if rotary is None else rotary, inverse, d_x,
        d_weight),
        (rows, tokens, *gradient.stride()[:3], *x.stride()[:2], *_strides(rotary)),
        (width, groups, head, rotary is not None, trained, g, w), warps(g * w, sums=trained),
    )  # fmt: skip
    return d_x, d_weight


def _strides(table: Tensor | None) -> tuple[int, int]:
    """Steps from sample to sample and from token to token in a table [tables, tokens, 1, pairs, 2];
    one table serves all samples."""
    return (
        (0, 0)
        if table is None
        else (0 if table.shape[0] == 1 else table.stride(0), table.stride(1))
    )
