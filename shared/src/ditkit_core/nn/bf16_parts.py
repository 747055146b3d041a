"""fp32 matrices of a LoRA as sums of bf16 matrices, which a GPU's tensor cores multiply.

Products of bf16 are exact in fp32, so the parts lose nothing. Sums are fp32, but tensor cores
truncate them where other units round: emulated for an A100, a sum of 5,120 products is off by 6e-6
of its typical size, of 75,600 by 1e-4, mostly towards zero, where cuBLAS does not divide it. fp32
units cost 3e-7, and matmuls in bf16 round their result by 2e-3.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.nn.kernels import hopper
from ditkit_core.nn.kernels import ops as kernels

PARTS = (0, 1, 2, 0, 0, 1), (2, 1, 0, 0, 1, 0)
"""Which of its three parts a left and a right matrix consist of, side by side along the rank. Their
product has all pairs of parts but the three smallest, together at most 2**-24 of the largest, an
fp32 rounding. The first three are the complete matrix, for a product with one that is bf16 already.
"""


def wide_product(a: Float[Tensor, "n k"], b: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    """The product of bf16 matrices in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32)


class Split(NamedTuple):
    """The functions that split factors and sum products."""

    factors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """A [rank, in] and B [out, rank] to right matrices in parts [6 · rank, in] and [out, 6 ·
    rank]."""
    products: Callable[[Tensor, Tensor | None, int, float], tuple[Tensor, Tensor]]
    """scaling · sum of the terms of [n, terms · rank]: the left matrix of its parts [n, 6 · rank],
    and the sum itself in fp32; or in its place the left matrix of another fp32 matrix [n, rank]."""
    sums: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    """The sums of the terms of [terms · rank, in] and of [out, terms · rank]."""
    add: Callable[[Tensor, Tensor, Tensor], Tensor]
    """A matrix [n, m], with the product of matrices of parts added in place."""

    def gradients(
        self,
        gradient: Float[Tensor, "n out"],
        saved: Sequence[Tensor],
        scaling: float,
        wanted: Sequence[bool],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The two matrices whose product is the gradient of x, and the gradients of A and of B
        where they are wanted.

        Args:
            gradient: Gradient of the layer's result.
            saved: x [n, in] in bf16, A, B, and scaling · x Aᵀ [n, rank], the last three in fp32.
            scaling: alpha / rank.
            wanted: For A, for B.
        """
        rows, down, up, low = saved
        rank = down.shape[0]
        of_down, of_up = self.factors(down, up)
        terms = wide_product(gradient, of_up[:, : 3 * rank])
        d_low, left = self.products(terms, low if wanted[1] else None, rank, scaling)
        d_up = wide_product(gradient.T, left[:, : 3 * rank]) if wanted[1] else None
        d_down = wide_product(d_low[:, : 3 * rank].T, rows) if wanted[0] else None
        if d_down is not None and d_up is not None:
            d_down, d_up = self.sums(d_down, d_up, rank)
        elif d_down is not None:
            d_down = d_down.view(3, *down.shape).sum(0)
        elif d_up is not None:
            d_up = d_up.view(-1, 3, rank).sum(1)
        return d_low, of_down, d_down, d_up


def split_factors(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`Split.factors` in torch."""
    return _in_order(down, PARTS[1], 0), _in_order(up, PARTS[1], 1)


def split_products(
    products: Tensor, low: Tensor | None, rank: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """`Split.products` in torch."""
    total = products.view(len(products), -1, rank).sum(1) * scaling
    return _in_order(total, PARTS[0], 1), total if low is None else _in_order(low, PARTS[0], 1)


def split_sums(of_down: Tensor, of_up: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """`Split.sums` in torch."""
    return of_down.view(-1, rank, of_down.shape[1]).sum(0), of_up.view(len(of_up), -1, rank).sum(1)


def _in_order(wide: Tensor, order: Sequence[int], axis: int) -> Tensor:
    parts = bf16_parts_of(wide)
    return torch.cat([parts[index] for index in order], axis)


def bf16_parts_of(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bf16 tensors whose sum is an fp32 tensor: each has 8 bits of the 24."""
    first = wide.bfloat16()
    rest = wide - first
    second = rest.bfloat16()
    return first, second, torch.sub(rest, second, out=torch.empty_like(second))


KERNEL_ADDS_FROM, KERNEL_ADDS_COLUMNS = 2**24, 192
"""Elements of a matrix from which, and columns of a factor in parts up to which, a kernel adds a
product on Hopper: measured there, and as fast as cuBLAS or up to 13 % faster. cuBLAS rounds the
product to bf16 before it adds it; a kernel rounds once."""


def _add_in_kernel(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    if total.numel() < KERNEL_ADDS_FROM or not _suits_kernel(total, left, right):
        return total.addmm_(left, right)
    kernels.add_product(total, left, right)
    return total


def _suits_kernel(total: Tensor, left: Tensor, right: Tensor) -> bool:
    length, width = right.shape
    if length > KERNEL_ADDS_COLUMNS or not hopper.is_hopper(total):
        return False
    # Whole tiles are copied from addresses, and in rows, of multiples of 16 bytes; torch's memory
    # begins at such.
    tensors = total, left, right.T if right.stride(0) == 1 else right
    return length % 8 == width % 8 == 0 and all(
        x.is_contiguous() and x.storage_offset() % 8 == 0 for x in tensors
    )


IN_TORCH = Split(split_factors, split_products, split_sums, Tensor.addmm_)
IN_KERNELS = Split(kernels.factor_parts, kernels.product_parts, kernels.term_sums, _add_in_kernel)
