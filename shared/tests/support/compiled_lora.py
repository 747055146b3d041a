"""Bytes of two LoRA layers with a gelu between them, in compiled code and in its plan: a script, because annotations that are checked do not
compile."""

import json
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from ditkit_core.nn.context import BlockSettings, block_settings
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


def planned(kernels: str) -> tuple[int, int]:
    """The same in a plan."""
    with fake_tensors("cpu") as meter, block_settings(BlockSettings(kernels=kernels)):
        inputs = given()
        device = inputs[0].device
        before = meter.total(device)
        meter.restart_peak()
        out = layers(*inputs)
        kept = meter.total(device) - before
        out.backward(inputs[0])
        return kept, meter.peak[device] - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"counted": counted(), "compiled": planned("compiled"), "torch": planned("torch")}))
