"""Factors and low-rank products of a LoRA as sums of bf16 matrices, for tensor cores; reference: `nn/bf16_parts.py: split_factors` and `split_products`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ditkit_core.nn.kernels.launch import blocks_of, launcher

_BLOCK = 1024


@triton.jit
def _store(out, wide, row, column, WIDTH: tl.constexpr, IS_FACTOR: tl.constexpr, inside):
    """The three parts of each number, in the order of `PARTS`: a row of six times WIDTH columns."""
    first = wide.to(tl.bfloat16)
    rest = wide - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    at = out + row * (6 * WIDTH) + column
    tl.store(at + (2 * WIDTH if IS_FACTOR else 0), first, mask=inside)
    tl.store(at + 3 * WIDTH, first, mask=inside)
    tl.store(at + (5 * WIDTH if IS_FACTOR else 4 * WIDTH), first, mask=inside)
    tl.store(at + WIDTH, second, mask=inside)
    tl.store(at + (4 * WIDTH if IS_FACTOR else 5 * WIDTH), second, mask=inside)
    tl.store(at + (0 if IS_FACTOR else 2 * WIDTH), third, mask=inside)


@triton.jit
def _split(factor, out, block, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    _store(out, tl.load(factor + place, mask=inside, other=0.0), place // WIDTH, place % WIDTH, WIDTH, True, inside)


@launcher(enable_fp_fusion=False)
@triton.jit
def _factors(
    down, up, of_down, of_up, down_count, up_count, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    block, blocks = tl.program_id(0), tl.cdiv(down_count, BLOCK)
    if block < blocks:  # its rows are stacked: one row of all its numbers
        _split(down, of_down, block, down_count, WIDTH, BLOCK)
    else:
        _split(up, of_up, block - blocks, up_count, RANK, BLOCK)


# Token counts differ between micro-batches: a kernel for each of their properties (16 divides it, it is 1) would be compiled in the middle of a
# run. Of their product with a constant rank Triton still knows what divides it, and reads and writes several numbers at once.
# Not fused: rounded once with the subtractions behind it, a product's parts would sum to another number.
@launcher(enable_fp_fusion=False)
@triton.jit(do_not_specialize=["rows"])
def _products(products, low, left, scaling, rows, TERMS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = place // RANK, place % RANK
    inside = place < tl.cast(rows, tl.int64) * RANK
    total = tl.zeros((BLOCK,), tl.float32)
    for term in tl.static_range(TERMS):
        total += tl.load(products + (row * TERMS + term) * RANK + column, mask=inside, other=0.0)
    total *= scaling
    tl.store(low + place, total, mask=inside)
    _store(left, total, row, column, RANK, False, inside)


def factors(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of A [6 · rank, in] and of B [out, 6 · rank], both contiguous."""
    (rank, width), num_out = down.shape, up.shape[0]
    down, up = down.contiguous(), up.contiguous()
    of_down = down.new_empty(6 * rank, width, dtype=torch.bfloat16)
    of_up = up.new_empty(num_out, 6 * rank, dtype=torch.bfloat16)
    counts = rank * width, num_out * rank
    programs = blocks_of(counts[0], _BLOCK) + blocks_of(counts[1], _BLOCK)
    _factors((programs, 1, 1), (down, up, of_down, of_up), counts, (rank, rank * width, _BLOCK))
    return of_down, of_up


def products(given: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """scaling · sum of the terms of [n, terms · rank] in fp32 [n, rank], and its parts [n, 6 · rank]."""
    given, rows, terms = given.contiguous(), given.shape[0], given.shape[1] // rank
    low = given.new_empty(rows, rank)
    left = given.new_empty(rows, 6 * rank, dtype=torch.bfloat16)
    programs = blocks_of(rows * rank, _BLOCK)
    _products((programs, 1, 1), (given, low, left), (scaling, rows), (terms, rank, _BLOCK))
    return low, left
