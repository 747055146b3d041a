"""What a search is about: a training step on GPUs (`FitTask`), and settings of it with their memory and time (`Candidate`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.compile import backend_of, check_compiled
from ditkit_core.errors import UserError
from ditkit_core.io.console import doing
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import DevicePlan, Partition, Profile
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
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
    work: Workload = PLAIN
    """The step as configured; the search chooses whether micro-batches overlap, and the format of the weights."""
    quantizations: tuple[str, ...] = ("none", "int8", "nf4")
    """From exact to coarse; a full fine-tune has only `none`."""
    adapts: bool = True
    """Whether adapters are trained; False if all weights are."""
    host: int | None = None
    """Bytes that streamed weights and offloaded activations may use on the host; None for no limit."""
    streams_trained: bool = False
    """Whether blocks whose weights are trained can be streamed."""
    streams: bool = True
    """Whether blocks can be streamed: those that ranks divide cannot."""
    overlaps: bool = True
    """Whether micro-batches may overlap: not where the optimizer steps in the backward."""
    schedules: bool = False
    """Whether blocks may have different policies."""
    accepts: Callable[[str, str], bool] = lambda policy, quantize: True
    """Whether a run may have this policy with this format: compiled blocks cannot have all."""

    def work_with(self, *, quantize: str, pipelined: bool, eager: bool) -> Workload:
        """The step with these settings."""
        work = replace(self.work, quantize=quantize, pipelined=pipelined)
        return replace(work, cuda_graphs="off") if eager else work


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of the search."""

    policy: str
    quantize: str
    gpus: tuple[int, ...]
    """Indices of the GPUs that are used, in order."""
    split_points: tuple[int, ...]
    swap: tuple[int, ...]
    """Streamed blocks of each GPU used."""
    pipelined: bool
    eager: bool = False
    """Whether micro-batches are not replayed as CUDA graphs, though the step would be: the memory of a replay does not fit."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings with their memory and time."""

    setting: Setting
    division: Partition
    plan: tuple[DevicePlan, ...]
    """One for each GPU used."""
    seconds: float
    """Of a step."""
    weights_on_host: int
    """Bytes of the weights that stay on the host."""
    within: Callable[[float], "Candidate | None"] = field(repr=False, compare=False)
    """Finds the fastest such settings within a share of each GPU's available memory; None if none fit."""

    @property
    def score(self) -> float:
        """Seconds, times the price of the weights' format."""
        return self.seconds * PRICE[self.setting.quantize]

    @property
    def fullness(self) -> float:
        """Used share of the fullest GPU's available memory."""
        return max(plan.peak / plan.budget.available for plan in self.plan)

    @property
    def host(self) -> int:
        """Bytes on the host: streamed weights and offloaded activations."""
        return self.weights_on_host + sum(plan.host for plan in self.plan)


def formats_of(job: StepJob) -> tuple[str, ...]:
    """The formats of the frozen weights that a search may choose, from exact to coarse; the file's counts as exact."""
    quantize = job.execution.quantize
    if job.execution.compute != "dtype":  # products in 8 bits need that format
        return (quantize,)
    if job.trains_all:
        return ("none",)
    # One 8-bit format is enough: both have the same size, so the configured one is tried, else int8.
    eight_bits = () if job.stored else ("fp8",) if quantize == "fp8" else ("int8",)
    return ("none", *eight_bits, "nf4")


def task_of(job: StepJob, gpus: tuple[GPU, ...], formats: Sequence[str]) -> FitTask:
    """The search problem of a step on these GPUs, with formats of the frozen weights from exact to coarse; `none` is the format of the file."""
    profiles: list[Profile] = []

    @cache  # a profile takes seconds, and the search asks for the same one for every split and swap
    def profile_of(policy: str, quantize: str) -> Profile:
        doing(f"planning a training step, checkpointing {policy}, {weights_in_words(quantize)}")
        step = job.with_execution(checkpointing=policy, quantize=quantize)
        profiles.append(profile(step, like=profiles[0] if profiles else None))
        return profiles[-1]

    def accepts(policy: str, quantize: str) -> bool:
        quantized = job.execution.compute == "dtype" and (quantize != "none" or bool(job.stored))
        backend = backend_of(job.execution.compile)
        return _passes(lambda: check_compiled(backend, [parse_policy(policy)], quantized=quantized))

    return FitTask(
        gpus=gpus,
        profile_of=profile_of,
        work=job.work,
        quantizations=tuple(formats),
        adapts=not job.trains_all,
        streams_trained=_passes(lambda: check_swap((1,), "full", job.optim)),
        overlaps=not job.optim.fused_backward,
        schedules=job.trains_all,
        accepts=accepts,
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
