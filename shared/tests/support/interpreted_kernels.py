"""The Triton kernels against fp64, on the device that is given, on the CPU under Triton's interpreter: a script, because the interpreter has
to be chosen before Triton is imported."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from tensor_cores import TensorCores
from torch import Tensor

from ditkit_core.nn import stochastic_rounding
from ditkit_core.nn.bf16_parts import PARTS
from ditkit_core.nn.context import BlockSettings, as_on, block_settings
from ditkit_core.nn.kernels.ops import AffineNorm, GatedUnit, NormRotation, factor_parts, product_parts
from ditkit_core.nn.lora import low_rank_sum
from ditkit_core.nn.quantized_linear import LAYOUTS, QuantizedLinear
from ditkit_core.nn.rope import rotate
from ditkit_core.nn.stochastic_rounding import joined, write_split, write_stochastic

STRIDED = 3
"""Features in memory behind each row of a tensor that is a part of a wider one."""


def part(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values as a part of a wider tensor, as the results of one matmul for several layers are."""
    wide = torch.randn(*shape[:-1], shape[-1] + STRIDED).to(dtype)
    return wide[..., : shape[-1]].detach().requires_grad_()


def errors(
    ours: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor
) -> list[float]:
    """Largest errors of the result and of each input's gradient against fp64, relative to the largest value."""
    result = ours(*inputs)
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    found = [result, *torch.autograd.grad(result, trained, upstream.to(result.dtype))]
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
    expected = exact(*wide)
    trained = [tensor for tensor in wide if tensor.requires_grad]
    expected_too = [expected, *torch.autograd.grad(expected, trained, upstream.to(result.dtype).double())]
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected_too, strict=True)]


def norms_and_rotations() -> Iterator[tuple[str, list[float]]]:
    for width, rotated, tables, dtype in [
        (60, True, 1, torch.float32), (60, False, 1, torch.float32), (20, True, 2, torch.float32),
        (20, False, 1, torch.float32), (60, True, 2, torch.bfloat16),
    ]:  # fmt: skip
        x, weight = part(2, 5, 60, dtype=dtype), torch.randn(width, requires_grad=True)
        table = torch.randn(tables, 5, 1, 10, 2) if rotated else None

        def exact(x: Tensor, weight: Tensor, width: int = width, table: Tensor | None = table) -> Tensor:
            groups = x.unflatten(-1, (-1, width))
            y = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-6) * weight
            y = y.flatten(-2).unflatten(-1, (3, 20))
            return y if table is None else rotate(y, *table.double().unbind(-1))

        def ours(x: Tensor, weight: Tensor, table: Tensor | None = table, dtype: torch.dtype = dtype) -> Tensor:
            return NormRotation.apply(x, weight, table, 1e-6, 3, dtype)

        upstream = torch.randn(2, 3, 5, 20).transpose(1, 2)  # as attention's backward leaves it
        yield (
            f"norm over {width}, rotated {rotated}, {tables} tables, {dtype}",
            errors(ours, exact, [x, weight], upstream),
        )


def affine_norms() -> Iterator[tuple[str, list[float]]]:
    for rows, trained, offset, dtype in [
        (1, True, 1.0, torch.float32), (1, False, 0.0, torch.float32), (5, False, 1.0, torch.float32),
        (1, True, 1.0, torch.bfloat16),
    ]:  # fmt: skip
        x = part(2, 5, 33, dtype=dtype)
        scale, shift = (torch.randn(2, rows, 33, requires_grad=trained) for _ in range(2))

        def exact(x: Tensor, scale: Tensor, shift: Tensor, offset: float = offset) -> Tensor:
            return F.layer_norm(x, (33,), eps=1e-6) * (offset + scale) + shift

        def ours(x: Tensor, scale: Tensor, shift: Tensor, offset: float = offset, dtype: torch.dtype = dtype) -> Tensor:
            return AffineNorm.apply(x, scale, shift, 1e-6, offset, dtype)

        yield f"{rows} rows, trained {trained}, {dtype}", errors(ours, exact, [x, scale, shift], torch.randn(2, 5, 33))


def other_layouts() -> Iterator[tuple[str, list[float]]]:
    """Of norms whose small inputs have memory between their features, or one layout each."""
    x, wide = part(2, 5, 12), torch.randn(2, 1, 24)
    for name, scale, shift in (
        ("features apart", wide[..., ::2], wide[..., 1::2]),
        ("one layout each", wide[..., :12], torch.randn(2, 1, 12)),
    ):
        inputs = [x, *(each.detach().requires_grad_() for each in (scale, shift))]
        yield (
            f"modulation with {name}",
            errors(
                lambda x, scale, shift: AffineNorm.apply(x, scale, shift, 1e-6, 1.0, torch.float32),
                lambda x, scale, shift: F.layer_norm(x, (12,), eps=1e-6) * (1 + scale) + shift,
                inputs,
                torch.randn(2, 5, 12),
            ),
        )
    weight, table = torch.randn(24)[::2].detach().requires_grad_(), torch.randn(1, 5, 1, 2, 3).transpose(-1, -2)

    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        y = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight).unflatten(-1, (2, 6))
        return rotate(y, *table.double().unbind(-1))

    yield (
        "weight with features apart, table with its cosines before its sines",
        errors(
            lambda x, weight: NormRotation.apply(x, weight, table, 1e-6, 2, torch.float32),
            rotated, [x, weight], torch.randn(2, 5, 2, 6),
        ),
    )  # fmt: skip


def gated_units() -> Iterator[tuple[str, list[float]]]:
    for half, dtype in [(5, torch.float32), (1100, torch.float32), (24, torch.bfloat16)]:

        def exact(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return F.silu(a) * b

        yield (
            f"{half} features, {dtype}",
            errors(GatedUnit.apply, exact, [part(2, 3, 2 * half, dtype=dtype)], torch.randn(2, 3, half)),
        )


def lora_parts() -> Iterator[tuple[str, list[float]]]:
    """Of products of parts; 1 is added for parts that do not sum to the number, or are not in their order."""
    for rank, num_in, num_out, rows in [(1, 5, 3, 2), (8, 300, 130, 9), (5, 33, 260, 211), (32, 64, 40, 70)]:
        down, up = part(rank, num_in).detach(), part(num_out, rank).detach()
        three = part(rows, 3 * rank).detach()
        of_down, of_up = factor_parts(down, up)
        low, left = product_parts(three, rank, 0.3)
        again, left_again = product_parts(low, rank, 1.0)
        sums = three.double().view(rows, 3, rank).sum(1) * 0.3
        wrong = not torch.equal(low, again) or not torch.equal(left, left_again)
        for made, wide, order in ((left, low, PARTS[0]), (of_down.T, down.T, PARTS[1]), (of_up, up, PARTS[1])):
            columns = made.unflatten(1, (6, rank)).unbind(1)
            parts = [columns[order.index(index)] for index in range(3)]
            wrong = wrong or not all(torch.equal(columns[i], parts[order[i]]) for i in range(6))
            wrong = wrong or not torch.equal(sum(each.double() for each in parts), wide.double())
        exact = [sums @ down.double(), sums @ up.double().T]
        found = [left.double() @ of_down.double(), left.double() @ of_up.double().T]
        yield (
            f"parts of rank {rank}, {num_in} to {num_out}, {rows} rows",
            [wrong + float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)],
        )


def lora_layers() -> Iterator[tuple[str, list[float]]]:
    """Of the result and the input's gradient, and of the factors' gradients."""
    for rank, num_in, num_out, rows in [(4, 48, 40, 7), (8, 130, 257, 33)]:
        x, weight = part(2, rows, num_in, dtype=torch.bfloat16), torch.randn(num_out, num_in).bfloat16()
        down, up = (torch.randn(*size, requires_grad=True) for size in ((rank, num_in), (num_out, rank)))

        def exact(x: Tensor, down: Tensor, up: Tensor, weight: Tensor = weight) -> Tensor:
            return F.linear(x, weight.double()) + F.linear(F.linear(x, down), up) * 0.75

        def ours(x: Tensor, down: Tensor, up: Tensor, weight: Tensor = weight) -> Tensor:
            return low_rank_sum(x, down, up, 0.75, lambda x: F.linear(x, weight))

        settings = block_settings(BlockSettings(kernels="triton"))
        with as_on("cuda"), nullcontext() if x.is_cuda else TensorCores(), settings:
            found = errors(ours, exact, [x, down, up], torch.randn(2, rows, num_out))
        yield f"layer of rank {rank} and its input, {torch.bfloat16}", found[:2]
        yield f"factors of rank {rank}", found[2:]


def dequantized_layers() -> Iterator[tuple[str, list[float]]]:
    """Of weights in 8 bits against fp64; 1 is added if a layer's product or its gradient is not bitwise that of torch, in any format."""
    for num_out, num_in in [(3, 128), (36, 512), (65, 1088)]:
        weight, found = torch.randn(num_out, num_in), []
        for kind in LAYOUTS:
            layer = QuantizedLinear(num_in, num_out, kind, bias=False)
            layer.set_weight(weight.clone())
            made = []
            for name in ("torch", "triton"):
                x = torch.eye(num_in).requires_grad_()
                with block_settings(BlockSettings(kernels=name)):
                    product = layer(x)
                made.append([product, *torch.autograd.grad(product, x, torch.eye(num_in)[:, :num_out])])
            wide = torch.empty(num_out, num_in, dtype=torch.float64)
            LAYOUTS[kind].dequantize(layer.values(), wide)
            error = float((made[1][0].detach().T.double() - wide).abs().max() / wide.abs().max())
            found.append(error + (not all(map(torch.equal, *made))))
        yield f"dequantized {num_out}x{num_in}", found


def products_of_codes() -> Iterator[tuple[str, list[float]]]:
    """Of a product in 8 bits and its gradient against fp64, less what rounding to codes may cost; 1 is added where either is not bitwise
    that of torch."""
    for kind in ("int8", "fp8"):
        for num_out, num_in, rows in [(48, 32, 5), (16, 2064, 37), (4112, 64, 18)]:
            layer = QuantizedLinear(num_in, num_out, kind, bias=True)
            layer.set_weight(torch.randn(num_out, num_in) * torch.logspace(-2, 0, num_out)[:, None])
            layer.bias, layer.in_8_bits = torch.nn.Parameter(torch.randn(num_out), requires_grad=False), True
            given, upstream, made = torch.randn(rows, num_in), torch.randn(rows, num_out), []
            given[1] = 0
            for name in ("torch", "triton"):
                x = given.clone().requires_grad_()
                with block_settings(BlockSettings(kernels=name)):
                    product = layer(x)
                    made.append([product.detach(), *torch.autograd.grad(product, x, upstream)])
            weight = layer.dequantize(torch.float64)
            exact = [given.double() @ weight.T + layer.bias, upstream.double() @ weight]
            rounding = 0.02 if kind == "int8" else 0.06
            found = [float((a - b).norm() / b.norm()) / rounding * 1e-6 for a, b in zip(made[1], exact, strict=True)]
            yield f"{kind} codes {num_out}x{num_in}", [each + (not all(map(torch.equal, *made))) for each in found]


def bf16_writes() -> Iterator[tuple[str, list[float]]]:
    """Weights in bf16: the share of fp32 values that rounding loses, less what it may; 1 is added where a bit differs from torch."""
    values = torch.randn(5000) * torch.logspace(-30, 30, 5000)
    values[:4] = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38])
    values[4:6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])  # halfway between two numbers of bf16

    def equal(*found: Tensor) -> bool:
        """Bitwise, but for the NaN: torch has patterns of it that depend on the processor."""
        return torch.equal(*(each.view(-1)[1:] for each in found)) and all(each.isnan().view(-1)[0] for each in found)

    def lost(weight: Tensor) -> float:
        return float(((weight.double().view(-1) - values.double()) / values.double())[4:].abs().max())

    chunk = stochastic_rounding._AT_ONCE
    for start, of in (
        (0, None),
        (chunk - 777, chunk + 5000),
        (3, 10001),
    ):  # within a chunk, over its end, in one of an odd size
        made = []
        for fused in (False, True):
            weight = torch.empty(50, 100, dtype=torch.bfloat16)
            key = 0x9123456789ABCDEF
            write_stochastic(weight, values.clone().view(50, 100), key, start=start, of=of, fused=fused)
            made.append(weight)
        yield f"stochastic from {start}", [lost(weight) * 2**7 * 1e-6 + (not equal(*made))]
    for shape in ((5000,), (50, 100)):
        split = []
        for fused in (False, True):
            weight, rest = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.int16)
            write_split(weight, values.clone().view(shape), rest, fused=fused)
            split.append((weight, rest, joined(weight, rest, fused=fused)))
        same = equal(split[0][0], split[1][0]) and torch.equal(split[0][1], split[1][1]) and equal(split[1][2], values)
        yield f"split {shape}", [lost(weight) * 2**8 * 1e-6 + (not same)]


KINDS = (
    norms_and_rotations, affine_norms, other_layouts, gated_units, lora_parts, lora_layers, dequantized_layers, products_of_codes,
    bf16_writes,
)  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_device(sys.argv[1])
    print(json.dumps({name: found for kind in KINDS for name, found in kind()}))
