"""`train --plan`: the memory of a run on each device, before anything is loaded or written."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ditkit_core.data.dataset import Sample
from ditkit_core.errors import UserError
from ditkit_core.planner import gpus as hardware
from ditkit_core.planner.auxiliary import plan_auxiliary
from ditkit_core.planner.memory import Workload, compose, on_host
from ditkit_core.planner.partition import (
    Partitioner,
    Solution,
    Targets,
    budgets_here,
    budgets_of,
    host_limit,
    profiles_of,
)
from ditkit_core.planner.planned_step import PlannedStep, as_held, work_of
from ditkit_core.planner.reduced_model import reduced_model
from ditkit_core.planner.report import PlanReport
from ditkit_core.planner.step_time import assumptions, both_orders, step_seconds
from ditkit_core.run.checks import check_run, check_settings, check_training
from ditkit_core.run.context import RunContext
from ditkit_core.run.expert_runs import largest_expert_run, notes_on
from ditkit_core.run.prepare import arch_here, build_on_meta


def make_report(run: RunContext, gpus: str = "", host: str = "") -> PlanReport:
    """Plan a run.

    Args:
        run: The run.
        gpus: The GPUs to plan for; empty for the run's devices on this machine.
        host: Memory for streamed weights on the host; empty for its free memory, or no limit with `gpus`.
    """
    check_plannable(run, here=not gpus)
    return report_of(run, gpus, host)


def report_of(
    run: RunContext,
    gpus: str = "",
    host: str = "",
    samples: Sequence[Sample] | None = None,
    class_images: Sequence[Sample] | None = None,
) -> PlanReport:
    """Plan a run that was checked already.

    Args:
        run, gpus, host: As for `make_report`.
        samples: Its training samples, if known already; None reads the dataset.
        class_images: The class images of prior preservation, likewise.
    """
    configured, run = run, as_held(largest_expert_run(run))
    targets = _targets(run, gpus, host)
    # Notes are about the run as configured.
    notes = (*notes_on(configured), *_notes(configured, targets.gpus))
    step, work = PlannedStep.of(run, targets.kind, samples, class_images), work_of(run)
    solution = Partitioner(
        run=run, model=_divisible(step, targets), targets=targets, profile_of=profiles_of(step.job)
    ).solve(run.config.train.schedule)
    found, division = solution.profile, solution.division
    plans = compose(found, division, targets.budgets, work)
    streamed = on_host(found, division.streamed)
    stages = (found.embed, *found.blocks, found.head)
    return PlanReport(
        model=f"{run.spec.name} {arch_here(run.spec, run.config.model)[0]}".strip(),
        policy=str(solution.placement.checkpointing),
        chosen=solution.chosen,
        bucket=step.bucket.described(),
        tokens=sum(map(run.spec.training.num_tokens, step.bucket.items)),
        work=work,
        devices=plans,
        auxiliary=plan_auxiliary(step, plans, gpus=bool(gpus), samples=samples, streamed=streamed),
        previews=bool(run.config.sample.every_steps and not run.config.sample.device),
        division=division,
        host=streamed,
        host_limit=targets.host,
        flops=work.micro_batches * sum(stage.flops_forward + stage.flops_backward for stage in stages),
        is_cuda=targets.kind == "cuda",
        notes=notes,
        **_times(solution, targets.gpus, work),
    )


def _times(solution: Solution, gpus: Sequence[hardware.GPU], work: Workload) -> dict[str, Any]:
    """The fields of a report about time; empty without GPUs, whose rates are known."""
    if not gpus:
        return {}
    return {
        "seconds": step_seconds(solution.profile, solution.division, gpus, work).seconds,
        "orders": both_orders(solution.profile, solution.division, gpus, work),
        "rates": tuple(assumptions(gpus, work)),
    }


def check_plannable(run: RunContext, *, here: bool) -> None:
    """Raise the errors that the run itself would, before anything is planned.

    Args:
        run: The run.
        here: Whether the plan is for the devices of this machine.
    """
    if here:
        check_run(run)
    else:
        check_settings(run)
    check_training(run, here=here)


def planned_step(run: RunContext, kind: str = "cuda") -> PlannedStep:
    """A run's largest micro-batch on a kind of device; with several experts, of the one that needs most memory."""
    return PlannedStep.of(as_held(largest_expert_run(run)), kind)


def _notes(run: RunContext, gpus: Sequence[hardware.GPU]) -> Iterator[str]:
    config = run.config
    old = dict.fromkeys(gpu.name for gpu in gpus if gpu.half == "fp16")
    if config.model.dtype == "bf16" and old:
        yield f'{" and ".join(old)} cannot compute in bf16, the dtype of this run; set model.dtype = "fp16"'
    if config.train.attention != "sdpa":
        yield f"train.attention = {config.train.attention}: this plan is for the memory of sdpa's kernels; others may need more or less"
    if config.train.compile:
        yield f"train.compile = {config.train.compile}: this plan is for eager blocks with the memory of compiled adapters; compiled blocks need other memory and time"
    if config.base.quantize == "none" and run.stored_as == "fp8":
        yield f"{config.model.here(run.component)} is in scaled 8 bits: planned in that format, like base.quantize = fp8"


def _targets(run: RunContext, gpus: str, host: str) -> Targets:
    reserve = run.config.train.reserve
    if not gpus and run.devices[0].type == "cpu":
        if host:
            raise UserError(
                f"--host {host} is memory for weights that are streamed to GPUs, and this run is planned for the CPU; leave it out, "
                "or name the GPUs to plan for: --gpus 24GiB"
            )
        # The device is the host itself, so there is no other memory to limit.
        return Targets(kind="cpu", devices=run.devices, budgets=budgets_here(run.devices, reserve))
    found = hardware.parse_gpus(gpus) if gpus else hardware.gpus_here(run.devices)
    devices = _named(run, len(found)) if gpus else run.devices
    found = hardware.keeping_reserves(found, reserve)
    limit = host_limit(host, here=not gpus)
    return Targets(kind="cuda", devices=devices, budgets=budgets_of(found), gpus=found, host=limit)


def _named(run: RunContext, count: int) -> tuple[torch.device, ...]:
    """Devices for GPUs that need not exist, with the names in the configuration, because policies can be set per device name."""
    names = run.config.train.devices
    if len(names) != count or not all(name.startswith("cuda:") for name in names):
        names = tuple(f"cuda:{index}" for index in range(count))
    return tuple(map(torch.device, names))


def _divisible(step: PlannedStep, targets: Targets) -> Any:
    """The model to split: on CPUs with its adapters, because the split by weights counts trained parameters."""
    job = step.job
    if targets.kind == "cuda" or len(targets.budgets) == 1:
        return build_on_meta(job.spec, job.arch, job.precision)
    return reduced_model(job, of_each=None).whole
