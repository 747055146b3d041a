"""What is said when memory runs out: the plan beside what was measured, and the cheapest change that would fit."""

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace

import torch

from ditkit_core.commands.fit import apply, changes, task_for
from ditkit_core.config.sizes import GIB
from ditkit_core.engine.ac_policies import Full, Policy
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.memory import is_host_allocation, process_peak_bytes
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.autotune import fit
from ditkit_core.planner.gpus import RESERVE_BYTES, default_reserve, gpus_here, keeping_reserves
from ditkit_core.planner.memory import Budget, Partition, compose
from ditkit_core.planner.partition import host_limit
from ditkit_core.planner.plan import job_for, make_report
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.report import PlanReport, print_measured_plan
from ditkit_core.planner.suggestions import SuggestedChange, levers
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run, with_config
from ditkit_core.training.optimizer import optimizers_that

UNDER_THE_PLAN = 0.9
"""Where a plan had room and there was none: the share of what it needed that a change may need."""
_ADVICE = {
    "ditkit_core.sampling.render": "drawing samples: try sample.vae_tiling = true, or a smaller sample.height and sample.width",
    "ditkit_core.encoding.encode": 'encoding: try encode.vae_tiling = true, encode.streaming = "always", or encode.device = "cpu"',
}
_GENERAL = (
    "try train.checkpointing = full, or full+offload where it is a GPU's memory that lacks, a smaller data.frames, height or width, train.batch_size = 1, a lower adapter.rank, "
    f"optim.name = {optimizers_that(lambda kind: kind.averages_in_8_bits)[0]}"
)
_SEARCHED = {
    "train": ("checkpointing", "device", "devices", "split_points", "swap_blocks", "pipelined"),
    "base": ("quantize",),
}
_UNTOUCHED = "the last save is untouched"
_NOTHING_LEFT = "nothing is left to lower: batch, frames, size and rank are as small as they get"


def measured_peaks(config: RunConfig) -> tuple[int, ...]:
    """Bytes that each device of a run has held at most; of CPUs the process as a whole. Planning moves the process's."""
    if config.train.device == "cpu" or not torch.cuda.is_available():
        return (process_peak_bytes(),)
    devices = range(torch.cuda.device_count())
    return tuple(torch.cuda.max_memory_allocated(device) for device in devices)


def explain(
    spec: ModelSpec, config: RunConfig, failure: str, *, training: bool, modules: Collection[str], peaks: Sequence[int]
) -> None:
    """Print to stderr what a run needs, had and could do with; the last line says what to change.

    Args:
        spec: The model's family.
        config: Of the run.
        failure: What the allocator said, in one line.
        training: Whether it was the command that trains.
        modules: Names of the modules that were at work.
        peaks: `measured_peaks`, taken before anything else.
    """
    for module, advice in _ADVICE.items():
        if module in modules:
            warn(f"error: out of memory while {advice}; {_UNTOUCHED} ({failure})")
            return
    said = _GENERAL
    if training:
        try:
            with redirect_stdout(sys.stderr):
                said = "; ".join(_explained(spec, config, failure, peaks))
        # whatever is wrong with the plan, memory is what the person has to hear of
        except (UserError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            warn(f"(not planned: {str(error).splitlines()[0] if str(error) else type(error).__name__})")
    warn(f"error: out of memory: {said}; {_UNTOUCHED} ({failure})")


def is_of_the_host(failure: str) -> bool:
    """Whether it was no accelerator that could not give memory."""
    return is_host_allocation(failure) or failure.startswith("MemoryError")


def _explained(spec: ModelSpec, config: RunConfig, failure: str, peaks: Sequence[int]) -> Iterator[str]:
    run = create_run(spec, config)
    say("out of memory; planning what the run needs, and what would fit ...")
    report = make_report(run)
    indices = [device.index or 0 for device in run.devices]
    measured = [peaks[i] for i in indices] if report.is_cuda else list(peaks)
    print_measured_plan(report, measured)
    on_host = report.is_cuda and is_of_the_host(failure)
    if on_host:
        yield "it was the host's that ran out"
    elif all(plan.fits for plan in report.devices):
        yield (
            "the plan has room for this run, so something else has memory there, which train.reserve leaves to it, or the plan "
            "is wrong"
        )
    yield _on_gpus(run, report, on_host=on_host) if report.is_cuda else _on_the_host(run, report)


def _on_gpus(run: RunContext, report: PlanReport, *, on_host: bool) -> str:
    """The settings that `--fit` would choose for the devices of the run, as they are now."""
    spec, config = run.spec, run.config
    cards = []
    own = keeping_reserves(gpus_here(run.devices), config.train.reserve)
    for device, card, plan in zip(run.devices, own, report.devices, strict=True):
        free, total = torch.cuda.mem_get_info(device)
        others = max(0, total - free - RESERVE_BYTES)  # less what CUDA takes for this process
        available = min(
            card.total - max(card.reserve, default_reserve(total) + others),
            _allowed(plan.fits and not on_host, plan.peak),
        )
        cards.append(replace(card, reserve=card.total - max(0, available)))
    host = host_limit("", here=True)
    if host is not None and on_host:
        host = min(host, int(UNDER_THE_PLAN * (report.host + report.host_activations)))
    task = replace(task_for(run, tuple(cards)), host=host)
    names = [str(device) for device in run.devices]
    if (chosen := fit(task).chosen) is not None:
        fullest = max(chosen.plan, key=lambda plan: plan.peak / plan.budget.available)
        settings = ", ".join(_differing(config, apply(config, chosen, names)))
        if not settings:
            return "no setting that --fit searches needs less"
        return f"{settings} fits: {_of(fullest.peak, fullest.budget.available)}"
    single = [each for each in changes(spec, config, task) if each.change.cards == task.cards]
    if not single:
        return f"nothing that --fit searches is enough; {_NOTHING_LEFT}, so it needs more memory or a smaller model"
    best = single[0]
    lacks = f"{best.missing / GIB:.1f} GiB would still be lacking"
    helps = f"helps most: {lacks}" if best.missing else "does, with the settings that --fit chooses"
    return f"nothing that --fit searches is enough; {best.change.words} {helps}"


def _on_the_host(run: RunContext, report: PlanReport) -> str:
    """The first of single changes that fits a CPU, the mildest first; else the one after which least is held."""
    # A budget would take what is free; what it came to is what failed.
    train = replace(run.config.train, checkpointing=report.policy)
    run = with_config(run, replace(run.config, train=train))
    (plan, *_) = report.devices
    limit = min(plan.budget.total, _allowed(plan.fits, plan.peak))
    tried: list[tuple[int, str]] = []
    for change in _single(run):
        changed = with_config(run, change.config)
        found = profile(job_for(changed, kind="cpu"))
        budget = Budget(name="cpu", total=limit, workspace=0)
        whole, pipelined = Partition(devices=(0,) * len(found.blocks)), changed.config.train.pipelined
        (planned,) = compose(found, whole, [budget], micro_batches=changed.config.micro_batches, pipelined=pipelined)
        if planned.fits:
            return f"{change.words} fits: {_of(planned.peak, plan.budget.total)}"
        tried.append((planned.peak, change.words))
    if not tried:
        return f"{_NOTHING_LEFT}, so it needs more memory or a smaller model"
    peak, words = min(tried)
    return f"no single change is enough; {words} helps most: {_of(peak, plan.budget.total)}"


def _single(run: RunContext) -> Iterator[SuggestedChange]:
    """Changes of one setting, from those that cost only time; on the host nothing is gained by offloading to it."""
    config = run.config
    schedule = config.train.schedule.on_the_host()
    smaller = {Policy(): ("attn_only", "full"), Full(): ()}
    for policy in ("full",) if schedule.uniform is None else smaller.get(schedule.uniform, ("full",)):
        changed = replace(config, train=replace(config.train, checkpointing=policy))
        yield SuggestedChange(words=f'train.checkpointing = "{policy}"', gives_up=0.0, config=changed, cards=())
    for lever in levers(run.spec, config, ()):
        yield from lever


def _allowed(fits: bool, peak: int) -> int:
    return int(UNDER_THE_PLAN * peak) if fits else 2**62


def _differing(before: RunConfig, after: RunConfig) -> Iterator[str]:
    for section, keys in _SEARCHED.items():
        for key in keys:
            old, new = (getattr(getattr(config, section), key) for config in (before, after))
            if old != new:
                yield f"{section}.{key} = {json.dumps(new)}"


def _of(peak: int, available: int) -> str:
    return f"{peak / GIB:.2f} of {available / GIB:.2f} GiB"
