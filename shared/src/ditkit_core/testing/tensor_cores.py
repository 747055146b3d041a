"""A GPU's products of bf16 matrices, on a CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class TensorCores(TorchDispatchMode):
    """Products of bf16: the CPU has no kernel with a wider result."""

    def __init__(
        self, at_once: int | None = None, extra: int = 0, *, rounds_products: bool = False
    ):
        """By default sums are not rounded before the end.

        Args:
            at_once: Number of products that are added to a sum in a step, in which all of them are
                truncated to one exponent, and the sum to fp32. From "Numerical behavior of NVIDIA
                tensor cores", Fasi et al. 2021: 4 for V100, 8 for A100.
            extra: Bits behind fp32's last one that a step keeps: 0 for V100, 1 for A100.
            rounds_products: Whether a product is rounded to bf16 before it is added to a matrix, as
                cuBLAS does on an H100.
        """
        super().__init__()
        self._at_once, self._extra, self._rounds_products = at_once, extra, rounds_products

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.double(), b.double()
        if self._at_once is None:
            return a @ b
        total = a.new_zeros(len(a), b.shape[1])
        for left, right in zip(a.split(self._at_once, 1), b.split(self._at_once), strict=True):
            terms = torch.cat([left[:, :, None] * right[None], total[:, None]], 1)
            total = _truncated(
                _truncated(terms, terms.abs().amax(1, keepdim=True), self._extra).sum(1)
            )
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.dtype:
            a, b, dtype = args
            return self._product(a, b).to(dtype)
        if func is torch.ops.aten.addmm_.default:
            out, a, b = args
            product = self._product(a, b)
            return out.copy_(
                out.double() + (product.to(out.dtype) if self._rounds_products else product)
            )
        if func is torch.ops.aten.mm.default and args[0].dtype == torch.bfloat16:
            return self._product(*args).bfloat16()
        return func(*args, **(kwargs or {}))


def _truncated(x: Tensor, largest: Tensor | None = None, extra: int = 0) -> Tensor:
    """fp64 numbers without the bits that fp32 and some more bits lack at the exponent of `largest`;
    by default their own."""
    _, exponent = torch.frexp(x if largest is None else largest)
    return torch.ldexp(torch.ldexp(x, 24 + extra - exponent).trunc(), exponent - 24 - extra)
