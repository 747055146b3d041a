"""The Triton kernels under Triton's interpreter, against fp64: a script, because the interpreter has to be chosen before Triton is imported."""

import json
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ditkit_core.nn.kernels.ops import AffineNorm, GatedUnit, NormRotation
from ditkit_core.nn.rope import rotate

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


def gated_units() -> Iterator[tuple[str, list[float]]]:
    for half, dtype in [(5, torch.float32), (1100, torch.float32), (24, torch.bfloat16)]:

        def exact(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return F.silu(a) * b

        yield (
            f"{half} features, {dtype}",
            errors(GatedUnit.apply, exact, [part(2, 3, 2 * half, dtype=dtype)], torch.randn(2, 3, half)),
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(
        json.dumps({name: found for kind in (norms_and_rotations, affine_norms, gated_units) for name, found in kind()})
    )
