"""Estimates the time of a step: of its kernels or of their launches (`kernel_time.py`), plus
waiting for copies, plus the order of micro-batches; and model FLOPs utilisation, the arithmetic
that a step needs over what its GPUs could do in its time.

It is meant for choosing between settings, and it prints its assumptions. Times are whole
nanoseconds, so that equal splits have equal times.

A device executes its work in the order of launches, as a stream does. A copy between two devices
waits on both for all work launched before. The end of every piece of work therefore follows from
the order of launches, which is all that the simulation needs. Where the host takes longer to launch
a stage than the device to run it, the stage takes that long; steps that are replayed (`memory.py:
DeviceSpan`) are not launched by it.

- *Accumulated*: forward and backward of a micro-batch, then of the next one. The next forward
  begins on the device where the last backward ends, so nothing overlaps.
- *Pipelined*: the forwards of all micro-batches, then one backward. Autograd has a queue for each
  device and runs the newest node first: the last micro-batch goes backwards first, on every device,
  and the one before it follows one device behind.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditkit_core.io.console import doing
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.kernel_time import (
    LAUNCHED,
    REACHED,
    gpu_seconds,
    host_seconds,
    rate_of_codes,
    reach_of,
)
from ditkit_core.planner.memory import DeviceSpan, Partition, Profile, StageCost
from ditkit_core.planner.memory_tracker import KernelCounts, flops_in
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import measure
from ditkit_core.planner.reduced_model import reduced_model
from ditkit_core.planner.workload import Workload

LINK_SHARE = 0.86
"""Share of a link's published rate that copies from and to page-locked memory reach: 87 and 86 % on
an H100."""
EXPOSED = 0.05
"""Share of streamed bytes' time that arithmetic does not hide even where it takes longer: an H100
hid 95 % of 252 ms of copies behind 846."""
BETWEEN = 2_000_000
"""Nanoseconds of a step in which no kernel runs: inputs are copied, and its loss is read. What an
H100 took for a replayed step of klein 4B, more than for its kernels."""
BUFFERS = 2
"""Streamed blocks on a device at a time, including the one that runs."""
UPDATE_TRAFFIC = {
    "": {"torch": 0, "triton": 0},
    "nearest": {"torch": 16, "triton": 16},
    "split": {"torch": 78, "triton": 24},
    "stochastic": {"torch": 180, "triton": 18},
}
"""By rounding and `train.kernels`, bytes read and written for each bf16 weight that is updated in
fp32, without the bytes of weight, gradient and state."""


class StageTime(NamedTuple):
    """Times of one device's stages for one micro-batch: whole nanoseconds in the search, seconds in
    a schedule."""

    forward: float
    """Waiting for streamed weights included."""
    backward: float
    """Recompute included."""
    send: float = 0
    """Sending the carry to the next device; 0 for the last."""
    send_back: float = 0
    """Sending the next device's gradients to this one."""
    update: float = 0
    """The optimizer's update, once per step."""
    launching: float = 0
    """Of forward and backward, what the host takes to launch them: it does so for one device at a
    time."""


@dataclass(frozen=True)
class PipelineSchedule:
    """The simulated run of a step on the devices."""

    seconds: float
    """From the first launch to the end of the last backward."""
    busy: tuple[float, ...]
    """Seconds that each device computes; copies and waits are no work."""

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the step that each device computes, in [0, 1]."""
        return tuple(busy / self.seconds for busy in self.busy)


@dataclass(frozen=True)
class Comparison:
    """A step in both orders of micro-batches."""

    accumulated: PipelineSchedule
    pipelined: PipelineSchedule

    @property
    def gain(self) -> float:
        """Speedup from pipelining; 1 for none."""
        return self.accumulated.seconds / self.pipelined.seconds

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        orders = {
            name: {"seconds": o.seconds, "utilisation": list(o.utilisation)}
            for name, o in vars(self).items()
        }
        return {"source": "estimated", "gain": self.gain, **orders}

    def __str__(self) -> str:
        """One line."""
        shares = (
            " and ".join(f"{share:.0%}" for share in s.utilisation)
            for s in (self.accumulated, self.pipelined)
        )
        without, with_ = shares
        return (
            f"devices compute {without} of a step, with train.pipelined {with_}, {self.gain:.2f} "
            "times as fast (from estimated times)"
        )


def compare_orders(stages: Sequence[StageTime], num_micro_batches: int) -> Comparison:
    """Compare a step with pipelined micro-batches, at least 1, and without; the devices' parts in
    order are in seconds."""
    return Comparison(
        *(simulate(stages, num_micro_batches, pipelined=pipelined) for pipelined in (False, True))
    )


def simulate(
    stages: Sequence[StageTime], num_micro_batches: int, *, pipelined: bool
) -> PipelineSchedule:
    """Launch all work of a step in order; each piece begins when its device is free. With
    `pipelined` all forwards come first, then all backwards."""
    # Per device, when it is free again and how long it computed.
    free, busy = [0.0] * len(stages), [0.0] * len(stages)
    # Autograd's queues run the devices in parallel, but each device gets its work in the same order
    # as from one backward after the other: micro-batches pass the devices in one order, and none
    # overtakes another.
    order = (
        (True,) * num_micro_batches + (False,) * num_micro_batches
        if pipelined
        else (True, False) * num_micro_batches
    )
    for is_forward in order:
        for device in range(len(stages)) if is_forward else reversed(range(len(stages))):
            seconds = stages[device].forward if is_forward else stages[device].backward
            free[device] += seconds
            busy[device] += seconds
            following = device + 1 if is_forward else device - 1
            if 0 <= following < len(stages):
                sent = stages[device].send if is_forward else stages[following].send_back
                free[device] = free[following] = max(free[device], free[following]) + sent
    return PipelineSchedule(max(free), tuple(busy))


def step_seconds(
    profile: Profile, division: Partition, gpus: Sequence[GPU], work: Workload
) -> float:
    """Estimate the seconds of a training step on as many GPUs as the division has devices."""
    return step_time(_spans(profile, division, gpus, work), work) / 1e9


def both_orders(
    profile: Profile, division: Partition, gpus: Sequence[GPU], work: Workload
) -> Comparison | None:
    """Utilisation with and without pipelined micro-batches, without updates; None if nothing can
    overlap."""
    if len(gpus) == 1 or work.micro_batches == 1:
        return None
    return compare_orders(_in_seconds(_spans(profile, division, gpus, work)), work.micro_batches)


def step_time(spans: Sequence[StageTime], work: Workload) -> int:
    """Nanoseconds of a step with these times per device."""
    schedule = simulate(_in_seconds(spans), work.micro_batches, pipelined=work.execution.pipelined)
    launching = work.micro_batches * sum(span.launching for span in spans)
    others = sum(
        span.update + work.extra_forwards * work.micro_batches * span.forward for span in spans
    )
    return round(max(schedule.seconds * 1e9, launching)) + round(others) + BETWEEN


def _in_seconds(spans: Sequence[StageTime]) -> list[StageTime]:
    return [StageTime(*(nanoseconds / 1e9 for nanoseconds in span)) for span in spans]


def _spans(
    profile: Profile, division: Partition, gpus: Sequence[GPU], work: Workload
) -> list[StageTime]:
    """The time of each device."""
    bounds = division.bounds
    assert len(bounds) == len(gpus) + 1, (bounds, len(gpus))
    spans = [
        span_time(profile, gpu, start, end, division.streamed, work)
        for gpu, (start, end) in zip(gpus, pairwise(bounds), strict=True)
    ]
    return sending(profile, spans, bounds[1:-1], gpus)


def sending(
    profile: Profile, spans: Sequence[StageTime], split_points: Sequence[int], gpus: Sequence[GPU]
) -> list[StageTime]:
    """The devices' times with the copies between them."""
    sent = [
        crossing_time(profile, cut, pair)
        for cut, pair in zip(split_points, pairwise(gpus), strict=True)
    ]
    pairs = zip(spans, [*sent, (0, 0)], strict=True)
    return [span._replace(send=there, send_back=back) for span, (there, back) in pairs]


def span_time(
    profile: Profile, gpu: GPU, start: int, end: int, streamed: Collection[int], work: Workload
) -> StageTime:
    """The time of a GPU for the blocks from `start` to before `end`; block 0 includes the
    embedding, the last block the head."""
    span = DeviceSpan(profile, start, end, streamed)
    stages = [
        (stage, index - 1 in streamed) for index, stage in zip(span.held, span.stages, strict=True)
    ]
    work = span.as_replayed(work, gpu)
    link = gpu.host_bandwidth * LINK_SHARE
    # Blocks of a kind have one object of counts. A search asks for a hundred thousand spans, so
    # each is looked up by identity, once for a span.
    every = [
        counts for stage, _ in stages for counts in (stage.kernels_forward, stage.kernels_backward)
    ]
    distinct = {id(counts): counts for counts in every}
    times = {key: _taken(counts, gpu, work) for key, counts in distinct.items()}
    launched = {
        key: 0 if work.has_cuda_graphs else int(host_seconds(counts) * 1e9)
        for key, counts in distinct.items()
    }

    def timed(stage: StageCost, copied: int, counts: KernelCounts) -> tuple[int, int]:
        # A block's offloaded activations use the link after its forward, and again before its
        # backward, also one block at a time.
        copying = int((copied + stage.on_host) / link * 1e9)
        return times[id(counts)] + int(EXPOSED * copying), copying

    forward, backward = [], []
    for stage, is_streamed in stages:
        # In a full fine-tune, trained weights are copied in for each forward and backward. The last
        # backward of a step also has optimizer state, and copies both back; those before it copy
        # sums of gradients back, which those after the first had before.
        once = stage.adapters + 2 * (stage.optimizer - stage.sums)
        again = 2 * (work.micro_batches - 1) * stage.sums
        updated = stage.adapters + (once + again) // work.micro_batches
        trained = (stage.adapters, updated) if profile.trains_all else (0, 0)
        there, back = (stage.weights + num_bytes if is_streamed else 0 for num_bytes in trained)
        forward.append(timed(stage, there, stage.kernels_forward))
        backward.append(timed(stage, back, stage.kernels_backward))
    return StageTime(
        # A device that waits for the one before it has prefetched its first blocks meanwhile.
        forward=streaming_time(forward, ahead=start > 0),
        # A backward starts with the blocks that the forward ended with, which are still there.
        backward=streaming_time(backward[::-1], ahead=True),
        update=0
        if profile.updates_in_backward
        else _update_time([stage for stage, _ in stages], gpu, work),
        launching=sum(launched[id(counts)] for counts in every),
    )


def _update_time(stages: Sequence[StageCost], gpu: GPU, work: Workload) -> int:
    """Nanoseconds of the optimizer's step: weights, gradients and state are read, and as much is
    written."""
    kept = sum(
        stage.adapters + stage.gradients + stage.optimizer + stage.average for stage in stages
    )
    rounded = (
        sum(stage.adapters // 2 for stage in stages) * UPDATE_TRAFFIC[work.rounding][work.kernels]
    )
    launches, (_, memory, start) = (
        sum(stage.update_launches for stage in stages),
        REACHED["elementwise"],
    )
    busy = (2 * kept + rounded) / (memory * gpu.memory_bandwidth) + launches * start
    return int((busy if work.has_cuda_graphs else max(busy, launches * LAUNCHED["other"])) * 1e9)


def compute_time(stage: StageCost, gpu: GPU, work: Workload, *, backward: bool) -> int:
    """Nanoseconds of a stage's kernels."""
    return _taken(stage.kernels_backward if backward else stage.kernels_forward, gpu, work)


def _taken(kernels: KernelCounts, gpu: GPU, work: Workload) -> int:
    busy = gpu_seconds(kernels, gpu, work.execution.attention)
    return int((busy if work.has_cuda_graphs else max(busy, host_seconds(kernels))) * 1e9)


def streaming_time(stages: Sequence[tuple[int, int]], *, ahead: bool) -> int:
    """Nanoseconds of stages that run one after the other while the weights of later ones are
    copied: of each the arithmetic and the copying, which is 0 for resident weights. A copy begins
    when the one before it is done and a buffer is free: when the block that had it has run. With
    `ahead` the buffers are filled before the first stage begins."""
    now, copied, ends = 0, 0, list[int]()
    for compute, copying in stages:
        if copying and not (ahead and len(ends) < BUFFERS):
            free = ends[-BUFFERS] if len(ends) >= BUFFERS else 0
            copied = max(copied, free) + copying
            now = max(now, copied)
        now += compute
        if copying:
            ends.append(now)
    return now


def crossing_time(profile: Profile, cut: int, gpus: tuple[GPU, GPU]) -> tuple[int, int]:
    """Nanoseconds to send the carry to the device of block `cut`, and its gradients back: through
    host memory, one copy out and one in."""

    def through_host(num_bytes: int) -> int:
        return sum(int(num_bytes / (gpu.host_bandwidth * LINK_SHARE) * 1e9) for gpu in gpus)

    return through_host(profile.crossing[cut]), through_host(profile.crossing_back[cut])


def assumptions(gpus: Sequence[GPU], work: Workload) -> list[str]:
    """What an estimate for these GPUs assumes, line by line."""
    lines = []
    if work.extra_forwards:
        keys = "prior.match_base, flow.target_guidance, flow.slider_positive"
        lines.append(
            f"mean of all steps, with {work.extra_forwards:.4g} more forwards each ({keys})"
        )
    compute, bits = work.execution.compute, "_32" if work.fp32 else ""
    matmul, attention, backward = (
        REACHED[kind].arithmetic
        for kind in (f"matmul{bits or '_16'}", f"attention{bits}", f"attention_backward{bits}")
    )
    for gpu in dict.fromkeys(gpus):
        rate = gpu.fp32_flops if work.fp32 else gpu.bf16_flops
        lines.append(
            f"{gpu.name}: matmuls at up to {matmul:.0%} of {rate / 1e12:g} TFLOP/s in "
            f"{'fp32' if work.fp32 else gpu.half}, attention at {attention:.0%} and {backward:.0%} "
            f"(backward), all else at {REACHED['elementwise'].memory:.0%} to "
            f"{REACHED['fused'].memory:.0%} of {gpu.memory_bandwidth / 1e9:.0f} GB/s, copies from "
            f"the host at {LINK_SHARE:.0%} of {gpu.host_bandwidth / 1e9:g} GB/s ({gpu.source})"
        )
        if compute != "dtype":
            kind = f"matmul_{compute}{'_scaled' * (work.kernels == 'triton')}"
            of_codes, share = rate_of_codes(gpu, compute), reach_of(kind, gpu).arithmetic
            lines.append(
                f"{gpu.name}: products of the frozen base in {compute} at up to {share:.0%} "
                f"of {of_codes / 1e12:.0f} TFLOP/s, with inputs rounded "
                f"{'in one pass' if work.kernels == 'triton' else 'in several passes over memory: train.kernels = triton rounds them in one'}"
                if of_codes
                else f"{gpu.name} does not multiply {compute}: "
                f"base.compute = {compute} is refused there"
            )
    launched = (
        "steps are replayed, so the host launches no operation"
        if work.has_cuda_graphs
        else f"the host launches an operation in {min(LAUNCHED.values()) * 1e6:.0f} to {max(LAUNCHED.values()) * 1e6:.0f} µs, as that H100's did; others are faster"
    )
    lines.append(f"these are the shares that an H100 reached; {launched}")
    return lines


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
    # now, and not in the first step, which would seem to hang
    utilisation.flops(next(iter(utilisation.sizes)))
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
