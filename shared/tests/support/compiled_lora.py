"""Two LoRA layers with a gelu between them in compiled code, on a CPU and as on a GPU: their bytes, those of a plan, and how exact they are. A
script, because annotations that are checked do not compile."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from ditkit_core.nn import bf16_parts, compiled_lora
from ditkit_core.nn.context import BlockSettings, as_on, block_settings
from ditkit_core.nn.lora import low_rank_sum
from ditkit_core.planner.memory_tracker import fake_tensors

TOKENS, WIDTH, INNER, RANK = 512, 256, 512, 4


def given() -> tuple[Tensor, ...]:
    frozen = [(TOKENS, WIDTH), (INNER, WIDTH), (WIDTH, INNER)]
    factors = [(RANK, WIDTH), (INNER, RANK), (RANK, INNER), (WIDTH, RANK)]
    return (
        *(torch.ones(*size, dtype=torch.bfloat16) for size in frozen),
        *(torch.ones(*size, requires_grad=True) for size in factors),
    )


def layers(x: Tensor, first: Tensor, second: Tensor, *factors: Tensor) -> Tensor:
    hidden = low_rank_sum(F.gelu(x), *factors[:2], 0.5, lambda x: F.linear(x, first))
    return low_rank_sum(F.gelu(hidden), *factors[2:], 0.5, lambda x: F.linear(x, second))


def allocated(run: Callable[[], object]) -> list[int]:
    """Bytes in use after each of the CPU's allocations; what `run` returns is alive at the end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = profile.profiler.kineto_results.events()
    del result
    return list(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def counted() -> tuple[int, int]:
    """Bytes that the forward of compiled code keeps, its result included, and the peak of forward and backward."""
    inputs, compiled = given(), torch.compile(layers, backend="aot_eager")
    compiled(*inputs).backward(inputs[0])
    return allocated(lambda: compiled(*inputs))[-1], max(allocated(lambda: compiled(*inputs).backward(inputs[0])))


def planned(kernels: str, kind: str = "cpu") -> tuple[int, int]:
    """The same in a plan."""
    with fake_tensors(kind) as meter, block_settings(BlockSettings(kernels=kernels)):
        inputs = given()
        device = inputs[0].device
        before = meter.total(device)
        meter.restart_peak()
        out = layers(*inputs)
        kept = meter.total(device) - before
        out.backward(inputs[0])
        return kept, meter.peak[device] - before


def on_tensor_cores(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).float()


def as_on_a_gpu() -> ExitStack:
    """Compiled code as a GPU has it, with its products made on the CPU."""
    stack = ExitStack()
    stack.enter_context(as_on("cuda"))
    for module in (bf16_parts, compiled_lora):
        stack.enter_context(patch.object(module, "wide_product", on_tensor_cores))
    stack.enter_context(patch.object(compiled_lora, "_SPLIT", bf16_parts.IN_TORCH))
    return stack


def values() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(x.shape).mul(0.1).to(x.dtype).requires_grad_(x.requires_grad) for x in given()]


def distances(tensors: Sequence[Tensor]) -> list[float]:
    """Distance of the result of compiled code, and of the gradients of the factors, from fp64: the first of bf16, the others of fp32."""

    def results(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        out = run(*inputs)
        factors = [x for x in inputs if x.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, factors, torch.ones_like(out))]

    exact = results(one, [x.detach().double().requires_grad_(x.requires_grad) for x in tensors])
    torch._dynamo.reset()
    found = results(torch.compile(one), tensors)
    return [((mine.double() - wanted).norm() / wanted.norm()).item() for mine, wanted in zip(found, exact, strict=True)]


def one(x: Tensor, first: Tensor, second: Tensor, *factors: Tensor) -> Tensor:
    return low_rank_sum(x, *factors[:2], 0.5, lambda x: F.linear(x, first))


def main(kind: str) -> None:
    """Print what compiled code and plans have on a CPU or on a GPU."""
    tensors = values()[:5]
    plain = distances(tensors)
    with as_on_a_gpu() if kind == "cuda" else ExitStack():
        torch._dynamo.reset()
        found = {"counted": counted(), "distances": distances(tensors), "plain": plain}
    print(json.dumps(found | {name: planned(name, kind) for name in ("compiled", "torch")}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
