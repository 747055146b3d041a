"""Layer norm and its affine part in one pass, forward and backward; reference: `nn/functional.py:
modulated_norm`.

The affine part is a modulation of the sample or of the token, 1 + scale and shift, or the weight
and bias of a norm. Mean and variance are computed again in the backward: its pass over x is needed
anyway.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ditkit_core.nn.kernels import hopper
from ditkit_core.nn.kernels.launch import launcher, summing_programs, tile, warps

_READ_AHEAD = 8192
"""Features of a row up to which Hopper's shared memory has room for the two rows behind it as well:
192 of 227 KiB, if all is fp32."""


@triton.jit
def _normed(x, start, eps, DIM: tl.constexpr, W: tl.constexpr):
    """A row of x, centred and divided by its standard deviation, and 1 / that deviation."""
    features = tl.arange(0, W)
    wide = tl.load(x + start + features, mask=features < DIM, other=0.0).to(tl.float32)
    centred = tl.where(features < DIM, wide - tl.sum(wide, 0) / DIM, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / DIM + eps)
    return centred * inverse, inverse


# Token counts differ between micro-batches: a kernel for each of their properties (16 divides it,
# it is 1) would be compiled in the middle of a run.
@launcher(enable_fp_fusion=True)
@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x, scale, shift, out, eps, tokens, x_batch, x_token, s_batch, s_token,
    OFFSET: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token, features = row // tokens, row % tokens, tl.arange(0, W)
    normed, _ = _normed(x, batch * x_batch + token * x_token, eps, DIM, W)
    at = batch * s_batch + token * s_token + features
    factor = tl.load(scale + at, mask=features < DIM, other=0.0).to(tl.float32) + OFFSET
    y = normed * factor + tl.load(shift + at, mask=features < DIM, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + features, y.to(out.dtype.element_ty), mask=features < DIM)


@launcher(enable_fp_fusion=True)
@triton.jit(do_not_specialize=["tokens"])
def _backward(
    gradient, x, scale, d_x, d_affine, eps, tokens, g_batch, g_token, x_batch, x_token, s_batch, s_token,
    OFFSET: tl.constexpr, TRAINED: tl.constexpr, PER_TOKEN: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    batch, features = tl.program_id(1).to(tl.int64), tl.arange(0, W)
    d_scale, d_shift = tl.zeros((W,), tl.float32), tl.zeros((W,), tl.float32)
    factor = (
        tl.load(scale + batch * s_batch + features, mask=features < DIM, other=0.0).to(tl.float32)
        + OFFSET
    )
    # A row's sums wait for the row, so the rows after it are read meanwhile, as many as STAGES
    # says: alone, a program waits for memory.
    for index in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(index, tl.int64)
        normed, inverse = _normed(x, batch * x_batch + token * x_token, eps, DIM, W)
        at = batch * g_batch + token * g_token + features
        g = tl.load(gradient + at, mask=features < DIM, other=0.0).to(tl.float32)
        if TRAINED:
            d_scale += g * normed
            d_shift += g
        if PER_TOKEN:
            at = batch * s_batch + token * s_token + features
            factor = tl.load(scale + at, mask=features < DIM, other=0.0).to(tl.float32) + OFFSET
        g = g * factor
        inner = tl.sum(g * normed, 0) / DIM
        result = (g - tl.sum(g, 0) / DIM - normed * inner) * inverse
        at = (batch * tokens + token) * DIM + features
        tl.store(d_x + at, result.to(d_x.dtype.element_ty), mask=features < DIM)
    if TRAINED:
        at = (batch * tl.num_programs(0) + tl.program_id(0)) * (2 * DIM) + features
        tl.store(d_affine + at, d_scale, mask=features < DIM)
        tl.store(d_affine + at + DIM, d_shift, mask=features < DIM)


def forward(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, offset: float, dtype: torch.dtype
) -> Tensor:
    """layer_norm(x) · (offset + scale) + shift in `dtype`, contiguous."""
    batch, tokens, dim = x.shape
    out = x.new_empty(batch, tokens, dim, dtype=dtype)
    w = tile(dim)
    steps = _steps(scale)
    assert scale.shape == shift.shape and steps == _steps(shift)
    numbers = eps, tokens, *x.stride()[:2], *steps
    _forward((batch * tokens, 1, 1), (x, scale, shift, out), numbers, (offset, dim, w), warps(w))
    return out


def backward(
    gradient: Tensor, x: Tensor, scale: Tensor, eps: float, offset: float, trained: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of scale and shift, in fp32 [batch, programs, 2, dim]: no
    programs unless `trained`."""
    batch, tokens, dim = x.shape
    d_x = x.new_empty(batch, tokens, dim)
    w, (s_batch, s_token) = tile(dim), _steps(scale)
    stages = 3 if hopper.is_hopper(x) and w <= _READ_AHEAD else 1
    programs = summing_programs(tokens, batch) if trained or stages > 1 else tokens
    d_affine = x.new_empty(batch, programs if trained else 0, 2, dim, dtype=torch.float32)
    _backward(
        (programs, batch, 1), (gradient, x, scale, d_x, d_affine),
        (eps, tokens, *gradient.stride()[:2], *x.stride()[:2], s_batch, s_token),
        (offset, trained, s_token != 0, dim, w, stages),
        # A program that reads ahead needs fewer warps to keep the memory busy.
        warps(w) if stages > 1 else warps(w, sums=trained),
    )  # fmt: skip
    return d_x, d_affine


def _steps(scale: Tensor) -> tuple[int, int]:
    """Steps from sample to sample and from token to token; 0 where one row serves all."""
    (samples, rows, _), (to_sample, to_row, _) = scale.shape, scale.stride()
    return 0 if samples == 1 else to_sample, 0 if rows == 1 else to_row
