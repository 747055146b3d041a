"""The kernels as operations of torch with gradients: `torch.ops.ditkit.*`.

An operation has a declared shape, so fake tensors follow it and the planner sees what it allocates,
on any machine. Triton is imported when a kernel first runs. On a CPU the operations run under
Triton's interpreter only (`TRITON_INTERPRET=1`), for tests.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.nn.kernels.launch import summing_programs

_LIBRARY = torch.library.Library("ditkit", "DEF")
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""By operation what runs its kernel."""
_PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors without a behaviour of their own."""
_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""How many dispatch modes are in force. A torch without this function, which is not public, calls
every operation as if there were one."""


def _declared(
    schema: str, module: str, function: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an operation that `function` in the file `module` computes; the decorated function
    makes its results under fake tensors.

    A call of it goes through torch where that shows: under a dispatch mode (plans, checkpoints that
    keep operations by their names, tests), for a tensor of another type (fake) or without memory,
    and where gradients are recorded, which these operations have none of by themselves. In autograd
    functions it runs `function` at once: torch would take the host as long as that takes, and would
    do nothing else.
    """

    @cache
    def implementation() -> Any:
        return getattr(import_module(f"ditkit_core.nn.kernels.{module}"), function)

    def run(*positional: Any, **named: Any) -> Any:
        return implementation()(*positional, **named)

    def declare(fake: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        IMPLEMENTATIONS[name] = run
        for device in ("CUDA", "CPU"):
            _LIBRARY.impl(name, run, device)
        torch.library.register_fake(f"ditkit::{name}", fake, lib=_LIBRARY)
        operation: Callable[..., Any] = getattr(torch.ops.ditkit, name).default

        def call(first: Tensor, *others: Any, **named: Any) -> Any:
            if type(first) in _PLAIN and not (
                first.is_meta or _num_modes() or torch.is_grad_enabled()
            ):
                return implementation()(first, *others, **named)
            return operation(first, *others, **named)

        return call

    return declare


@_declared(
    "norm_rotation(Tensor x, Tensor weight, Tensor? rotary, float eps, int heads, ScalarType "
    "dtype) -> (Tensor, Tensor)",
    "norm_rotation",
    "forward",
)
def _norm_rotation(
    x: Tensor, weight: Tensor, rotary: Any, eps: float, heads: int, dtype: torch.dtype
) -> Any:
    batch, tokens, dim = x.shape
    out = x.new_empty(batch, tokens, heads, dim // heads, dtype=dtype)
    return out, x.new_empty(batch, tokens, dim // len(weight), dtype=torch.float32)


@_declared(
    "norm_rotation_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? rotary, Tensor "
    "inverse, bool trained) -> (Tensor, Tensor)",
    "norm_rotation",
    "backward",
)
def _norm_rotation_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, rotary: Any, inverse: Tensor, trained: bool
) -> Any:
    programs = summing_programs(x.shape[0] * x.shape[1]) if trained else 0
    return x.new_empty(x.shape), x.new_empty(programs, len(weight), dtype=torch.float32)


@_declared(
    "affine_norm(Tensor x, Tensor scale, Tensor shift, float eps, float offset, ScalarType dtype) "
    "-> Tensor",
    "modulated_norm",
    "forward",
)
def _affine_norm(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, offset: float, dtype: torch.dtype
) -> Any:
    return x.new_empty(x.shape, dtype=dtype)


@_declared(
    "affine_norm_backward(Tensor gradient, Tensor x, Tensor scale, float eps, float offset, bool "
    "trained) -> (Tensor, Tensor)",
    "modulated_norm",
    "backward",
)
def _affine_norm_backward(
    gradient: Tensor, x: Tensor, scale: Tensor, eps: float, offset: float, trained: bool
) -> Any:
    batch, tokens, dim = x.shape
    programs = summing_programs(tokens, batch) if trained else 0
    return x.new_empty(x.shape), x.new_empty(batch, programs, 2, dim, dtype=torch.float32)


@_declared("gated_unit(Tensor x) -> Tensor", "gated_unit", "forward")
def _gated_unit(x: Tensor) -> Any:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@_declared("gated_unit_backward(Tensor gradient, Tensor x) -> Tensor", "gated_unit", "backward")
def _gated_unit_backward(gradient: Tensor, x: Tensor) -> Any:
    return x.new_empty(x.shape)


@_declared("gated_sum(Tensor y, Tensor x, Tensor gate) -> Tensor", "gated_sum", "forward")
def sum_with_gate(y: Tensor, x: Tensor, gate: Tensor) -> Any:
    """x + y · gate in the dtype of x, for one gate [batch, 1, dim] per sample."""
    return x.new_empty(x.shape)


@_declared(
    "gated_sum_backward(Tensor gradient, Tensor gate, ScalarType dtype) -> Tensor",
    "gated_sum",
    "backward",
)
def gated_sum_backward(gradient: Tensor, gate: Tensor, dtype: torch.dtype) -> Any:
    """gradient · gate in a dtype."""
    return gradient.new_empty(gradient.shape, dtype=dtype)


@_declared("factor_parts(Tensor down, Tensor up) -> (Tensor, Tensor)", "lora_parts", "factors")
def factor_parts(down: Tensor, up: Tensor) -> Any:
    """The factors of a LoRA as right matrices of bf16 parts, see `nn/bf16_parts.py: PARTS`."""
    (rank, width), num_out = down.shape, len(up)
    of_up = up.new_empty(num_out, 6 * rank, dtype=torch.bfloat16)
    return down.new_empty(6 * rank, width, dtype=torch.bfloat16), of_up


@_declared(
    "product_parts(Tensor products, Tensor? low, int rank, float scaling) -> (Tensor, Tensor)",
    "lora_parts",
    "products",
)
def product_parts(products: Tensor, low: Tensor | None, rank: int, scaling: float) -> Any:
    """scaling · sum of the terms of [n, terms · rank] as a left matrix of bf16 parts, and itself,
    or in its place `low` [n, rank] as such a matrix."""
    rows = len(products)
    left = products.new_empty(rows, 6 * rank, dtype=torch.bfloat16)
    return left, products.new_empty(rows, rank) if low is None else torch.empty_like(left)


@_declared("term_sums(Tensor down, Tensor up, int rank) -> (Tensor, Tensor)", "lora_parts", "sums")
def term_sums(down: Tensor, up: Tensor, rank: int) -> Any:
    """The sums of the terms of [terms · rank, in] and of [out, terms · rank]."""
    return down.new_empty(rank, down.shape[1]), up.new_empty(len(up), rank)


@_declared(
    "add_product(Tensor(a!) total, Tensor left, Tensor right) -> ()",
    "added_products",
    "accumulated",
)
def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """The product of bf16 matrices [n, k] and [k, m] added to one [n, m] in place, rounded once."""


@_declared(
    "dequantize_rows(Tensor codes, Tensor scale, ScalarType dtype) -> Tensor", "dequantized", "rows"
)
def dequantize_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
    """An int8 matrix [out, in] by the scales of its rows."""
    return codes.new_empty(codes.shape, dtype=dtype)


@_declared(
    "dequantize_nf4(Tensor codes, Tensor scale, Tensor factor, Tensor mean, Tensor levels, "
    "ScalarType dtype) -> Tensor",
    "dequantized",
    "nf4",
)
def dequantize_nf4(
    codes: Tensor, scale: Tensor, factor: Tensor, mean: Tensor, levels: Tensor, dtype: torch.dtype
) -> Any:
    """An NF4 matrix [out, in] of bytes [out, in / 2], by the scales of its blocks."""
    return codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype)


@_declared(
    "round_rows(Tensor x, Tensor? columns, ScalarType dtype) -> (Tensor, Tensor)",
    "rounded_rows",
    "codes_of_rows",
)
def round_rows(x: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Any:
    """Codes of a matrix [n, k] by the largest magnitude of each row, and the scales [n, 1]; its
    columns are multiplied by factors before."""
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(len(x), 1, dtype=torch.float32)


@_declared("transpose_codes(Tensor codes) -> Tensor", "rounded_rows", "transposed")
def transpose_codes(codes: Tensor) -> Any:
    """A matrix of 8-bit codes with its rows as columns, contiguous."""
    return codes.new_empty(codes.shape[1], codes.shape[0])


@_declared(
    "apply_scales(Tensor sums, Tensor scale, Tensor? columns, Tensor? bias, *, Tensor(a!) out) -> "
    "()",
    "rounded_rows",
    "scaled",
)
def apply_scales(
    sums: Tensor, scale: Tensor, columns: Tensor | None, bias: Tensor | None, *, out: Tensor
) -> None:
    """Sums of products of codes by the scales of rows and columns, plus a bias, in the dtype of
    `out`."""


@_declared(
    "multiply_codes(Tensor left, Tensor right, Tensor scale, Tensor? columns, Tensor? bias, *, "
    "Tensor(a!) out) -> ()",
    "code_products",
    "multiplied",
)
def multiply_codes(
    left: Tensor,
    right: Tensor,
    scale: Tensor,
    columns: Tensor | None,
    bias: Tensor | None,
    *,
    out: Tensor,
) -> None:
    """Products of rows of int8 codes [n, k] and [m, k] by the scales of both, plus a bias, in the
    dtype of `out`."""


@_declared(
    "round_stochastic(Tensor(a!) weight, Tensor values, int first, int last, int start, int of, "
    "int chunk) -> ()",
    "rounding",
    "stochastic",
)
def round_stochastic(
    weight: Tensor, values: Tensor, first: int, last: int, start: int, of: int, chunk: int
) -> None:
    """Contiguous fp32 values to the bits of bf16, see `nn/stochastic_rounding.py:
    write_stochastic`."""


@_declared(
    "round_split(Tensor(a!) weight, Tensor values, Tensor(b!) rest) -> ()", "rounding", "split"
)
def round_split(weight: Tensor, values: Tensor, rest: Tensor) -> None:
    """Contiguous fp32 values to the bits of bf16 and a remainder."""


@_declared(
    "join_split(Tensor(a!) values, Tensor weight, Tensor rest) -> ()", "rounding", "restored"
)
def join_split(values: Tensor, weight: Tensor, rest: Tensor) -> None:
    """The values that `round_split` was given."""


def _features_next_to_each_other(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class NormRotation(torch.autograd.Function):
    """y = rotate(x · rsqrt(mean x² + eps) · weight), computed in fp32 and rounded once to `dtype`.

    x [batch, tokens, dim] in bf16, fp16 or fp32; weight [dim or head_dim] and the table of cosines
    and sines (`rope.py: rotary_table`) in fp32; no table means no rotation. Keeps x and one number
    per group for the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "batch tokens dim"],
        weight: Float[Tensor, " group"],
        rotary: Float[Tensor, "tables tokens 1 pairs 2"] | None,
        eps: float,
        heads: int,
        dtype: torch.dtype,
    ) -> Float[Tensor, "batch tokens heads head_dim"]:
        x, weight = _features_next_to_each_other(x), weight.contiguous()
        # the kernel reads a token's row as it is
        if rotary is not None and rotary.stride()[-2:] != (2, 1):
            rotary = rotary.contiguous()
        out, inverse = _norm_rotation(x, weight, rotary, eps, heads, dtype)
        ctx.save_for_backward(x, weight, rotary, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        trained = ctx.needs_input_grad[1]
        d_x, parts = _norm_rotation_backward(
            _features_next_to_each_other(gradient), *ctx.saved_tensors, trained
        )
        return d_x, parts.sum(0) if trained else None, None, None, None, None


class AffineNorm(torch.autograd.Function):
    """layer_norm(x) · (offset + scale) + shift, computed in fp32 and rounded once to `dtype`.

    x [batch, tokens, dim] in bf16, fp16 or fp32; scale and shift [batch, 1 or tokens, dim], of one
    dtype. With a row per token they get no gradients here. Keeps x and scale.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        eps: float,
        offset: float,
        dtype: torch.dtype,
    ) -> Float[Tensor, "batch tokens dim"]:
        x, ctx.eps, ctx.offset = _features_next_to_each_other(x), eps, offset
        # the kernel reads both at the same places
        if scale.stride() != shift.stride() or scale.stride(-1) != 1:
            scale, shift = scale.contiguous(), shift.contiguous()
        ctx.save_for_backward(x, scale)
        return _affine_norm(x, scale, shift, eps, offset, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        trained = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        gradient = _features_next_to_each_other(gradient)
        d_x, parts = _affine_norm_backward(gradient, x, scale, ctx.eps, ctx.offset, trained)
        if not trained:
            return d_x, None, None, None, None, None
        d_scale, d_shift = (sums[:, None].to(scale.dtype) for sums in parts.sum(1).unbind(1))
        return d_x, d_scale, d_shift, None, None, None


class GatedUnit(torch.autograd.Function):
    """silu(a) · b of the halves [a | b] of the last dimension, computed in fp32 and rounded once.
    Keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch half"]:
        x = _features_next_to_each_other(x)
        ctx.save_for_backward(x)
        return _gated_unit(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _gated_unit_backward(_features_next_to_each_other(gradient), x)
