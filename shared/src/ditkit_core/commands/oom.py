"""The message when memory runs out: the plan next to the measured peaks, and the cheapest change
that would fit."""

import json
import sys
from collections.abc import Collection, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from typing import NamedTuple

import torch

from ditkit_core.config.schema import config_values
from ditkit_core.config.sizes import GIB
from ditkit_core.engine.ac_policies import Full, Policy
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.memory import is_host_allocation, process_peak_bytes
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.fit import fit
from ditkit_core.planner.gpus import RESERVE_BYTES, default_reserve, gpus_here, keeping_reserves
from ditkit_core.planner.memory import Budget, Partition, compose
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.report import PlanReport, print_measured_plan
from ditkit_core.planner.targets import host_limit
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run, with_config
from ditkit_core.run.plans.changes import SuggestedChange, levers
from ditkit_core.run.plans.fit import apply, changes, task_for
from ditkit_core.run.plans.plan import make_report, planned_step
from ditkit_core.training.optim.optimizers import optimizers_that

UNDER_THE_PLAN = 0.9
"""If the plan fitted but memory ran out: the share of the planned peak that a change may need. The
plan is then too optimistic by an unknown amount, so only a change with a clear margin is suggested.
"""
_CAPTIONS = "ditkit_core.commands.caption"
_ADVICE = {
    _CAPTIONS: "captioning: try --batch 1, a smaller --side or fewer --frames, "
    'encode.streaming = "always", or a smaller --model',
    "ditkit_core.sampling.render": "generating samples: try a smaller sample.height and sample.width",
    "ditkit_core.encoding.encode": 'encoding: try encode.vae_tiling = true, encode.streaming = "always", or encode.device = "cpu"',
}
_GENERAL = (
    "try train.checkpointing = full (full+offload if GPU memory is short), a smaller data.frames, "
    "height or width, train.batch_size = 1, a lower adapter.rank, train.cuda_graphs = off, "
    f"optim.name = {optimizers_that(lambda kind: kind.averages_in_8_bits)[0]}"
)
_UNTOUCHED = "the last save is untouched"
_NOTHING_LEFT = (
    "no setting is left to lower: batch, frames, size and rank have their smallest values"
)


class MeasuredPeaks(NamedTuple):
    """Peak bytes of each GPU; on a CPU one figure, of the whole process."""

    allocated: tuple[int, ...]
    """In tensors, which is what a plan counts."""
    reserved: tuple[int, ...] = ()
    """Taken by torch's allocator, with the gaps between tensors; none on a CPU."""


def measured_peaks(config: RunConfig) -> MeasuredPeaks:
    """The peaks so far. Planning would raise the peak of a process: measure before planning."""
    if config.train.device == "cpu" or not torch.cuda.is_available():
        return MeasuredPeaks((process_peak_bytes(),))
    devices = range(torch.cuda.device_count())
    allocated, reserved = (
        tuple(map(measure, devices))
        for measure in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
    )
    return MeasuredPeaks(allocated, reserved)


def explain(
    spec: ModelSpec,
    config: RunConfig,
    failure: str,
    *,
    training: bool,
    modules: Collection[str],
    peaks: MeasuredPeaks,
) -> None:
    """Print to stderr the memory that a run needs and had; the last line names the change that
    helps. `failure` is the allocator's message, in one line; `modules` are those in the traceback.
    """
    # Only training is planned; for encoding and sampling the traceback shows which of them failed.
    for module, advice in _ADVICE.items():
        if module in modules:
            kept = "what was written stays" if module == _CAPTIONS else _UNTOUCHED
            warn(f"error: out of memory while {advice}; {kept} ({failure})")
            return
    advice = _GENERAL
    if training:
        try:
            with redirect_stdout(sys.stderr):
                advice = "; ".join(_explained(spec, config, failure, peaks))
        # If the plan fails too, the user still has to learn that memory ran out.
        except (
            UserError,
            ArithmeticError,
            LookupError,
            OSError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            warn(
                f"(not planned: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__})"
            )
    warn(f"error: out of memory: {advice}; {_UNTOUCHED} ({failure})")


def is_of_the_host(failure: str) -> bool:
    """Whether host memory ran out, and not an accelerator's."""
    return is_host_allocation(failure) or failure.startswith("MemoryError")


def _explained(
    spec: ModelSpec, config: RunConfig, failure: str, peaks: MeasuredPeaks
) -> Iterator[str]:
    run = create_run(spec, config)
    say("out of memory; planning the memory of this run and of changes to it ...")
    report = make_report(run)
    measured = [
        [sizes[d.index] for d in run.devices] if report.is_cuda else list(sizes)
        for sizes in peaks
        if sizes
    ]
    print_measured_plan(report, *measured)
    on_host = report.is_cuda and is_of_the_host(failure)
    if on_host:
        yield "host memory ran out"
    elif all(plan.fits for plan in report.devices):
        yield (
            "according to the plan this run fits, so either another program uses memory (set "
            "train.reserve to leave it room) or the plan is wrong"
        )
    yield _on_gpus(run, report, on_host=on_host) if report.is_cuda else _on_the_host(run, report)


def _on_gpus(run: RunContext, report: PlanReport, *, on_host: bool) -> str:
    """The settings that `--fit` would choose for the devices of the run, with the memory that is
    free now."""
    spec, config = run.spec, run.config
    gpus = []
    present = keeping_reserves(gpus_here(run.devices), config.train.reserve)
    for device, gpu, plan in zip(run.devices, present, report.devices, strict=True):
        free, total = torch.cuda.mem_get_info(device)
        others = max(0, total - free - RESERVE_BYTES)  # minus the CUDA context of this process
        available = min(
            gpu.total - max(gpu.reserve, default_reserve(total) + others),
            _allowed(plan.fits and not on_host, plan.peak),
        )
        gpus.append(replace(gpu, reserve=gpu.total - max(0, available)))
    host = host_limit("", here=True)
    if host is not None and on_host:
        host = min(host, int(UNDER_THE_PLAN * report.step.host))
    task = task_for(run, tuple(gpus), host)
    names = [str(device) for device in run.devices]
    if (chosen := fit(task).chosen) is not None:
        fullest = max(chosen.plan, key=lambda plan: plan.peak / plan.budget.available)
        settings = ", ".join(_differing(config, apply(config, chosen, names)))
        if not settings:
            return "no setting that --fit searches needs less memory"
        return f"{settings} fits: {_of(fullest.peak, fullest.budget.available)}"
    single = [change for change in changes(spec, config, task) if change.gpus == task.gpus]
    if not single:
        return f"no settings that --fit searches fit; {_NOTHING_LEFT}, so it needs more memory or a smaller model"
    best = single[0]
    lacks = f"{best.missing / GIB:.1f} GiB would still be missing"
    helps = f"helps most: {lacks}" if best.missing else "fits, with the settings that --fit chooses"
    return f"no settings that --fit searches fit; {best.words} {helps}"


def _on_the_host(run: RunContext, report: PlanReport) -> str:
    """The mildest single change that fits a CPU; if none fits, the one with the lowest peak."""
    # The plan's policy: `budget` would choose again by the memory that is free now, and its choice
    # has just failed.
    train = replace(run.config.train, checkpointing=report.policy)
    run = with_config(run, replace(run.config, train=train))
    (plan, *_) = report.devices
    limit = min(plan.budget.total, _allowed(plan.fits, plan.peak))
    tried: list[tuple[int, str]] = []
    for change in _single(run.spec, run.config):
        changed = with_config(run, change.config)
        step = planned_step(changed, "cpu")
        costs = profile(step.job)
        budget = Budget(name="cpu", total=limit, workspace=0)
        undivided = Partition(devices=(0,) * len(costs.blocks))
        (planned,) = compose(costs, undivided, [budget], step.job.work)
        if planned.fits:
            return f"{change.words} fits: {_of(planned.peak, plan.budget.total)}"
        tried.append((planned.peak, change.words))
    if not tried:
        return f"{_NOTHING_LEFT}, so it needs more memory or a smaller model"
    peak, words = min(tried)
    return f"no single change is enough; {words} helps most: {_of(peak, plan.budget.total)}"


def _single(spec: ModelSpec, config: RunConfig) -> Iterator[SuggestedChange]:
    """Changes of one setting, beginning with those that only cost time; offloading to the host
    saves nothing on the host."""
    schedule = config.train.schedule.on_the_host()
    smaller = {Policy(): ("attn_only", "full"), Full(): ()}
    for policy in (
        ("full",) if schedule.uniform is None else smaller.get(schedule.uniform, ("full",))
    ):
        changed = replace(config, train=replace(config.train, checkpointing=policy))
        yield SuggestedChange(
            words=f'train.checkpointing = "{policy}"', lost_share=0.0, config=changed, gpus=()
        )
    for lever in levers(spec, config, ()):
        yield from lever


# A plan that does not fit was right: then nothing has to be subtracted from the memory of the
# device.
def _allowed(fits: bool, peak: int) -> int:
    return int(UNDER_THE_PLAN * peak) if fits else 2**62


def _differing(before: RunConfig, after: RunConfig) -> Iterator[str]:
    old = config_values(before)
    return (
        f"{key} = {json.dumps(value)}"
        for key, value in config_values(after).items()
        if value != old[key]
    )


def _of(peak: int, available: int) -> str:
    return f"{peak / GIB:.2f} of {available / GIB:.2f} GiB"
