"""A product of bf16 matrices added to a third one on Hopper, rounded once; reference:
`nn/bf16_parts.py: add_product`.

There cuBLAS rounds the product to bf16 before it adds it (`nn/kernel_check.py: rounds_products`).
Measured on an H100, without the host's time, for 192 columns, as a LoRA of rank 32 has: 20,280 ×
5,120 in 191 µs where cuBLAS takes 219, 20,280 × 13,824 in 534 instead of 567, 1,536 × 27,648 in 97
instead of 100. With few elements cuBLAS is faster: 1,536 × 3,072 in 8.2 µs instead of 9.2.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ditkit_core.nn.context import device_current

_ROWS, _COLUMNS, _SPAN = 64, 128, 64
_TILES = 8
"""Rows of tiles that are computed next to each other, so that they read the same columns from the
cache."""


# Token counts differ between micro-batches: a kernel for each of their properties (16 divides it,
# it is 1) would be compiled in the middle of a run.
@triton.jit(do_not_specialize=["rows"])
def _add(
    total, left, right, rows, width, LENGTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    tile, down, across = tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(width, COLUMNS)
    first = tile // (TILES * across) * TILES
    together = min(down - first, TILES)
    row = (first + tile % (TILES * across) % together) * ROWS
    column = tile % (TILES * across) // together * COLUMNS
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    # what is behind the last row, column or number is read as zeros
    for start in range(0, LENGTH, SPAN):
        of_rows = left.load([row, start])
        if TRANSPOSED:
            sums = tl.dot(of_rows, right.load([column, start]).T, sums)
        else:
            sums = tl.dot(of_rows, right.load([start, column]), sums)
    sums += total.load([row, column]).to(tl.float32)
    total.store([row, column], sums.to(tl.bfloat16))


def accumulated(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of [n, k] and [k, m] to a matrix [n, m] in place, all in bf16; 8 divides k
    and m. Of `right` rows or columns are contiguous."""
    (rows, width), length = total.shape, left.shape[1]
    is_transposed = right.stride(0) == 1
    totals = TensorDescriptor(total, [rows, width], [width, 1], [_ROWS, _COLUMNS])
    lefts = TensorDescriptor(left, [rows, length], [length, 1], [_ROWS, _SPAN])
    if is_transposed:
        rights = TensorDescriptor(right.T, [width, length], [length, 1], [_COLUMNS, _SPAN])
    else:
        rights = TensorDescriptor(right, [length, width], [width, 1], [_SPAN, _COLUMNS])
    with device_current(total):
        _add[(triton.cdiv(rows, _ROWS) * triton.cdiv(width, _COLUMNS),)](
            totals, lefts, rights, rows, width, LENGTH=length, TRANSPOSED=is_transposed, ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            SPAN=_SPAN, TILES=_TILES, num_warps=4, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
