"""Whether the Triton kernels compute on a GPU what torch computes there, which only that GPU with its driver and its Triton can say.

The functions that call the kernels run twice, forward and backward: with the kernels on bf16, as most of a run, and with torch on the same
values in fp32. Codes, what is made of them, and rounded weights are compared bitwise. Each kernel runs in one variant, the norm in those of
both families, so that little is compiled; Triton keeps that on disk.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.io.runtimes import runtime_of
from ditkit_core.models.precision import PrecisionConfig
from ditkit_core.nn.context import BlockSettings, block_settings, settings_in_force
from ditkit_core.nn.eight_bit_products import rounded
from ditkit_core.nn.functional import gated_unit, modulated_norm, normalised_heads
from ditkit_core.nn.kernels import ops as kernels
from ditkit_core.nn.lora import low_rank_sum
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.nn.stochastic_rounding import joined, write_split, write_stochastic

LIMIT = 1e-5
"""Largest difference beyond one step of the result's dtype, relative to the largest value. Another order of a sum of 5,120 products in fp32,
and a GPU's approximate roots and exponentials, cost 1e-6 of it; a wrong factor, place or mask costs much more."""
_OLDEST, _WITH_FP8 = (8, 0), (8, 9)
"""Compute capability of the oldest GPUs that Triton supports, and of the oldest on which it converts to fp8."""
_TOKENS, _WIDTH, _HEAD = 7, 5120, 128  # few tokens of Wan 14B's width, over which several warps sum


class _Case(NamedTuple):
    name: str
    function: Callable[[Tensor], Tensor | tuple[Tensor, ...]]
    """Of one result the gradients are compared too."""
    x: Tensor
    trained: tuple[Tensor, ...] = ()
    """Tensors besides x with a gradient."""
    is_bitwise: bool = False


def kernel_fault(device: torch.device) -> str:
    """What is wrong with the kernels on a GPU, as what follows the word triton; empty if they compute what torch computes.

    Raises:
        UserError: If a kernel failed in a way that leaves the GPU unusable for this process.
    """
    runtime = runtime_of(device)
    capability = _WITH_FP8 if runtime is None else runtime.get_device_capability(device)
    if capability < _OLDEST:
        oldest, own = (".".join(map(str, each)) for each in (_OLDEST, capability))
        return f"needs compute capability {oldest}, and {device} has {own}"
    for case in _cases(device, has_fp8=capability >= _WITH_FP8):
        try:
            # A compiler, a linker, a driver or a disk may fail, each in its own way, and a run can do without the kernels.
            with given_to_library(f"fails in {case.name} on {device}", "torch runs without it"):
                error = _error(case)
        except UserError as failure:
            try:
                torch.zeros(1, device=device).item()
            except RuntimeError as broken:
                what = f"triton {failure}, but not on this GPU in this process, which cannot use it any more"
                raise UserError(f"{what}; set train.kernels = torch") from broken
            return str(failure)
        if not error <= (0 if case.is_bitwise else LIMIT):  # not `>`: also where it is NaN
            return f"computes {case.name} wrongly on {device} (off by {error:.1g} of the largest value)"
    return ""


def _error(case: _Case) -> float:
    made = []
    for name in ("triton", "torch"):
        dtype = torch.bfloat16 if name == "triton" and not case.is_bitwise else torch.float32
        with block_settings(BlockSettings(kernels=name)):
            made.append(_results(case, dtype))
    return float(torch.stack([_apart(ours, exact, case.is_bitwise) for ours, exact in zip(*made, strict=True)]).max())


def _apart(ours: Tensor, exact: Tensor, is_bitwise: bool) -> Tensor:
    wide = exact.double()
    step = 0 if is_bitwise else torch.finfo(ours.dtype).eps * wide.abs()
    return ((ours.double() - wide).abs() - step).relu().max() / wide.abs().max()


def _results(case: _Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The results of a case for x in a dtype; of one result also the gradients."""
    x = case.x.to(dtype).requires_grad_()
    results = case.function(x)
    if isinstance(results, tuple):
        return results
    # Values of x in another order: with x itself some gradients would almost vanish.
    upstream = case.x.flatten().flip(0)[: results.numel()].view_as(results).to(results.dtype)
    return results.detach(), *torch.autograd.grad(results, [x, *case.trained], upstream)


def _cases(device: torch.device, *, has_fp8: bool) -> Iterator[_Case]:
    random = torch.Generator().manual_seed(0)  # the process's own generators stay as they are

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).bfloat16().float().to(device)

    yield from _of_blocks(values)
    yield from _of_codes(values, (torch.int8, torch.float8_e4m3fn)[: 1 + has_fp8])


def _of_blocks(values: Callable[..., Tensor]) -> Iterator[_Case]:
    """What lies between matmuls, and the parts of a LoRA."""
    x, table = values(2, _TOKENS, _WIDTH), values(1, _TOKENS, 1, _HEAD // 2, 2)
    for width in (_WIDTH, _HEAD):
        norm = nn.RMSNorm(width, eps=1e-6, device=x.device)
        norm.weight.data.copy_(values(width))

        def rotated(x: Tensor, norm: nn.RMSNorm = norm) -> Tensor:
            return normalised_heads(x, norm, _WIDTH // _HEAD, PrecisionConfig().precision(x.dtype, {}), table)

        yield _Case(f"RMS norm over {width} and rotation", rotated, x, (norm.weight,))

    scale, shift = values(2, 1, _WIDTH).requires_grad_(), values(2, 1, _WIDTH).requires_grad_()

    def modulated(x: Tensor) -> Tensor:
        return modulated_norm(x, scale, shift, 1e-6, torch.float32, x.dtype)

    yield _Case("layer norm", modulated, x, (scale, shift))
    yield _Case("gated unit", gated_unit, x)
    down, up = values(32, _WIDTH).requires_grad_(), values(_WIDTH // 8, 32).requires_grad_()
    frozen = x.new_zeros(_WIDTH // 8, _WIDTH)

    def adapted(x: Tensor) -> Tensor:
        return low_rank_sum(x, down, up, 0.3, lambda x: F.linear(x, frozen.to(x.dtype)))

    yield _Case("LoRA", adapted, x, (down, up))


def _of_codes(values: Callable[..., Tensor], formats: Iterable[torch.dtype]) -> Iterator[_Case]:
    """Codes, what is made of them, and rounded weights."""

    def is_fused() -> bool:
        return settings_in_force().kernels == "triton"

    x = values(2 * _TOKENS, _WIDTH)
    for kind in ("int8", "nf4"):
        layer = QuantizedLinear(1024, 48, kind, bias=False).to(x.device)
        layer.set_weight(values(48, 1024))
        # Products with rows of zeros and a one are exact.
        yield _Case(f"{kind} weights", layer, torch.eye(1024, device=x.device), is_bitwise=True)

    columns, rows, bias = values(1, _WIDTH), values(2 * _TOKENS, 1), values(_WIDTH)
    for codes in formats:

        def in_codes(x: Tensor, codes: torch.dtype = codes) -> Any:
            x = x.detach()
            return kernels.round_rows(x, columns, codes) if is_fused() else rounded(x * columns, codes)

        yield _Case(f"rounding to {str(codes).removeprefix('torch.')}", in_codes, x, is_bitwise=True)

    def scaled(x: Tensor) -> tuple[Tensor, ...]:
        sums, out = (x.detach() * 2**16).int(), torch.empty_like(x)
        if is_fused():
            kernels.apply_scales(sums, rows, columns, bias, out=out)
        else:
            out.copy_((sums * rows).mul_(columns).add_(bias))
        return (out,)

    yield _Case("scales of products in 8 bits", scaled, x, is_bitwise=True)

    def written(x: Tensor) -> tuple[Tensor, ...]:
        values, fused = x.detach() * 1.001, is_fused()
        weights, rest = (
            [torch.empty_like(values, dtype=torch.bfloat16) for _ in range(2)],
            torch.empty_like(values, dtype=torch.int16),
        )
        write_stochastic(weights[0], values.clone(), 0x9123456789ABCDEF, start=3, of=values.numel() + 7, fused=fused)
        write_split(weights[1], values.clone(), rest, fused=fused)
        return *weights, rest, joined(weights[1], rest, fused=fused)

    yield _Case("rounding of bf16 weights", written, x, is_bitwise=True)
