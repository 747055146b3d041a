"""The cases of the run's check in more shapes, dtypes and layouts, on the device that is given, on
the CPU under Triton's interpreter: a script, because the interpreter has to be chosen before Triton
is imported."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ditkit_core.nn import bf16_parts, stochastic_rounding
from ditkit_core.nn.bf16_parts import IN_TORCH, PARTS
from ditkit_core.nn.context import as_on
from ditkit_core.nn.functional import affine_norm
from ditkit_core.nn.kernel_check import (
    KernelCase,
    adapted,
    dequantized,
    error_of,
    gated,
    gated_into,
    modulated,
    multiplied_codes,
    normed_heads,
    rounded_to_codes,
    rounds_products,
    summed_product,
    with_tensors,
    written,
)
from ditkit_core.nn.kernels import modulated_norm, norm_rotation
from ditkit_core.nn.kernels.hopper import is_hopper
from ditkit_core.nn.kernels.ops import factor_parts, product_parts, term_sums
from ditkit_core.testing.interpreter import as_on_hopper, repair_interpreter
from ditkit_core.testing.kernel_calls import KernelCalls
from ditkit_core.testing.tensor_cores import TensorCores

FP32, BF16 = torch.float32, torch.bfloat16
STRIDED = 3
"""Features in memory behind each row of a tensor that is a part of a wider one."""


def part(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """Random values as a part of a wider tensor, as the results of one matmul for several layers
    are."""
    return torch.randn(*shape[:-1], shape[-1] + STRIDED).to(dtype)[..., : shape[-1]]


def norms_and_rotations() -> Iterator[KernelCase]:
    for width, tables, dtype in [
        (60, 1, FP32),
        (60, 0, FP32),
        (20, 2, FP32),
        (20, 0, FP32),
        (60, 2, BF16),
    ]:
        table = torch.randn(tables, 5, 1, 10, 2) if tables else None
        yield normed_heads(
            part(2, 5, 60, dtype=dtype), torch.randn(width), table, 3, heads_first=True
        )
    # A weight with memory between its features, and a table with its cosines before its sines.
    yield normed_heads(
        part(2, 5, 12), torch.randn(24)[::2], torch.randn(1, 5, 1, 2, 3).transpose(-1, -2), 2
    )


def layer_norms() -> Iterator[KernelCase]:
    for rows, trained, dtype in [
        (1, True, FP32),
        (1, False, FP32),
        (5, False, FP32),
        (1, True, BF16),
    ]:
        yield modulated(part(2, 5, 33, dtype=dtype), *torch.randn(2, 2, rows, 33), trained=trained)
    wide = torch.randn(2, 1, 24)
    # Modulation with memory between its features, and in one layout each.
    yield modulated(part(2, 5, 12), wide[..., ::2], wide[..., 1::2])
    yield modulated(part(2, 5, 12), wide[..., :12], torch.randn(2, 1, 12))

    def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        norm = with_tensors(nn.LayerNorm(len(weight), 1e-6), weight=weight, bias=bias)
        return affine_norm(norm, x, weight.dtype, x.dtype)

    for trained in (False, True):
        rows = (row.requires_grad_(trained) for row in torch.randn(2, 33))
        yield KernelCase(
            "layer norm with weights", affine, (part(2, 5, 33).requires_grad_(), *rows)
        )


def gated_units() -> Iterator[KernelCase]:
    for half, dtype in [(5, FP32), (1100, FP32), (24, BF16)]:
        yield gated(part(2, 3, 2 * half, dtype=dtype))


def gated_sums() -> Iterator[KernelCase]:
    for batch, dim, dtype in [(2, 33, FP32), (1, 1100, FP32), (2, 24, BF16)]:
        yield gated_into(
            part(batch, 5, dim),
            part(batch, 5, dim, dtype=dtype),
            torch.randn(batch, 1, dim).to(dtype),
        )
    # All in bf16, and features of a stream and of a gate for all samples with memory between them.
    streams = part(2, 5, 24, dtype=BF16), part(2, 5, 24, dtype=BF16)
    # Not trained: torch would round each product for its gradient.
    yield gated_into(*streams, torch.randn(2, 1, 24).bfloat16(), trained=False)
    yield gated_into(
        torch.randn(2, 5, 24)[..., ::2], part(2, 5, 12), torch.randn(1, 1, 24)[..., ::2]
    )


def loras() -> Iterator[KernelCase]:
    for rank, num_in, num_out, rows in [(4, 48, 40, 7), (8, 130, 257, 33)]:
        x = part(2, rows, num_in, dtype=BF16)
        factors = torch.randn(rank, num_in), torch.randn(num_out, rank)
        yield adapted(x, *factors, 0.75)
        yield adapted(
            x,
            *factors,
            0.75,
            over=torch.eye(num_out, num_in),
            rounds_products=rounds_products(x.device),
        )


def quantized() -> Iterator[KernelCase]:
    for num_out, num_in in [(3, 128), (36, 512), (33, 2112)]:
        for kind in ("int8", "nf4"):
            yield dequantized(kind, torch.randn(num_out, num_in))
    x = part(37, 2064)
    x[1] = 0
    yield from rounded_to_codes(x, torch.randn(1, 2064), (torch.int8, torch.float8_e4m3fn))
    for kind in ("int8", "fp8"):
        for num_out, num_in, rows in [(48, 32, 5), (16, 2064, 37), (4112, 64, 18)]:
            yield products(kind, num_out, num_in, rows)


def on_hopper() -> Iterator[KernelCase]:
    """What its kernels compute in another way: they read rows ahead, and products apply scales; of
    several tiles, and of fewer numbers than one has."""
    if sys.argv[1] == "cpu":
        as_on_hopper()
    elif not is_hopper(torch.empty(0)):
        return
    yield from layer_norms()
    for kind in ("int8", "fp8"):
        for num_out, num_in, rows in [(128, 256, 5), (336, 640, 150), (4224, 48, 130)]:
            yield products(kind, num_out, num_in, rows)


def loras_on_hopper() -> Iterator[KernelCase]:
    """Sums with products of every size in a kernel, if rows have multiples of 16 bytes; of several
    tiles, and of fewer numbers than one has."""
    if not is_hopper(torch.empty(0)) and sys.argv[1] != "cpu":
        return
    bf16_parts.KERNEL_ADDS_FROM = 0
    yield from loras()
    for rows, length, width in [(70, 24, 40), (130, 192, 264)]:
        total, left = torch.randn(rows, width).bfloat16(), torch.randn(rows, length).bfloat16()
        yield summed_product(total, left, torch.randn(length, width).bfloat16())
        yield summed_product(total, left, torch.randn(width, length).bfloat16().T)


def products(kind: str, num_out: int, num_in: int, rows: int) -> KernelCase:
    """Rows of zeros, and such that are halfway between codes of int8, among random ones."""
    x = part(rows, num_in)
    x[1:3] = 0
    x[2, :4] = torch.tensor([127, 0.5, 1.5, 2.5])
    return multiplied_codes(
        kind,
        x,
        torch.randn(num_out, num_in) * torch.logspace(-2, 0, num_out)[:, None],
        torch.randn(num_out),
    )


def bf16_writes() -> Iterator[KernelCase]:
    values = torch.randn(5000) * torch.logspace(-30, 30, 5000)
    # Not finite, the largest, and halfway between two numbers of bf16.
    values[1:6] = torch.tensor([math.inf, -math.inf, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])
    values.view(torch.int32)[0] = 0x7FFFFFFF  # CUDA's NaN
    chunk = stochastic_rounding._AT_ONCE
    # Within a chunk, over its end, in one of an odd size.
    for start, of in ((0, None), (chunk - 777, chunk + 5000), (3, 10001)):
        yield written(values.view(50, 100), start=start, of=of)
    yield written(values)


def parts_of_loras() -> Iterator[tuple[str, bool]]:
    """Whether parts are in their order and sum to the numbers, which many parts do: those of the
    interpreter are not torch's."""
    for rank, num_in, num_out, rows in [
        (1, 5, 3, 2),
        (8, 300, 130, 9),
        (5, 33, 260, 211),
        (32, 64, 40, 70),
    ]:
        down, up, three = part(rank, num_in), part(num_out, rank), part(rows, 3 * rank)
        left, low = product_parts(three, None, rank, 0.3)
        left_again, again = product_parts(low, None, rank, 1.0)
        both = product_parts(three, low, rank, 0.3)
        sums = three.double().view(rows, 3, rank).sum(1) * 0.3
        right = torch.equal(low, again) and torch.equal(left, left_again)
        right &= bool((low.double() - sums).abs().max() < 2e-6 * sums.abs().max())
        right &= torch.equal(both[0], left) and torch.equal(both[1], left)
        terms = part(3 * rank, num_in), part(num_out, 3 * rank)
        right &= all(
            map(
                torch.equal,
                term_sums(*terms, rank),
                IN_TORCH.sums(*(x.contiguous() for x in terms), rank),
            )
        )
        of_down, of_up = factor_parts(down, up)
        for made, wide, order in (
            (left, low, PARTS[0]),
            (of_down.T, down.T, PARTS[1]),
            (of_up, up, PARTS[1]),
        ):
            columns = made.unflatten(1, (6, rank)).unbind(1)
            parts = [columns[order.index(index)] for index in range(3)]
            right &= all(torch.equal(columns[i], parts[order[i]]) for i in range(6))
            right &= torch.equal(sum(each.double() for each in parts), wide.double())
        yield f"parts of rank {rank}, {num_in} to {num_out}, {rows} rows", right


def errors() -> Iterator[tuple[str, bool, float, list[str]]]:
    """Of each case: a description, whether it is bitwise, the error, and the operations with
    kernels that ran."""
    for cases in (
        norms_and_rotations,
        layer_norms,
        gated_units,
        gated_sums,
        loras,
        quantized,
        bf16_writes,
        on_hopper,
        loras_on_hopper,
    ):
        for case in cases():
            with ExitStack() as stack:
                if cases in (loras, loras_on_hopper):
                    stack.enter_context(as_on("cuda"))
                    if not case.inputs[0].is_cuda:
                        stack.enter_context(TensorCores())
                calls = stack.enter_context(KernelCalls())
                error = error_of(case)
            tensors = ", ".join(f"{list(x.shape)} by {x.stride()} {x.dtype}" for x in case.inputs)
            yield f"{case.name}: {tensors}", case.is_bitwise, error, sorted(calls.names)


if __name__ == "__main__":
    repair_interpreter()
    # So that programs that sum over rows take several of these few, as in a run.
    norm_rotation.summing_programs = modulated_norm.summing_programs = lambda rows, samples=1: min(
        rows, 3
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_device(sys.argv[1])
    print(json.dumps({"errors": list(errors()), "parts": dict(parts_of_loras())}))
