"""A search for settings of a training step on GPUs: its task (`FitTask`), and its candidates,
settings with their memory and time.

`Search` finds the fastest split of a model across GPUs that it fits, for one policy and one format,
exhaustively: memory and time of a device depend only on its own blocks, so each span of blocks is
evaluated once, spans of equal blocks share the result, and dynamic programming combines the spans.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.io.console import doing
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
from ditkit_core.planner.partition import least_full, streamed_of
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
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
    """How the step runs as configured: the search varies it."""
    work: Workload = PLAIN
    """The work of the step as configured."""
    quantizations: tuple[str, ...] = ("none", "int8", "nf4")
    """From exact to coarse; a full fine-tune has only `none`."""
    adapts: bool = True
    """Whether adapters are trained; False if all weights are."""
    host: int | None = None
    """Bytes that streamed weights and offloaded activations may use on the host; None for no
    limit."""
    streams_trained: bool = False
    """Whether blocks whose weights are trained can be streamed."""
    streams: bool = True
    """Whether blocks can be streamed: those that ranks divide cannot."""
    overlaps: bool = True
    """Whether micro-batches may overlap: not where the optimizer steps in the backward."""
    schedules: bool = False
    """Whether blocks may have different policies."""

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
        work = replace(self.work, quantize=execution.quantize, pipelined=execution.pipelined)
        return replace(work, cuda_graphs="off") if execution.cuda_graphs == "off" else work


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


def formats_of(job: StepJob) -> tuple[str, ...]:
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


def task_of(job: StepJob, gpus: tuple[GPU, ...], formats: Sequence[str]) -> FitTask:
    """The search problem of a step on these GPUs, with formats of the frozen weights from exact to
    coarse; `none` is the format of the file."""
    profiles: list[Profile] = []

    @cache  # a profile takes seconds, and the search asks for the same one for every split and swap
    def profile_of(policy: str, quantize: str) -> Profile:
        doing(f"planning a training step, checkpointing {policy}, {weights_in_words(quantize)}")
        step = job.with_execution(checkpointing=policy, quantize=quantize)
        profiles.append(profile(step, like=profiles[0] if profiles else None))
        return profiles[-1]

    return FitTask(
        gpus=gpus,
        profile_of=profile_of,
        execution=job.execution,
        work=job.work,
        quantizations=tuple(formats),
        adapts=not job.trains_all,
        streams_trained=_passes(partial(check_swap, (1,), "full", job.optim)),
        overlaps=not job.optim.fused_backward,
        schedules=job.trains_all,
    )


def weights_in_words(quantize: str) -> str:
    """The format of weights, for a line of the log."""
    return "exact weights" if quantize == "none" else f"{quantize} weights"


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except UserError:
        return False
    return True


# Only the peak is asked for where this is used, so the budget must not matter.
_ENDLESS = Budget(name="", total=2**62)
_CAPS = 12
"""Number of bounds on the slowest device's time to try, if micro-batches overlap."""


@dataclass(frozen=True, kw_only=True)
class SearchedSpan:
    """The blocks of a device, from `start` to before `end`, some of them streamed."""

    start: int
    end: int
    num_streamed: int
    time: StageTime
    host: int
    """Bytes on the host: streamed weights and offloaded activations."""


class _Way(NamedTuple):
    """A choice of spans for the GPUs so far."""

    time: float
    host: int
    spans: tuple[SearchedSpan, ...]


Judge = Callable[[GPU, int, int], SearchedSpan | None]
"""The blocks from start to before end on a GPU, with the fewest of them streamed; None if they do
not fit."""


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
        spans = self._fastest_spans(gpus, share)
        if spans is None:
            return None
        division, profile, work = self._division(spans), self._profile, self._work
        swap_blocks = tuple(span.num_streamed for span in spans)
        return Candidate(
            execution=replace(
                self._execution,
                split_points=tuple(span.start for span in spans[1:]),
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
        ways = self._divide([self._task.gpus[i] for i in chosen], self._judge(1.0), 2**62)
        return sum(span.host for span in ways[-1]) if ways else None

    def least_missing(self, chosen: tuple[int, ...]) -> int:
        """Bytes that the fullest GPU lacks with all blocks streamed and the best split points; 0 if
        it fits."""
        gpus = [self._task.gpus[i] for i in chosen]

        def lacking(device: int, start: int, end: int) -> int:
            return max(
                0, self._least_held(gpus[device], start, end) - gpus[device].budget.available
            )

        split_points = least_full(self._num_blocks, len(chosen), self._starts, lacking)
        assert split_points is not None, "there are enough blocks for all"
        bounds = enumerate(pairwise((0, *split_points, self._num_blocks)))
        return max(lacking(device, start, end) for device, (start, end) in bounds)

    def _fastest_spans(self, gpus: Sequence[GPU], share: float) -> tuple[SearchedSpan, ...] | None:
        judge, host = self._judge(share), self._task.host
        divisions = self._divide(gpus, judge, host)
        if not divisions or not self._work.pipelined:
            return divisions[0] if divisions else None
        # With overlap the slowest device decides, which is not a sum: search again with ever
        # tighter bounds on it.
        times = [span.time.forward + span.time.backward for span in divisions[0]]
        slowest, least = max(times), sum(times) / len(times)
        ways = divisions
        # Bounds between the slowest device so far and a perfectly even split.
        for step in range(_CAPS):
            ways = [
                *ways,
                *self._divide(gpus, judge, host, least * (slowest / least) ** (step / _CAPS)),
            ]

        def seconds(spans: Sequence[SearchedSpan]) -> int:
            split_points = [span.start for span in spans[1:]]
            return step_time(
                sending(self._profile, [span.time for span in spans], split_points, gpus),
                self._work,
            )

        return min(ways, key=seconds)

    def _division(self, spans: Sequence[SearchedSpan]) -> Partition:
        devices = tuple(i for i, span in enumerate(spans) for _ in range(span.start, span.end))
        streamed = (self._streamed(span.start, span.end, span.num_streamed) for span in spans)
        return Partition(devices=devices, streamed=frozenset().union(*streamed))

    def _judge(self, share: float) -> Judge:
        @cache
        def judge(gpu: GPU, start: int, end: int) -> SearchedSpan | None:
            count = self._fewest_streamed(gpu, start, end, int(gpu.budget.available * share))
            if count is None:
                return None
            time, host = self._time(gpu, start, end, count)
            return SearchedSpan(start=start, end=end, num_streamed=count, time=time, host=host)

        return judge

    def _divide(
        self, gpus: Sequence[GPU], judge: Judge, host: int | None, bound: float | None = None
    ) -> list[tuple[SearchedSpan, ...]]:
        """Spans with the least total time, none longer than `bound`. The fastest come first, then
        slower ones that use less of a limited host; empty if nothing fits."""
        # Without overlap the devices' times add up over micro-batches; with it, sums only rank the
        # candidates.
        count = 1 if self._work.pipelined else self._work.micro_batches
        # best[k]: ways of the GPUs so far to hold the first k blocks
        best: dict[int, list[_Way]] = {0: [_Way(0, 0, ())]}
        for index, gpu in enumerate(gpus):
            following: dict[int, list[_Way]] = {}
            for start, ways in best.items():
                sent = (
                    sum(crossing_time(self._profile, start, (gpus[index - 1], gpu))) if index else 0
                )
                for end in [self._num_blocks] if index == len(gpus) - 1 else self._starts:
                    if end <= start:
                        continue
                    span = judge(gpu, start, end)
                    if span is None or (bound and span.time.forward + span.time.backward > bound):
                        break  # more blocks need more memory and time
                    taken = (
                        span.time.forward + span.time.backward + sent
                    ) * count + span.time.update
                    following.setdefault(end, []).extend(
                        _Way(way.time + taken, way.host + span.host, (*way.spans, span))
                        for way in ways
                        if host is None or way.host + span.host <= host
                    )
            best = {
                end: _undominated(ways, 1 if host is None else None)
                for end, ways in following.items()
            }
        return [way.spans for way in best.get(self._num_blocks, [])]

    def _fewest_streamed(self, gpu: GPU, start: int, end: int, capacity: int) -> int | None:
        """The fewest streamed blocks with which a device stays within `capacity`; None if streaming
        all is not enough."""
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


def _undominated(ways: list[_Way], most: int | None) -> list[_Way]:
    """The choices that no other beats in both time and host memory, the fastest first."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:2])[:most]:
        # Sorted by time, so a later choice is only worth keeping if it needs less host memory.
        if not kept or way.host < kept[-1].host:
            kept.append(way)
    return kept
