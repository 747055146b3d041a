"""Products with a matrix of 8-bit codes, which has a scale for each row (`base.compute`).

A product is of two matrices of codes: W has a scale for each row from the start, and the input gets
one for each of its rows, its largest magnitude divided by the largest code. Sums of int8 codes are
exact, sums of fp8 codes are in fp32; both scales are applied to the sum, in fp32, and the result is
rounded once to the input's dtype. In the backward the sum runs over W's rows, whose scales cannot
be taken out of it: they multiply the columns of the gradient before its rows get scales of their
own. So the codes of W serve both products, and no second rounding of W exists.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ditkit_core.nn.context import device_kind
from ditkit_core.nn.kernels import hopper
from ditkit_core.nn.kernels import ops as kernels
from ditkit_core.nn.lora import AT_ONCE

LARGEST_CODE = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}
"""What the largest magnitude of a row of inputs becomes, by format of a product's codes."""
_LEAST_ROWS = 17  # of torch's int8 product on a GPU
CODES_AT_ONCE = 2**28
"""Codes of inputs that exist at once where no sums in 32 bits do: of as many bytes as those."""
_EXACT_SPAN = 2**24 // 2**14  # products of two codes whose sum fp32 has exactly


def product(x: Tensor, bias: Tensor | None, codes: Tensor, scale: Tensor, *, fused: bool) -> Tensor:
    """x Wᵀ + b in the dtype of x, for W [out, in] as codes and scales [out, 1]; `fused`: whether
    kernels of our own round and scale."""
    return _product_of_codes(x, codes.T, after=scale.T, bias=bias, fused=fused)


def transposed_product(gradient: Tensor, codes: Tensor, scale: Tensor, *, fused: bool) -> Tensor:
    """gradient · W, with the same W."""
    # Tensor cores multiply 8 bits only if both matrices are contiguous along the sum: hence a
    # transposed copy, for a moment.
    fused = fused and _fits_kernels(gradient)
    columns = kernels.transpose_codes(codes) if fused else codes.T.contiguous()
    return _product_of_codes(gradient, columns.T, before=scale.T, fused=fused)


def _product_of_codes(
    x: Tensor,
    codes: Tensor,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
    bias: Tensor | None = None,
    fused: bool = False,
) -> Tensor:
    """x · codes, with rows of x rounded to codes, in the dtype of x.

    Args:
        x: [.., k].
        codes: int8 or fp8 codes of a matrix [k, n].
        before: Factors [1, k] of the columns of x.
        after: Factors [1, n] of the columns of the result.
        bias: Added to each row of the result, before it is rounded.
        fused: Whether kernels of our own round rows and apply scales.
    """
    fused = fused and _fits_kernels(x)
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(len(rows), codes.shape[1])
    # Only on Hopper, where the times of `_multiply` were measured.
    has_product = codes.dtype == torch.int8 or (bias is None and x.dtype == torch.bfloat16)
    applies_scales = fused and has_product and hopper.is_hopper(x)
    # Rows have scales of their own, so a part of them is independent of the others, and only a part
    # exists in codes, or sums in 32 bits.
    at_once = max(_LEAST_ROWS, AT_ONCE[device_kind(x)] // max(codes.shape))
    if applies_scales:
        at_once = CODES_AT_ONCE // len(codes)
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        if fused:
            of_rows, scale = kernels.round_rows(rows[part], before, codes.dtype)
            if applies_scales:
                _multiply(of_rows, codes, scale, after, bias, out=out[part])
            else:
                kernels.apply_scales(_sums(of_rows, codes), scale, after, bias, out=out[part])
            continue
        of_rows, scale = rounded(rows[part] if before is None else rows[part] * before, codes.dtype)
        wide = _sums(of_rows, codes) * scale
        if after is not None:
            wide.mul_(after)
        if bias is not None:
            wide.add_(bias)
        out[part].copy_(wide)
    return out.view(*x.shape[:-1], codes.shape[1])


def _fits_kernels(x: Tensor) -> bool:
    return x.dtype.itemsize <= 4


def _multiply(
    of_rows: Tensor,
    codes: Tensor,
    scale: Tensor,
    after: Tensor | None,
    bias: Tensor | None,
    *,
    out: Tensor,
) -> None:
    """Codes [n, k] by codes [k, m], with scales of rows [n, 1] and columns [1, m], in one pass.

    On an H100, 20,280 rows, 5,120 numbers and as many results take 0.86 ms in int8 and 0.84 ms in
    fp8. Sums first, and scales in a pass of their own, take 1.36 and 0.97 ms, and the product in
    bf16 1.31 ms. Fast accumulation would save a sixth of fp8's time, but its sums are off by 2e-3
    of their size for 5,120 random products, and by a fifth for 13,824 of one sign: 14 bits are too
    few to count so many.
    """
    if codes.dtype == torch.int8:
        kernels.multiply_codes(of_rows, codes.T, scale, after, bias, out=out)
        return
    columns = scale.new_ones(1, codes.shape[1]) if after is None else after
    torch._scaled_mm(of_rows, codes, scale_a=scale, scale_b=columns, out_dtype=out.dtype, out=out)


def divided(x: Tensor, number: float) -> Tensor:
    """x / number with the same bits on every device: a GPU multiplies by the reciprocal of a number
    that is on the host."""
    return x / x.new_full((), number)


def rounded(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of rows [n, k], and their scales [n, 1] in fp32, or fp64 if the rows are. A row that is
    not finite stays so in its scale."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    largest = torch.linalg.vector_norm(rows, math.inf, 1, keepdim=True).to(wide)
    limit = LARGEST_CODE["int8" if dtype == torch.int8 else "fp8"]
    # Not below the smallest normal number: rows of zeros stay zeros.
    scale = divided(largest, limit).clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = rows / scale
    if dtype == torch.int8:
        scaled.round_()
    return scaled.to(dtype, memory_format=torch.contiguous_format), scale


@cache
def is_exact_on_cpu() -> bool:
    """Whether torch's int8 product adds up in 32 bits here. oneDNN's adds pairs in 16 bits, which
    saturate, on a CPU that lacks VNNI."""
    with _disable_current_modes():  # of fake tensors: this asks the CPU
        codes = torch.full((32, 64), 127, dtype=torch.int8)
        return bool((torch._int_mm(codes, codes.T) == 64 * 127**2).all())


def _sums_by_spans(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices of int8 codes: fp32 adds up a span of it without rounding."""
    sums = torch.zeros(len(left), right.shape[1], dtype=torch.int32, device=left.device)
    for start in range(0, len(right), _EXACT_SPAN):
        span = slice(start, start + _EXACT_SPAN)
        sums += (left[:, span].float() @ right[span].float()).int()
    return sums


def _sums(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices of codes: int32 of int8, fp32 of fp8."""
    if left.dtype == torch.int8:
        if device_kind(left) == "cpu" and not is_exact_on_cpu():
            return _sums_by_spans(left, right)
        if (missing := _LEAST_ROWS - len(left)) > 0:
            return torch._int_mm(F.pad(left, (0, 0, 0, missing)), right)[: len(left)]
        return torch._int_mm(left, right)
    # torch's own is a thousand times slower there; products of fp8 are exact in fp32
    if device_kind(left) == "cpu":
        return left.float() @ right.float()
    one = torch.ones((), device=left.device)
    sums: Tensor = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return sums
