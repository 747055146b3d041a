"""Inputs of products in 8 bits and results of their sums, each in one pass and bitwise as torch
computes them where they are finite; reference: `nn/eight_bit_products.py: rounded`,
`transposed_product` and `_product_of_codes`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ditkit_core.nn.kernels.launch import blocks_of, launcher

_BLOCK = 2048
_TILE = 128
_TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _load(x, columns, offsets, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    inside = offsets < WIDTH
    wide = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    return wide * tl.load(columns + offsets, mask=inside, other=0.0) if SCALED else wide


@launcher(enable_fp_fusion=False)
@triton.jit
def _round(
    x,
    columns,
    codes,
    scale,
    stride,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    codes += row * WIDTH
    largest, zeros = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        wide = _load(x, columns, start + tl.arange(0, BLOCK), WIDTH, SCALED)
        largest = tl.maximum(largest, tl.abs(wide))
        zeros += wide * 0.0  # NaN where a number is not finite: a maximum ignores it
    of_row = tl.maximum(tl.div_rn(tl.max(largest, 0), LIMIT), TINY) + tl.sum(zeros, 0)
    tl.store(scale + row, of_row)
    for start in range(0, WIDTH, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        wide = tl.div_rn(_load(x, columns, offsets, WIDTH, SCALED), of_row)
        if LIMIT == 127.0:
            # To the nearest, of two the even one: above 2**23 fp32 has no fractions.
            wide = (wide + 12582912.0) - 12582912.0
        else:
            # Here too, so that the conversion is exact: three bits of fraction, or steps of 2**-9
            # for the smallest numbers. Triton's interpreter truncates.
            bits = wide.to(tl.int32, bitcast=True)
            nearest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(
                tl.float32, bitcast=True
            )
            wide = tl.where(tl.abs(wide) < 0.015625, (wide + 24576.0) - 24576.0, nearest)
        tl.store(codes + offsets, wide.to(codes.dtype.element_ty), mask=offsets < WIDTH)


@launcher(enable_fp_fusion=False)
@triton.jit
def _transpose(codes, out, num_rows, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    square = tl.load(codes + row * WIDTH + column, mask=inside, other=0)
    # In shared memory rows become columns, so that the bytes of a warp are next to each other in
    # both matrices.
    tl.store(out + tl.trans(column * num_rows + row), tl.trans(square), mask=tl.trans(inside))


# Each operation rounded by itself, as torch does.
@launcher(enable_fp_fusion=False)
@triton.jit
def _scale(
    sums,
    scale,
    columns,
    bias,
    out,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A part of one row: its scale is loaded once, and not for every element.
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, offsets = column < WIDTH, row * WIDTH + column
    wide = tl.load(sums + offsets, mask=inside, other=0).to(tl.float32) * tl.load(scale + row)
    if SCALED:
        wide *= tl.load(columns + column, mask=inside, other=0.0)
    if BIASED:
        wide += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, wide.to(out.dtype.element_ty), mask=inside)


def codes_of_rows(x: Tensor, columns: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of x [n, k] in int8 or fp8, with its columns multiplied by factors [1, k] before, and
    the scales of its rows [n, 1]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    codes = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    tensors = (x, scale if columns is None else columns, codes, scale)
    is_scaled = columns is not None
    _round(
        (x.shape[0], 1, 1), tensors, (x.stride(0),), (x.shape[1], is_scaled, limit, _TINY, _BLOCK)
    )
    return codes, scale


def transposed(codes: Tensor) -> Tensor:
    """A contiguous matrix [m, n] of the 8-bit codes of one [n, m]."""
    num_rows, width = codes.shape
    out = codes.new_empty(width, num_rows)
    grid = blocks_of(num_rows, _TILE), blocks_of(width, _TILE), 1
    _transpose(
        grid,
        (codes.view(torch.int8), out.view(torch.int8)),
        (num_rows,),
        (width, _TILE),
        num_warps=8,
    )
    return out


def scaled(
    sums: Tensor, scale: Tensor, columns: Tensor | None, bias: Tensor | None, *, out: Tensor
) -> None:
    """Write sums [n, m] by scales of their rows [n, 1] and columns [1, m], plus a bias [m], to a
    contiguous matrix of another dtype."""
    rows, width = sums.shape
    tensors = (
        sums,
        scale,
        scale if columns is None else columns,
        scale if bias is None else bias,
        out,
    )
    constants = width, columns is not None, bias is not None, _BLOCK
    _scale((rows, blocks_of(width, _BLOCK), 1), tensors, (), constants)
