"""Factors and low-rank products of a LoRA as sums of bf16 matrices, for tensor cores, and sums of
what those give; reference: `nn/bf16_parts.py: IN_TORCH`."""

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
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    _store(
        out,
        tl.load(factor + offsets, mask=inside, other=0.0),
        offsets // WIDTH,
        offsets % WIDTH,
        WIDTH,
        True,
        inside,
    )


@launcher(enable_fp_fusion=False)
@triton.jit
def _factors(
    down,
    up,
    of_down,
    of_up,
    down_count,
    up_count,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.cdiv(down_count, BLOCK)
    if block < blocks:  # its rows are stacked: one row of all its numbers
        _split(down, of_down, block, down_count, WIDTH, BLOCK)
    else:
        _split(up, of_up, block - blocks, up_count, RANK, BLOCK)


@triton.jit
def _summed(
    products, offsets, inside, TERMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The sums of the terms of rows of [n, TERMS · WIDTH], one after the other."""
    first = offsets // WIDTH * (TERMS * WIDTH) + offsets % WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for term in tl.static_range(TERMS):
        total += tl.load(products + first + term * WIDTH, mask=inside, other=0.0)
    return total


# Token counts differ between micro-batches: a kernel for each of their properties (16 divides it,
# it is 1) would be compiled in the middle of a run. Of their product with a constant rank Triton
# still knows what divides it, and reads and writes several numbers at once. Not fused: rounded once
# with the subtractions behind it, a product's parts would sum to another number.
@launcher(enable_fp_fusion=False)
@triton.jit(do_not_specialize=["rows"])
def _products(
    products, low, left, left_of_low, scaling, rows,
    TERMS: tl.constexpr, RANK: tl.constexpr, HAS_LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.cast(rows, tl.int64) * RANK
    if HAS_LOW:
        half = tl.num_programs(0) // 2
        if tl.program_id(0) >= half:
            offsets -= half.to(tl.int64) * BLOCK
            inside = offsets < count
            wide = tl.load(low + offsets, mask=inside, other=0.0)
            _store(left_of_low, wide, offsets // RANK, offsets % RANK, RANK, False, inside)
            return
    inside = offsets < count
    total = _summed(products, offsets, inside, TERMS, RANK, BLOCK) * scaling
    if not HAS_LOW:
        tl.store(low + offsets, total, mask=inside)
    _store(left, total, offsets // RANK, offsets % RANK, RANK, False, inside)


@launcher(enable_fp_fusion=False)
@triton.jit
def _sums(
    of_down, of_up, down, up, down_count, up_count,
    TERMS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.cdiv(down_count, BLOCK)
    if block < blocks:  # its terms are below each other: one row of all its numbers
        offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < down_count
        tl.store(
            down + offsets, _summed(of_down, offsets, inside, TERMS, WIDTH, BLOCK), mask=inside
        )
    else:
        offsets = (block - blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < up_count
        tl.store(up + offsets, _summed(of_up, offsets, inside, TERMS, RANK, BLOCK), mask=inside)


def factors(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of A [6 · rank, in] and of B [out, 6 · rank], both contiguous."""
    (rank, width), num_out = down.shape, up.shape[0]
    down, up = down.contiguous(), up.contiguous()
    of_down = down.new_empty(6 * rank, width, dtype=torch.bfloat16)
    of_up = of_down.new_empty(num_out, 6 * rank)
    counts = rank * width, num_out * rank
    programs = blocks_of(counts[0], _BLOCK) + blocks_of(counts[1], _BLOCK)
    _factors((programs, 1, 1), (down, up, of_down, of_up), counts, (rank, rank * width, _BLOCK))
    return of_down, of_up


def products(
    summands: Tensor, low: Tensor | None, rank: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """scaling · sum of the terms of `summands` [n, terms · rank]: its parts [n, 6 · rank], and
    itself in fp32, or the parts of another fp32 matrix [n, rank]."""
    summands, rows, terms = summands.contiguous(), summands.shape[0], summands.shape[1] // rank
    left = summands.new_empty(rows, 6 * rank, dtype=torch.bfloat16)
    blocks = blocks_of(rows * rank, _BLOCK)
    if low is None:
        low = summands.new_empty(rows, rank)
        _products(
            (blocks, 1, 1),
            (summands, low, left, left),
            (scaling, rows),
            (terms, rank, False, _BLOCK),
        )
        return left, low
    of_low = torch.empty_like(left)
    tensors = summands, low.contiguous(), left, of_low
    _products((2 * blocks, 1, 1), tensors, (scaling, rows), (terms, rank, True, _BLOCK))
    return left, of_low


def sums(of_down: Tensor, of_up: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The sums of the terms of [terms · rank, in], and of [out, terms · rank]."""
    of_down, of_up, terms = of_down.contiguous(), of_up.contiguous(), of_down.shape[0] // rank
    num_in, num_out = of_down.shape[1], of_up.shape[0]
    down, up = of_down.new_empty(rank, num_in), of_up.new_empty(num_out, rank)
    counts = rank * num_in, num_out * rank
    programs = blocks_of(counts[0], _BLOCK) + blocks_of(counts[1], _BLOCK)
    _sums(
        (programs, 1, 1), (of_down, of_up, down, up), counts, (terms, rank, rank * num_in, _BLOCK)
    )
    return down, up
