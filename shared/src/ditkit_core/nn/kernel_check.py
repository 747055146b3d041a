"""Whether the Triton kernels compute on a GPU what torch computes there, which only that GPU with
its driver and its Triton can say.

The functions that call the kernels run forward and backward: twice with the kernels on bf16, as
most of a run, and with torch on the same values in fp64. Codes, what is made of them, and rounded
weights are compared bitwise. Each kernel runs in one variant, so that little is compiled; Triton
keeps that on disk. The norms run in the variants of all models, and of a LoRA and a full fine-tune.
Tests make the same cases of other shapes, dtypes and layouts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.io.runtimes import runtime_of
from ditkit_core.models.precision import Precision
from ditkit_core.nn.attention.support import capability_text
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.nn.eight_bit_products import rounded
from ditkit_core.nn.functional import gated_sum, gated_unit, modulated_norm, normalised_heads
from ditkit_core.nn.kernels import hopper
from ditkit_core.nn.kernels import ops as kernels
from ditkit_core.nn.kernels.launch import INTERPRETED, kernels_in_force
from ditkit_core.nn.lora import low_rank_sum
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.nn.stochastic_rounding import joined, write_split, write_stochastic

LIMIT = 1e-5
"""Largest difference beyond one step of the result's dtype, relative to the largest value. Another
order of a sum of 5,120 numbers in fp32, and a GPU's approximate roots and exponentials, cost 1e-6
of it; a wrong factor, place or mask costs much more. So do a LoRA's products here, which tensor
cores make: they truncate each sum, again after every 4 to 16 products. Over 5,120 products that
would cost 7e-6 to 2e-5."""
_OLDEST, _WITH_FP8 = (8, 0), (8, 9)
"""Compute capability of the oldest GPUs that Triton supports, and of the oldest on which it
converts to fp8."""
_TOKENS, _WIDTH, _HEAD = 520, 5120, 128
"""Wan 14B's width, over which several warps sum, and so many tokens that programs which sum over
rows take several (`summing_programs`)."""
_ROWS, _FEATURES = 14, 640
"""Sizes where more would show nothing else."""
_PARTS = 6 * 32
"""Columns of a LoRA's factor of rank 32 in parts (`nn/bf16_parts.py: PARTS`)."""


class KernelCase(NamedTuple):
    """A computation that has kernels, and what it is computed of."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    """Of one result the gradients are compared too."""
    inputs: tuple[Tensor, ...]
    """Its arguments, as the kernels get them; those that require gradients get some."""
    is_bitwise: bool = False
    """Whether torch computes with the same arguments, and the results have to have the same
    bits."""
    rounds_products: bool = False
    """Whether products are rounded to the results' dtype before they are added, which is allowed to
    cost half a step of the largest product."""


class KernelCheck(NamedTuple):
    """What a comparison of the kernels with torch on one GPU measured."""

    fault: str = ""
    """What is wrong, as what follows the word triton; empty if the kernels compute what torch
    computes."""
    error: float = 0.0
    """The largest error, in the units of `LIMIT`, of what need not be bitwise equal."""
    rounds_products: bool = False
    """`rounds_products` of the GPU."""

    def __str__(self) -> str:
        """What was measured, for a line of the run."""
        twice = (
            ", and cuBLAS rounds products of LoRAs before it adds them"
            if self.rounds_products
            else ""
        )
        return f"off by {self.error:.1g} of the largest value at most{twice}"


def rounds_products(device: torch.device) -> bool:
    """Whether `addmm_` of bf16 matrices rounds the product to bf16 before it adds it to the matrix,
    and rounds again.

    Measured on an H100 with the cuBLAS of CUDA 13.0: it does, for all sizes and layouts of a LoRA's
    products, through cuBLAS and cuBLASLt, with or without reductions in bf16 and split sums, also
    as `addmm` and `baddbmm`. Under a LoRA whose product is a tenth of its layer's, a bf16 sum's
    error is then 1.01 times as large as with one rounding, and 1.3 times where the two are as large
    as each other. Factors in bf16, which peft multiplies under autocast, cost 1.03 and 1.8 times. A
    product in fp32 that is added afterwards is rounded once, and takes 2.6 times as long.
    """
    # 1 + 2^-8 - 1: the sum in the parentheses is halfway between 1 and the next number of bf16.
    left = torch.zeros(_TOKENS, _PARTS, device=device)
    right = torch.zeros(_PARTS, _WIDTH, device=device)
    left[:, :2], right[0], right[1] = 1, 1, 2**-8
    total = torch.full((_TOKENS, _WIDTH), -1.0, device=device, dtype=torch.bfloat16)
    return bool((total.addmm_(left.bfloat16(), right.bfloat16()) == 0).any())


def compare_kernels(device: torch.device) -> KernelCheck:
    """Compare the kernels with torch on a GPU."""
    runtime = runtime_of(device)
    capability = _WITH_FP8 if runtime is None else runtime.get_device_capability(device)
    if capability < _OLDEST:
        return KernelCheck(
            f"needs compute capability {capability_text(_OLDEST)}, and {device} has "
            f"{capability_text(capability)}"
        )
    largest = 0.0
    for case in _cases(device, has_fp8=capability >= _WITH_FP8):
        try:
            # A compiler, a linker, a driver or a disk may fail, each in its own way, and a run can
            # do without the kernels.
            with given_to_library(f"fails in {case.name} on {device}", "torch runs without it"):
                error = error_of(case)
        except UserError as failure:
            try:
                torch.zeros(1, device=device).item()
            except RuntimeError as broken:
                cause = f"triton {failure}, but not on this GPU in this process, which cannot use it any more"
                raise UserError(f"{cause}; set train.kernels = torch") from broken
            return KernelCheck(str(failure))
        if not error <= (0 if case.is_bitwise else LIMIT):  # not `>`: also where it is NaN
            return KernelCheck(
                f"computes {case.name} wrongly on {device} (off by {error:.1g} of the largest "
                f"value)"
            )
        largest = max(largest, error)
    return KernelCheck(error=largest, rounds_products=rounds_products(device))


def error_of(case: KernelCase) -> float:
    """The largest difference between the kernels, launched by Triton and by us, and torch in
    results and gradients, in the units of `LIMIT`."""
    exact = case.inputs
    if not case.is_bitwise:
        exact = tuple(
            x.detach().double().contiguous().requires_grad_(x.requires_grad) for x in exact
        )
    results = []
    # Kernels twice: Triton makes the first launch of a kernel, and `nn/kernels/launch.py: Launcher`
    # those after it, but in the interpreter.
    times = 1 if INTERPRETED else 2
    for name, inputs in (*[("triton", case.inputs)] * times, ("torch", exact)):
        with block_settings(BlockSettings(kernels=name)):
            results.append(_results(case, inputs))
    *launches, wanted = results
    pairs = [pair for ours in launches for pair in zip(ours, wanted, strict=True)]
    return float(torch.stack([_apart(*pair, case) for pair in pairs]).max())


def _apart(ours: Tensor, exact: Tensor, case: KernelCase) -> Tensor:
    wide = exact.double()
    largest = wide.abs().max()
    allowed = (
        torch.zeros_like(wide) if case.is_bitwise else torch.finfo(ours.dtype).eps * wide.abs()
    )
    if case.rounds_products:
        # The products of these cases are less than twice as large as their results.
        allowed += torch.finfo(ours.dtype).eps * largest
    return ((ours.double() - wide).abs() - allowed).relu().max() / largest


def _results(case: KernelCase, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a case; of one result also the gradients, of an upstream gradient that every
    dtype has."""
    results = case.function(*inputs)
    if isinstance(results, tuple):
        return results
    upstream = torch.randn(
        results.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu"
    ).bfloat16()
    trained = [x for x in inputs if x.requires_grad]
    return results.detach(), *torch.autograd.grad(results, trained, upstream.to(results))


def _cases(device: torch.device, *, has_fp8: bool) -> Iterator[KernelCase]:
    random = torch.Generator().manual_seed(0)  # the process's own generators stay as they are

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).bfloat16().float().to(device)

    x, table = values(2, _TOKENS, _WIDTH).bfloat16(), values(1, _TOKENS, 1, _HEAD // 2, 2)
    # Kernels that make no gradients of weights are others: of a LoRA's run, next to the kernels of
    # a full fine-tune.
    for trained in (True, False):
        for width in (_WIDTH, _HEAD):
            yield normed_heads(x, values(width), table, _WIDTH // _HEAD, trained=trained)
        yield modulated(x, values(2, 1, _WIDTH), values(2, 1, _WIDTH), trained=trained)
    yield gated(x)
    yield gated_into(values(2, _TOKENS, _WIDTH), x, values(2, 1, _WIDTH))
    # Factors not in bf16: the second and the third part of such would be zeros.
    down, up = values(32, _FEATURES) / 3, values(_FEATURES, 32) / 3
    x = values(_ROWS, _FEATURES).bfloat16()
    yield adapted(x, down, up, 0.3)
    yield adapted(
        x, down, up, 0.3, over=torch.eye(_FEATURES), rounds_products=rounds_products(device)
    )
    if hopper.is_hopper(x):
        yield summed_product(
            values(_ROWS, _FEATURES).bfloat16(),
            values(_ROWS, 24).bfloat16(),
            values(24, _FEATURES).bfloat16(),
        )
    for kind in ("int8", "nf4"):
        yield dequantized(kind, values(65, 1088))  # several groups of scales, the last one short
    wide, columns = values(_ROWS, _WIDTH), values(1, _WIDTH)
    yield from rounded_to_codes(wide, columns, (torch.int8, torch.float8_e4m3fn)[: 1 + has_fp8])
    yield _transposed((wide * 30).to(torch.int8))
    yield _scaled((wide * 2**16).int(), values(_ROWS, 1), columns, values(_WIDTH))
    yield written(wide * 1.001, start=3, of=wide.numel() + 7)
    yield multiplied_codes("int8", values(_ROWS, _FEATURES), values(384, _FEATURES), values(384))


def normed_heads(
    x: Tensor,
    weight: Tensor,
    table: Tensor | None,
    heads: int,
    *,
    trained: bool = True,
    heads_first: bool = False,
) -> KernelCase:
    """RMS norm over as many features as there are weights, and rotation by a table.

    Args:
        trained: With a gradient of the weight.
        heads_first: Gradients have heads before tokens.
    """

    def function(x: Tensor, weight: Tensor, table: Tensor | None = None) -> Tensor:
        norm = with_tensors(nn.RMSNorm(len(weight), eps=1e-6), weight=weight)
        out = normalised_heads(x, norm, heads, Precision(matmul=x.dtype), table)
        return out.transpose(1, 2) if heads_first else out

    inputs = (
        x.requires_grad_(),
        weight.requires_grad_(trained),
        *([] if table is None else [table]),
    )
    return KernelCase(f"RMS norm over {len(weight)} and rotation", function, inputs)


def with_tensors(layer: nn.Module, **tensors: Tensor) -> Any:
    """A layer with tensors in place of its parameters."""
    for name, tensor in tensors.items():
        delattr(layer, name)
        setattr(layer, name, tensor)
    return layer


def modulated(x: Tensor, scale: Tensor, shift: Tensor, *, trained: bool = True) -> KernelCase:
    """Layer norm and modulation; `trained`: with gradients of scale and shift."""

    def function(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return modulated_norm(x, scale, shift, 1e-6, scale.dtype, x.dtype)

    affine = (row.requires_grad_(trained) for row in (scale, shift))
    return KernelCase("layer norm", function, (x.requires_grad_(), *affine))


def gated(x: Tensor) -> KernelCase:
    """The product of one half with a function of the other."""
    return KernelCase("gated unit", gated_unit, (x.requires_grad_(),))


def summed_product(total: Tensor, left: Tensor, right: Tensor) -> KernelCase:
    """A sum with a product of bf16 matrices."""

    def function(total: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        if not kernels_in_force(total) or total.dtype != torch.bfloat16:
            return (total + left @ right,)
        kernels.add_product(out := total.clone(), left, right)
        return (out,)

    return KernelCase("sum with a product", function, (total, left, right))


def gated_into(x: Tensor, y: Tensor, gate: Tensor, *, trained: bool = True) -> KernelCase:
    """The sum of a residual stream and another tensor times a gate; `trained`: with a gradient of
    the gate."""

    def function(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return gated_sum(y, x, gate)

    return KernelCase(
        "gated sum",
        function,
        (x.requires_grad_(), y.requires_grad_(), gate.requires_grad_(trained)),
    )


def adapted(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    scaling: float,
    *,
    over: Tensor | None = None,
    rounds_products: bool = False,
) -> KernelCase:
    """A LoRA.

    Args:
        over: The frozen layer's weight, with at most one number in a row, so that its own product
            is exact in bf16. None is zeros: a product that is rounded before it is added to a zero
            has the bits of one that is not.
        rounds_products: Whether another product may be rounded before it is added.
    """
    frozen = torch.zeros(len(up), down.shape[1]) if over is None else over
    frozen = frozen.to(x.device)

    def function(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return low_rank_sum(x, down, up, scaling, lambda x: F.linear(x, frozen.to(x.dtype)))

    inputs = (x.requires_grad_(), down.requires_grad_(), up.requires_grad_())
    name = "LoRA" if over is None else "LoRA over a layer"
    return KernelCase(name, function, inputs, rounds_products=rounds_products)


def dequantized(kind: str, weight: Tensor) -> KernelCase:
    """A quantized matrix with no more rows than columns, as it is multiplied forward and
    backward."""
    num_out, num_in = weight.shape
    layer = QuantizedLinear(num_in, num_out, kind, bias=False).to(weight.device)
    layer.set_weight(weight)

    def both_ways(ones: Tensor) -> tuple[Tensor, ...]:
        out = layer(ones)
        return out.detach(), *torch.autograd.grad(out, ones, ones[:, :num_out])

    # Products with rows of zeros and a one are exact.
    ones = torch.eye(num_in, device=weight.device).requires_grad_()
    return KernelCase(f"{kind} weights", both_ways, (ones,), is_bitwise=True)


def rounded_to_codes(
    x: Tensor, columns: Tensor, formats: Iterable[torch.dtype]
) -> Iterator[KernelCase]:
    """Codes of rows in 8 bits, and their scales."""
    for codes in formats:

        def function(x: Tensor, codes: torch.dtype = codes) -> Any:
            return (
                kernels.round_rows(x, columns, codes)
                if kernels_in_force(x)
                else rounded(x * columns, codes)
            )

        yield KernelCase(
            f"rounding to {str(codes).removeprefix('torch.')}", function, (x,), is_bitwise=True
        )


def multiplied_codes(kind: str, x: Tensor, weight: Tensor, bias: Tensor) -> KernelCase:
    """Products with a weight in 8 bits, forward and backward."""
    num_out, num_in = weight.shape
    layer = QuantizedLinear(num_in, num_out, kind, bias=True).to(weight.device)
    layer.set_weight(weight.clone())
    layer.bias, layer.in_8_bits = nn.Parameter(bias, requires_grad=False), True
    return KernelCase(f"products of {kind} codes", layer, (x.requires_grad_(),), is_bitwise=True)


def _transposed(codes: Tensor) -> KernelCase:
    """A matrix of codes in 8 bits for a product with its transpose."""

    def function(codes: Tensor) -> tuple[Tensor, ...]:
        return (
            kernels.transpose_codes(codes) if kernels_in_force(codes) else codes.T.contiguous(),
        )

    return KernelCase("transposed codes", function, (codes,), is_bitwise=True)


def _scaled(sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor) -> KernelCase:
    """Sums of products of codes, with scales and a bias."""

    def function(sums: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(rows * columns)
        if kernels_in_force(sums):
            kernels.apply_scales(sums, rows, columns, bias, out=out)
        else:
            out.copy_((sums * rows).mul_(columns).add_(bias))
        return (out,)

    return KernelCase("scales of products in 8 bits", function, (sums,), is_bitwise=True)


def written(values: Tensor, *, start: int = 0, of: int | None = None) -> KernelCase:
    """fp32 values rounded to bf16 at random as those from `start` on of `of`, split into bf16 and a
    remainder, and joined again."""

    def function(values: Tensor) -> tuple[Tensor, ...]:
        fused, bf16 = kernels_in_force(values), torch.bfloat16
        random, nearest, rest = (
            torch.empty_like(values, dtype=dtype) for dtype in (bf16, bf16, torch.int16)
        )
        write_stochastic(
            random, values.clone(), 0x9123456789ABCDEF, start=start, of=of, fused=fused
        )
        write_split(nearest, values.clone(), rest, fused=fused)
        return _bits(random), _bits(nearest), rest, _bits(joined(nearest, rest, fused=fused))

    return KernelCase("rounding of bf16 weights", function, (values,), is_bitwise=True)


def _bits(x: Tensor) -> Tensor:
    """The bits of numbers as integers, which also compare where numbers are not finite; of NaN,
    torch's depend on the processor."""
    return x.nan_to_num(1.5, math.inf, -math.inf).view(
        torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    )
