"""Writes fp32 results into bf16 weights, and restores them, each in one pass and bitwise as torch
does it; reference: `nn/stochastic_rounding.py`. Weights are passed as their bits, int16."""

import triton
import triton.language as tl
from torch import Tensor

from ditkit_core.nn.context import device_current
from ditkit_core.nn.kernels.launch import blocks_of, launcher

_BLOCK = 1024


@triton.jit
def _bits(values, offsets, inside):
    wide = tl.load(values + offsets, mask=inside, other=0.0)
    # All NaNs get one pattern: in others, a sum could carry into the sign.
    return tl.where(wide == wide, wide.to(tl.int32, bitcast=True), 0x7FC00000)  # noqa: PLR0124


@triton.jit
def _mixed(bits, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    return (bits ^ ((bits >> SHIFT) & ((1 << (32 - SHIFT)) - 1))) * FACTOR


# The key is another one in every step: a kernel for each of its properties (16 divides it, it is 1)
# would be compiled in the middle of a run. And a `Launcher` would keep an entry for each.
@triton.jit(do_not_specialize=["first", "last"])
def _stochastic(
    weight, values, first, last, start, of, count, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    indices = start + offsets
    chunk = indices // CHUNK * CHUNK
    within, half = indices - chunk, (tl.minimum(of - chunk, CHUNK) + 1) // 2
    second = within >= half
    random = (chunk // 2 + within - tl.where(second, half, 0)).to(tl.int32)
    for turn in tl.static_range(2):
        random = random ^ (first if turn == 0 else last)
        random = _mixed(random, 0x21F0AAAD, 16)
        random = _mixed(random, 0x735A2D97, 15)
        random = _mixed(random, 1, 15)
    random = tl.where(second, random >> 16, random) & 0xFFFF
    tl.store(
        weight + offsets,
        ((_bits(values, offsets, inside) + random) >> 16).to(tl.int16),
        mask=inside,
    )


@launcher(enable_fp_fusion=False)
@triton.jit
def _split(weight, values, rest, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    bits = _bits(values, offsets, inside)
    upper = (bits + 0x8000) >> 16
    tl.store(weight + offsets, upper.to(tl.int16), mask=inside)
    tl.store(rest + offsets, (bits - (upper << 16)).to(tl.int16), mask=inside)


@launcher(enable_fp_fusion=False)
@triton.jit
def _join(values, weight, rest, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    upper = tl.load(weight + offsets, mask=inside, other=0).to(tl.int32) << 16
    bits = upper + tl.load(rest + offsets, mask=inside, other=0).to(tl.int32)
    tl.store(values + offsets, bits.to(tl.float32, bitcast=True), mask=inside)


def stochastic(
    weight: Tensor, values: Tensor, first: int, last: int, start: int, of: int, chunk: int
) -> None:
    """`first` and `last` are the lower and the upper half of the key, as signed numbers; a part of
    a tensor begins at `start` of its `of` numbers."""
    count = values.numel()
    with device_current(values):
        grid = (blocks_of(count, _BLOCK),)
        _stochastic[grid](
            weight,
            values,
            first,
            last,
            start,
            of,
            count,
            CHUNK=chunk,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )


def split(weight: Tensor, values: Tensor, rest: Tensor) -> None:
    """The bits of the nearest bf16, and what is left of the values in units of fp32's spacing."""
    count = values.numel()
    _split((blocks_of(count, _BLOCK), 1, 1), (weight, values, rest), (count,), (_BLOCK,))


def restored(values: Tensor, weight: Tensor, rest: Tensor) -> None:
    """What `split` was given."""
    count = values.numel()
    _join((blocks_of(count, _BLOCK), 1, 1), (values, weight, rest), (count,), (_BLOCK,))
