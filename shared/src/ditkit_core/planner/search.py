"""A search for settings of a training step on GPUs: its task (`FitTask`), and its candidates,
settings with their memory and time.

`Search` finds the fastest split of a model across GPUs that it fits, for one policy and one format,
exhaustively: memory and time of a device depend only on its own blocks, so each span of blocks is
evaluated once, spans of equal blocks share the result, and `divide_blocks` combines the spans.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from operator import add
from typing import Any

from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import (
    Budget,
    DevicePlan,
    DeviceSpan,
    Partition,
    Profile,
    compose,
    on_host,
)
from ditkit_core.planner.partition import (
    Division,
    cheapest,
    divide_blocks,
    partition_of,
    profiles_of,
    streamed_of,
)
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.step_time import (
    StageTime,
    crossing_time,
    sending,
    span_time,
    step_seconds,
    step_time,
)
from ditkit_core.planner.workload import PLAIN, Workload
from ditkit_core.training.optim.fused_checks import check_swap

PRICE = {"none": 1.0, "int8": 1.5, "fp8": 1.5, "nf4": 3.0}
"""Factor on a step's time when settings are compared, by the format of the weights."""


@dataclass(frozen=True, kw_only=True)
class FitTask:
    """The input of the search: a training step and the available GPUs."""

    gpus: tuple[GPU, ...]
    profile_of: Callable[[str, str], Profile]
    """(policy, quantize) to the profile; cached."""
    execution: Execution = field(default_factory=Execution)
    """How the step runs as configured: the search varies it. `kernels` may be `auto`."""
    work: Workload = PLAIN
    """The work of the step as configured, with the kernels that `auto` would be."""
    quantizations: tuple[str, ...] = ("none", "int8", "nf4")
    """From exact to coarse; a full fine-tune has only `none`."""
    adapts: bool = True
    """Whether adapters are trained; False if all weights are: then blocks may have different
    policies."""
    host: int | None = None
    """Bytes that streamed weights and offloaded activations may use on the host; None for no
    limit."""
    streams_trained: bool = False
    """Whether blocks whose weights are trained can be streamed."""
    streams: bool = True
    """Whether blocks can be streamed: those that ranks divide cannot."""
    overlaps: bool = True
    """Whether micro-batches may overlap: not where the optimizer steps in the backward."""

    def varied(self, policy: str, quantize: str, **others: Any) -> Execution:
        """The execution with one policy for all blocks, one format, and micro-batches one after the
        other."""
        settings: dict[str, Any] = {
            "checkpointing": policy,
            "quantize": quantize,
            "pipelined": False,
        }
        return replace(self.execution, **settings | others)

    def work_of(self, execution: Execution) -> Workload:
        """The work of the step if it runs so."""
        cuda_graphs = "off" if execution.cuda_graphs == "off" else self.work.cuda_graphs
        execution = replace(execution, kernels=self.work.execution.kernels)
        return replace(self.work, execution=execution, cuda_graphs=cuda_graphs)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run the step, with its memory and time."""

    execution: Execution
    """Its devices are the task's."""
    gpus: tuple[int, ...]
    """Indices of the GPUs that are used, in order."""
    drops_cuda_graphs: bool
    """Whether micro-batches are not replayed, though the step as configured would be: the memory of
    graphs does not fit."""
    division: Partition
    plan: tuple[DevicePlan, ...]
    """One for each GPU used."""
    seconds: float
    """Of a step."""
    weights_on_host: int
    """Bytes of the weights that stay on the host."""
    within: Callable[[float], "Candidate | None"] = field(repr=False, compare=False)
    """Finds the fastest such settings within a share of each GPU's available memory; None if none
    fit."""

    @property
    def score(self) -> float:
        """Seconds, times the price of the weights' format."""
        return self.seconds * PRICE[self.execution.quantize]

    @property
    def swap_blocks(self) -> tuple[int, ...]:
        """Streamed blocks of each GPU that is used."""
        return self.execution.swap_blocks or (0,) * len(self.gpus)

    @property
    def fullness(self) -> float:
        """Used share of the fullest GPU's available memory."""
        return max(plan.peak / plan.budget.available for plan in self.plan)

    @property
    def host(self) -> int:
        """Bytes on the host: streamed weights and offloaded activations."""
        return self.weights_on_host + sum(plan.host for plan in self.plan)


def _formats_of(job: StepJob) -> tuple[str, ...]:
    """The formats of the frozen weights that a search may choose, from exact to coarse; the file's
    counts as exact."""
    quantize = job.execution.quantize
    if job.execution.compute != "dtype":  # products in 8 bits need that format
        return (quantize,)
    if job.trains_all:
        return ("none",)
    # One 8-bit format is enough: both have the same size, so the configured one is tried, else
    # int8.
    eight_bits = () if job.stored else ("fp8",) if quantize == "fp8" else ("int8",)
    return ("none", *eight_bits, "nf4")


def task_of(job: StepJob, gpus: tuple[GPU, ...], host: int | None = None) -> FitTask:
    """The search problem of a step on these GPUs; `host` limits the bytes there."""
    return FitTask(
        gpus=gpus,
        profile_of=profiles_of(job),
        execution=job.execution,
        work=job.work,
        quantizations=_formats_of(job),
        adapts=not job.trains_all,
        host=host,
        streams_trained=_passes(partial(check_swap, (1,), "full", job.optim)),
        overlaps=not job.optim.fused_backward,
    )


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except UserError:
        return False
    return True


# Only the peak is asked for where this is used, so the budget must not matter.
_ENDLESS = Budget(name="", total=2**62)
_BOUNDS = 12
"""Number of bounds on the slowest device's time to try, if micro-batches overlap."""


class Search:
    """Searches the splits of a task's step for one execution, whose split points and streamed
    blocks it chooses."""

    def __init__(self, task: FitTask, execution: Execution):
        """Prepare the search; nothing is evaluated yet. All blocks have one policy
        (`FitTask.varied`)."""
        self._task, self._execution = task, execution
        self._profile = profile = task.profile_of(str(execution.checkpointing), execution.quantize)
        self._work = task.work_of(execution)
        self._num_blocks = len(profile.blocks)
        trained = profile.trains_all and task.streams_trained
        self._has_weights = [
            task.streams and block.weights + trained * block.adapters > 0
            for block in profile.blocks
        ]
        # A block without parameters runs where its carry is: no device begins with it.
        self._starts = [
            i for i, block in enumerate(profile.blocks) if i and block.weights + block.adapters > 0
        ]
        kinds = {block: kind for kind, block in enumerate(dict.fromkeys(profile.blocks))}
        # Equal blocks have equal numbers, so that spans of equal blocks share cache entries.
        self._kinds = [kinds[block] for block in profile.blocks]
        self._held: dict[Hashable, int] = {}
        self._times: dict[Hashable, tuple[StageTime, int]] = {}
        self._like = cache(self._signature)

    def fastest(self, chosen: tuple[int, ...], share: float = 1.0) -> Candidate | None:
        """The fastest split across all chosen GPUs (indices of the task's), in their order, within
        a share of the memory that is available on each; None if none fits."""
        gpus = [self._task.gpus[i] for i in chosen]
        split_points = self._fastest_split(gpus, share)
        if split_points is None:
            return None
        bounds = pairwise((0, *split_points, self._num_blocks))
        swap_blocks = tuple(
            self._fewest_streamed(gpu, start, end, share) or 0
            for gpu, (start, end) in zip(gpus, bounds, strict=True)
        )
        division = partition_of(self._has_weights, split_points, swap_blocks)
        profile, work = self._profile, self._work
        return Candidate(
            execution=replace(
                self._execution,
                split_points=split_points,
                swap_blocks=swap_blocks if any(swap_blocks) else (),
            ),
            gpus=chosen,
            drops_cuda_graphs=self._execution.cuda_graphs != self._task.execution.cuda_graphs,
            division=division,
            plan=compose(profile, division, [gpu.budget for gpu in gpus], work),
            seconds=step_seconds(profile, division, gpus, work),
            weights_on_host=on_host(profile, division.streamed),
            within=partial(self.fastest, chosen),
        )

    def least_host(self, chosen: tuple[int, ...]) -> int | None:
        """The fewest bytes on the host with which the model fits these GPUs; None if it does
        not."""
        gpus = [self._task.gpus[i] for i in chosen]

        def num_bytes(device: int, start: int, end: int) -> int | None:
            needs = self._needs(gpus[device], start, end, 1.0)
            return None if needs is None else needs[1]

        divided = divide_blocks(self._num_blocks, len(chosen), self._starts, num_bytes, add)
        return divided[0][0] if divided else None

    def least_missing(self, chosen: tuple[int, ...]) -> int:
        """Bytes that the fullest GPU lacks with all blocks streamed and the best split points; 0 if
        it fits."""
        gpus = [self._task.gpus[i] for i in chosen]

        def lacking(device: int, start: int, end: int) -> int:
            gpu = gpus[device]
            return max(0, self._least_held(gpu, start, end) - gpu.budget.available)

        ((missing, _),) = divide_blocks(self._num_blocks, len(chosen), self._starts, lacking)
        return int(missing)

    def _fastest_split(self, gpus: Sequence[GPU], share: float) -> tuple[int, ...] | None:
        """The split points of the shortest step within a share of each GPU and the host's limit."""
        profile, work, host = self._profile, self._work, self._task.host
        # Without overlap the devices' times add up over micro-batches; with it, sums only rank the
        # divisions.
        count = 1 if work.execution.pipelined else work.micro_batches
        needs = cache(partial(self._needs, share=share))  # GPUs may be equal

        def cost(bound: float, device: int, start: int, end: int) -> tuple[float, int] | None:
            """Time, and bytes on the host; None if a micro-batch takes longer than `bound`."""
            if (span := needs(gpus[device], start, end)) is None:
                return None
            time, num_bytes = span
            if (passes := time.forward + time.backward) > bound:
                return None
            if device:
                passes += sum(crossing_time(profile, start, (gpus[device - 1], gpus[device])))
            return passes * count + time.update, num_bytes

        def divided(bound: float) -> list[tuple[int, ...]]:
            keep = cheapest if host is None else partial(_within, host)
            within = partial(cost, bound), lambda a, b: (a[0] + b[0], a[1] + b[1]), keep
            return [
                way for _, way in divide_blocks(self._num_blocks, len(gpus), self._starts, *within)
            ]

        def times(split_points: Sequence[int]) -> list[StageTime]:
            bounds = pairwise((0, *split_points, self._num_blocks))
            spans = [needs(gpu, *span) for gpu, span in zip(gpus, bounds, strict=True)]
            return [span[0] for span in spans if span is not None]

        divisions = divided(math.inf)
        if not divisions or not work.execution.pipelined:
            return divisions[0] if divisions else None
        # With overlap the slowest device decides, which is not a sum: search again with bounds on
        # it, between the slowest so far and a perfectly even split.
        passes = [time.forward + time.backward for time in times(divisions[0])]
        slowest, least = max(passes), sum(passes) / len(passes)
        for step in range(_BOUNDS):
            divisions += divided(least * (slowest / least) ** (step / _BOUNDS))
        return min(
            divisions, key=lambda cuts: step_time(sending(profile, times(cuts), cuts, gpus), work)
        )

    def _needs(self, gpu: GPU, start: int, end: int, share: float) -> tuple[StageTime, int] | None:
        """Time and bytes on the host of a span with the fewest streamed blocks; None if it does not
        fit a share of the GPU."""
        count = self._fewest_streamed(gpu, start, end, share)
        return None if count is None else self._time(gpu, start, end, count)

    def _fewest_streamed(self, gpu: GPU, start: int, end: int, share: float) -> int | None:
        """The fewest streamed blocks with which a span fits a share of the GPU; None if streaming
        all is not enough."""
        capacity = int(gpu.budget.available * share)
        if self._bytes_held(gpu, start, end, 0) <= capacity:
            return 0
        if self._least_held(gpu, start, end) > capacity:
            return None
        counts = range(sum(self._has_weights[start:end]) + 1)
        return bisect_left(
            counts, True, 1, key=lambda count: self._bytes_held(gpu, start, end, count) <= capacity
        )

    def _least_held(self, gpu: GPU, start: int, end: int) -> int:
        return min(
            self._bytes_held(gpu, start, end, count)
            for count in {0, sum(self._has_weights[start:end])}
        )

    def _bytes_held(self, gpu: GPU, start: int, end: int, count: int) -> int:
        # Of a whole model without streamed blocks the GPU's rates decide whether steps are
        # replayed.
        rates = gpu if (start, end, count) == (0, self._num_blocks, 0) else None
        like = rates, self._like(start, end), count
        if like not in self._held:
            span = DeviceSpan(self._profile, start, end, self._streamed(start, end, count))
            self._held[like] = span.plan(replace(_ENDLESS, rates=rates), self._work).peak
        return self._held[like]

    def _time(self, gpu: GPU, start: int, end: int, count: int) -> tuple[StageTime, int]:
        """Time of a span, and the bytes that it streams from or offloads to the host."""
        like, profile = (gpu, self._like(start, end), count), self._profile
        if like not in self._times:
            streamed = self._streamed(start, end, count)
            sent = (1 + self._work.waiting) * sum(
                block.on_host for block in profile.blocks[start:end]
            )
            time = span_time(profile, gpu, start, end, streamed, self._work)
            self._times[like] = time, on_host(profile, streamed) + sent
        return self._times[like]

    def _streamed(self, start: int, end: int, count: int) -> frozenset[int]:
        return streamed_of(self._has_weights, start, end, count)

    def _signature(self, start: int, end: int) -> Hashable:
        """Cache key: everything that a span's bytes and time depend on."""
        split_points = [cut for cut in (start, end) if 0 < cut < self._num_blocks]
        crossed = tuple(
            (self._profile.crossing[cut], self._profile.crossing_back[cut]) for cut in split_points
        )
        return start == 0, end == self._num_blocks, tuple(self._kinds[start:end]), crossed


def _within(host: int, ways: list[Division]) -> list[Division]:
    """Of divisions by time and bytes on the host the fastest, then slower ones that use less of the
    host; none that uses more than it has."""
    kept: list[Division] = []
    for way in sorted(ways):
        num_bytes = way[0][1]
        if num_bytes <= host and (not kept or num_bytes < kept[-1][0][1]):
            kept.append(way)
    return kept
