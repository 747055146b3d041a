"""A quantized matrix in one pass, each value bitwise as torch computes it; reference: `nn/quantized_linear.py: _dequantize_rows` and `_dequantize_nf4`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ditkit_core.nn.context import device_current

_BLOCK = 2048
_SCALED, _GROUP = 64, 256


@triton.jit
def _rows(codes, scale, out, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    wide = tl.load(codes + place, mask=inside, other=0).to(tl.float32)
    wide *= tl.load(scale + place // WIDTH, mask=inside, other=0.0)
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _nf4(
    codes, scale, factor, mean, levels, out, count, SCALED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # of a byte, which has two weights
    inside = place < count
    block = place // (SCALED // 2)
    wide = tl.load(scale + block, mask=inside, other=0).to(tl.float32)
    # Rounded as torch divides; Triton's own division is up to two units off.
    wide = tl.div_rn(wide, tl.load(factor + block // GROUP, mask=inside, other=1.0)) + tl.load(mean)
    pair = levels + 2 * tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    first, second = tl.load(pair, mask=inside, other=0.0) * wide, tl.load(pair + 1, mask=inside, other=0.0) * wide
    both = tl.reshape(tl.join(first, second), (2 * BLOCK,))
    at = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(out + at, both.to(out.dtype.element_ty), mask=at < 2 * tl.cast(count, tl.int64))


def rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of 8 bits [out, in] by a scale of their row [out, 1]."""
    out = codes.new_empty(codes.shape, dtype=dtype)
    with device_current(codes):
        _rows[(triton.cdiv(out.numel(), _BLOCK),)](
            codes, scale, out, out.numel(), WIDTH=codes.shape[1], BLOCK=_BLOCK, enable_fp_fusion=False
        )
    return out


def nf4(codes: Tensor, scale: Tensor, factor: Tensor, mean: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of two codes [out, in / 2] by the scales of their blocks; the result is [out, in]."""
    out = codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype)
    with device_current(codes):
        _nf4[(triton.cdiv(codes.numel(), _BLOCK),)](
            codes, scale, factor, mean, levels, out, codes.numel(), SCALED=_SCALED, GROUP=_GROUP, BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
