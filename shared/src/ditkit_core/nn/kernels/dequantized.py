"""A quantized matrix in one pass, each value bitwise as torch computes it; reference:
`nn/quantized_linear.py: _dequantize_rows` and `_dequantize_nf4`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ditkit_core.nn.kernels.launch import blocks_of, launcher

_BLOCK, _BLOCKS = 2048, 64
_SCALED, _GROUP = 64, 256


@launcher(enable_fp_fusion=False)
@triton.jit
def _rows(codes, scale, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # A part of one row: its scale is loaded once, and not for every element.
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, offsets = column < WIDTH, row * WIDTH + column
    wide = tl.load(codes + offsets, mask=inside, other=0).to(tl.float32) * tl.load(scale + row)
    tl.store(out + offsets, wide.to(out.dtype.element_ty), mask=inside)


@launcher(enable_fp_fusion=False)
@triton.jit
def _nf4(
    codes,
    scale,
    factor,
    mean,
    levels,
    out,
    count,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # of weights with one scale
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < count
    wide = tl.load(scale + block, mask=inside, other=0).to(tl.float32)
    # Rounded as torch divides; Triton's own division is up to two units off.
    wide = tl.div_rn(wide, tl.load(factor + block // GROUP, mask=inside, other=1.0)) + tl.load(mean)
    byte = block[:, None] * (SCALED // 2) + tl.arange(0, SCALED // 2)[None, :]  # two weights each
    pair = tl.load(codes + byte, mask=inside[:, None], other=0).to(tl.int32)
    # The first 16 pairs of the table have all 16 levels as their second: 128 bytes, one line of the
    # cache. Looked up as pairs, the bytes of a warp would be in up to 16 lines, which are read one
    # after the other.
    first, second = tl.load(levels + 2 * (pair >> 4) + 1), tl.load(levels + 2 * (pair & 15) + 1)
    both = tl.reshape(tl.join(first * wide[:, None], second * wide[:, None]), (BLOCKS, SCALED))
    at = block[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    tl.store(out + at, both.to(out.dtype.element_ty), mask=inside[:, None])


def rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of 8 bits [out, in] by a scale of their row [out, 1]."""
    out = codes.new_empty(codes.shape, dtype=dtype)
    num_rows, width = codes.shape
    _rows((num_rows, blocks_of(width, _BLOCK), 1), (codes, scale, out), (), (width, _BLOCK))
    return out


def nf4(
    codes: Tensor, scale: Tensor, factor: Tensor, mean: Tensor, levels: Tensor, dtype: torch.dtype
) -> Tensor:
    """Bytes of two codes [out, in / 2] by the scales of their blocks; the result is [out, in]."""
    out = codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype)
    blocks = scale.shape[0]
    tensors = codes, scale, factor, mean, levels, out
    _nf4((blocks_of(blocks, _BLOCKS), 1, 1), tensors, (blocks,), (_SCALED, _GROUP, _BLOCKS))
    return out
