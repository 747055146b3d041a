"""Model FLOPs utilisation: the arithmetic that a step needs, by the planner's own count, over what
its GPUs could do in its time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ditkit_core.io.console import doing
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory_tracker import flops_in
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import measure
from ditkit_core.planner.reduced_model import reduced_model


@dataclass(frozen=True)
class Utilisation:
    """From the training items of a step and its seconds to the share of the GPUs' peak rate, in [0,
    1].

    Counted are matmuls and attention in one forward and backward without recomputes. A frozen
    weight has no gradient, and none is counted. A sample's arithmetic is a quadratic function of
    its tokens (attention is quadratic, everything else linear); it goes through the counts at three
    sizes of the data, and is exact at these.
    """

    sizes: Mapping[int, Mapping[str, Tensor]]
    """One item on `meta` for each number of tokens that is counted, three at most."""
    count: Callable[[Mapping[str, Tensor]], float]
    """Floating-point operations of an item's forward and backward."""
    num_tokens: Callable[[Mapping[str, Tensor]], int]
    peak: float
    """Floating-point operations per second of all GPUs together."""

    def __call__(self, items: Iterable[Mapping[str, Tensor]], seconds: float) -> float:
        """The utilisation of one step."""
        return sum(self.flops(self.num_tokens(item)) for item in items) / (seconds * self.peak)

    def flops(self, tokens: int) -> float:
        """Floating-point operations of a sample with so many tokens, by Lagrange's polynomial
        through the counted sizes."""
        total = 0.0
        for size, flops in self._counted.items():
            for other in self._counted:
                flops *= (tokens - other) / (size - other) if other != size else 1
            total += flops
        return total

    @cached_property
    def _counted(self) -> dict[int, float]:
        return {tokens: self.count(item) for tokens, item in self.sizes.items()}


def utilisation_of(
    job: StepJob, items: Iterable[Mapping[str, Tensor]], gpus: Sequence[GPU]
) -> Utilisation:
    """The utilisation of steps of a job, whose batch and policies do not count, by items on `meta`
    of all sizes of the data, at least one, and all GPUs that share the step."""
    rates = [
        gpu.fp32_flops if job.precision.matmul == torch.float32 else gpu.bf16_flops for gpu in gpus
    ]
    num_tokens = job.spec.training.num_tokens
    by_tokens = {num_tokens(item): item for item in items}
    tokens = sorted(by_tokens)  # of the data the fewest, the median and the most
    sizes = {
        number: by_tokens[number] for number in (tokens[0], tokens[len(tokens) // 2], tokens[-1])
    }
    utilisation = Utilisation(sizes, lambda item: flops_of(job, item), num_tokens, sum(rates))
    doing("counting the arithmetic of a step")
    utilisation.flops(
        next(iter(utilisation.sizes))
    )  # now, and not in the first step, which would seem to hang
    return utilisation


def flops_of(job: StepJob, item: Mapping[str, Tensor]) -> float:
    """Floating-point operations of an item's forward and backward, without recomputes; of all its
    tokens, also where ranks share them."""
    optim = replace(job.optim, fused_backward=False)
    alone = job.with_execution(checkpointing="none", ranks=replace(job.execution.ranks, context=1))
    job = replace(alone, batch=[item], micro_batches=1, optim=optim)
    model = reduced_model(job)
    # Arithmetic needs neither updates nor a measurement of each stage on a device of its own, which
    # take most of the time of a profile.
    step = measure(job, model, [0] * len(model.stages()), updates=False)
    counted = [flops_in(moment.kernels.items()) for moment in step.forward]
    for stage, moment in step.backward.items():
        counted[stage] += flops_in(moment.kernels.items())
    return sum(
        counted[stage]
        for stage in (0, *(1 + index for index in model.stands_for), len(step.static) - 1)
    )
