"""The execution with which a step fits its GPUs and is fastest: the search of `--fit`, for a step that needs no run.

step = plan(spec, arch, Execution(), batch, "2x16GiB")
execution = step.job.execution if step.fits else fitted(step)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ditkit_core.config.sizes import gib
from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.compile import backend_of, check_compiled
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.io.console import doing
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import Profile
from ditkit_core.planner.plan import StepPlan
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.search.autotune import fit, least_missing
from ditkit_core.planner.search.partition_search import FitTask
from ditkit_core.training.optim.fused_checks import check_swap


def fitted(step: StepPlan) -> Execution:
    """Choose the policy, the format of the frozen weights, the GPUs to use, split points and streamed blocks.

    Only the format of the weights changes results: 8 bits are chosen where exact weights would make a step half as long again, or fit
    nothing.

    Args:
        step: The plan of the step as it is, on GPUs.

    Raises:
        UserError: If nothing fits, with the bytes that lack; or if the plan is for a CPU.
    """
    job, targets = step.job, step.targets
    if not targets.gpus:
        raise UserError("a step is fitted to GPUs, and this plan is for a CPU; name GPUs, such as gpus='24GiB'")
    task = replace(task_of(job, targets.gpus, formats_of(job)), host=targets.host)
    chosen = fit(task).chosen
    if chosen is None:
        raise UserError(
            f"nothing fits: the fullest GPU, or the host, still lacks {gib(least_missing(task))} GiB; use a smaller batch, or larger GPUs"
        )
    setting = chosen.setting
    quantize: Any = setting.quantize  # one of the formats of `formats_of`
    return replace(
        job.execution,
        devices=tuple(str(targets.devices[index]) for index in setting.gpus),
        split_points=setting.split_points,
        swap_blocks=setting.swap if any(setting.swap) else (),
        checkpointing=setting.policy,
        pipelined=setting.pipelined,
        quantize=quantize,
    )


def formats_of(job: StepJob, *, configured: str | None = None, stored: str = "none") -> tuple[str, ...]:
    """The formats of the frozen weights that a search may choose, from exact to coarse.

    Args:
        job: The step.
        configured: Format that is asked for; None for the step's.
        stored: Format of the file, which counts as exact.
    """
    quantize = job.quantize if configured is None else configured
    if job.compute != "dtype":  # products in 8 bits need that format
        return (quantize,)
    if job.trains_all:
        return ("none",)
    # One 8-bit format is enough: both have the same size, so the configured one is tried, else int8.
    eight_bits = () if stored != "none" else ("fp8",) if quantize == "fp8" else ("int8",)
    return ("none", *eight_bits, "nf4")


def task_of(job: StepJob, gpus: tuple[GPU, ...], formats: Sequence[str], stored: str = "none") -> FitTask:
    """The search problem of a step on these GPUs.

    Args:
        job: The step.
        gpus: To choose among.
        formats: Of the frozen weights, from exact to coarse; `none` is the format of the file.
        stored: That format.
    """
    profiles: list[Profile] = []

    @cache  # a profile takes seconds, and the search asks for the same one for every split and swap
    def profile_of(policy: str, quantize: str) -> Profile:
        doing(f"planning a training step, checkpointing {policy}, {weights_in_words(quantize)}")
        step = job.with_execution(checkpointing=policy, quantize=stored if quantize == "none" else quantize)
        profiles.append(profile(step, like=profiles[0] if profiles else None))
        return profiles[-1]

    return FitTask(
        gpus=gpus,
        profile_of=profile_of,
        work=job.work,
        quantizations=tuple(formats),
        adapts=not job.trains_all,
        streams_trained=_streams_trained(job),
        overlaps=not job.optim.fused_backward,
        schedules=job.trains_all,
        accepts=_accepted_by(job.execution),
    )


def weights_in_words(quantize: str) -> str:
    """The format of weights, for a line of the log."""
    return "exact weights" if quantize == "none" else f"{quantize} weights"


def _accepted_by(execution: Execution) -> Callable[[str, str], bool]:
    """Whether blocks can have a policy with a format of their weights: compiled ones cannot have all."""

    def accepts(policy: str, quantize: str) -> bool:
        quantized = execution.compute == "dtype" and quantize != "none"
        try:
            check_compiled(backend_of(execution.compile), [parse_policy(policy)], quantized=quantized)
        except UserError:
            return False
        return True

    return accepts


def _streams_trained(job: StepJob) -> bool:
    try:
        check_swap((1,), "full", job.optim)
    except UserError:
        return False
    return True
