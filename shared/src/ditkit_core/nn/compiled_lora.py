"""The product of a plain LoRA in compiled code on a GPU, as operations that torch's compiler does not look into.

Composed, it would be fp32 products, which miss the tensor cores, and fp32 copies of the layer's input, result and gradients: most of a
block's memory traffic. Composed of bf16 parts as in eager code, it would be wrong: inductor keeps numbers in fp32 between two operations of
one kernel, and the parts of a number are the differences that rounding to bf16 makes.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ditkit_core.nn.bf16_parts import IN_KERNELS, IN_TORCH, wide_product
from ditkit_core.nn.kernels.launch import HAS_TRITON

_TAGS = (torch.Tag.flexible_layout,)
"""The operations take tensors of any layout. Otherwise the compiler would write an operand again for each of them that takes it."""
_SPLIT = IN_KERNELS if HAS_TRITON else IN_TORCH


def compiled_sum(result: Tensor, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """result + scaling · x Aᵀ Bᵀ of a bf16 x and fp32 factors, summed in fp32 and rounded once to the dtype of `result`, bf16.

    The product with A is an operation of its own. So a recompute, whose backward needs that product, does not need `result`.
    """
    low, left, right = _low_rank(x.detach(), down.detach(), up.detach(), scaling)
    out: Tensor = _with_product(result, left, right, x, down, up, low, scaling)
    return out


@torch.library.custom_op("ditkit::low_rank", mutates_args=(), tags=_TAGS)
def _low_rank(x: Tensor, down: Tensor, up: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """scaling · x Aᵀ in fp32, and two bf16 matrices whose product is scaling · x Aᵀ Bᵀ."""
    of_down, of_up = _SPLIT.factors(down, up)
    products = wide_product(x.flatten(0, -2), of_down[: 3 * len(down)].T)
    left, low = _SPLIT.products(products, None, len(down), scaling)
    return low, left, of_up


@_low_rank.register_fake
def _(x: Tensor, down: Tensor, up: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, rank = math.prod(x.shape[:-1]), len(down)
    return (
        down.new_empty(rows, rank),
        x.new_empty(rows, 6 * rank),
        x.new_empty(len(up), 6 * rank),
    )


@torch.library.custom_op("ditkit::with_product", mutates_args=(), tags=_TAGS)
def _with_product(
    result: Tensor, left: Tensor, right: Tensor, x: Tensor, down: Tensor, up: Tensor, low: Tensor, scaling: float
) -> Tensor:
    """result + left · rightᵀ; what comes after these three is for the gradients."""
    # A copy, which torch's addmm would make too: an operation with a gradient may not write into what it is given.
    return result.flatten(0, -2).clone().addmm_(left, right.T).view(result.shape)


@_with_product.register_fake
def _(result: Tensor, *_: Any) -> Tensor:
    return result.new_empty(result.shape)


@torch.library.custom_op("ditkit::low_rank_gradients", mutates_args=(), tags=_TAGS)
def _gradients(
    gradient: Tensor, x: Tensor, down: Tensor, up: Tensor, low: Tensor, scaling: float, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, A and B in fp32; empty where they are not wanted."""
    saved = x.flatten(0, -2), down, up, low
    left, right, *factors = _SPLIT.gradients(gradient.flatten(0, -2), saved, scaling, wanted[1:])
    d_x = wide_product(left, right).view(x.shape) if wanted[0] else None
    d_x, d_down, d_up = (
        down.new_empty(0) if factor_gradient is None else factor_gradient for factor_gradient in (d_x, *factors)
    )
    return d_x, d_down, d_up


@_gradients.register_fake
def _(
    gradient: Tensor, x: Tensor, down: Tensor, up: Tensor, low: Tensor, scaling: float, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (tensor.shape if want else (0,) for tensor, want in zip((x, down, up), wanted, strict=True))
    d_x, d_down, d_up = (down.new_empty(shape) for shape in shapes)
    return d_x, d_down, d_up


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, x, down, up, low, scaling = inputs
    ctx.save_for_backward(x, down, up, low)
    ctx.scaling = scaling


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[3:6])
    gradients = _gradients(gradient, *ctx.saved_tensors, ctx.scaling, wanted)
    # The compiler rounds x's gradient to bf16 when it has added the frozen layer's.
    wanted_gradients = (one if want else None for one, want in zip(gradients, wanted, strict=True))
    return gradient, None, None, *wanted_gradients, None, None


_with_product.register_autograd(_backward, setup_context=_keep)


# What plans and torch's counter count of these operations: their matrix products, as eager code makes them.
Shape = tuple[int, ...]


@register_flop_formula(torch.ops.ditkit.low_rank)
def _low_rank_flops(x: Shape, down: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * 3 * down[0]


@register_flop_formula(torch.ops.ditkit.with_product)
def _with_product_flops(result: Shape, left: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(result) * left[1]


@register_flop_formula(torch.ops.ditkit.low_rank_gradients)
def _gradients_flops(
    gradient: Shape, x: Shape, down: Shape, up: Shape, low: Shape, scaling: float, wanted: list[bool], **_: Any
) -> int:
    of_x, of_down, of_up = wanted
    return 2 * 3 * down[0] * (math.prod(gradient) * (1 + of_up) + math.prod(x) * (2 * of_x + of_down))
