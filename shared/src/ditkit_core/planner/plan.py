"""`train --plan`: the memory of a run on each device, before anything is loaded or written."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ditkit_core.data.dataset import Sample
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.errors import UserError
from ditkit_core.planner import gpus as hardware
from ditkit_core.planner.auxiliary_plan import plan_auxiliary
from ditkit_core.planner.kernel_time import rate_of_codes
from ditkit_core.planner.memory import Budget, Partition, Profile, compose, on_host, work_as_run
from ditkit_core.planner.partition import (
    Partitioner,
    Solution,
    Targets,
    budgets_here,
    budgets_of,
    host_limit,
    profiles_of,
)
from ditkit_core.planner.planned_step import PlannedStep, StepJob, as_held, work_of
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.ranks.divided import profile_of_rank, work_of_rank
from ditkit_core.planner.ranks.layout import PlannedLaunch, RankLayout, layout_of
from ditkit_core.planner.ranks.links import Route, parse_links
from ditkit_core.planner.ranks.traffic import RanksPlan, RankStep
from ditkit_core.planner.reduced_model import reduced_model
from ditkit_core.planner.report import PlanReport
from ditkit_core.planner.step_time import assumptions, both_orders, step_seconds
from ditkit_core.planner.workload import Workload
from ditkit_core.run.checks import check_ranks, check_run, check_settings, check_training
from ditkit_core.run.context import RunContext
from ditkit_core.run.expert_runs import largest_expert_run, notes_on
from ditkit_core.run.prepare import arch_here, build_on_meta
from ditkit_core.run.read_at_use import bytes_at_use

WORTH_CODES = 1.05
"""How many times as fast a step has to be with products in 8 bits, so that a plan does not advise against them."""
ALONE = PlannedLaunch()
"""No flags about ranks."""


def make_report(run: RunContext, gpus: str = "", host: str = "", launch: PlannedLaunch = ALONE) -> PlanReport:
    """Plan a run.

    Args:
        gpus: The GPUs to plan for, of one machine; empty for the run's devices on this machine.
        host: Memory for streamed weights on the host; empty for its free memory, or no limit with `gpus`.
        launch: The ranks to plan for.
    """
    check_plannable(run, here=not gpus)
    return report_of(run, gpus, host, launch=launch)


def report_of(
    run: RunContext,
    gpus: str = "",
    host: str = "",
    samples: Sequence[Sample] | None = None,
    class_images: Sequence[Sample] | None = None,
    launch: PlannedLaunch = ALONE,
) -> PlanReport:
    """Plan a run that was checked already.

    Args:
        run, gpus, host, launch: As for `make_report`.
        samples: Its training samples, if known already; None reads the dataset.
        class_images: The class images of prior preservation, likewise.
    """
    configured, run = run, as_held(largest_expert_run(run))
    routes = _routes(run, gpus, launch)
    layout = routes[0].layout if routes else None
    targets = _targets(run, gpus, host, layout)
    # Notes are about the run as configured.
    notes = (*notes_on(configured), *_notes(configured, targets.gpus))
    step = PlannedStep.of(run, targets.kind, samples, class_images, targets.gpus)
    run, adapts = step.run, step.run.config.adapter.method != "full"
    solution, work = _solve(step, targets, layout)
    found, division = solution.profile, solution.division
    plans = compose(found, division, targets.budgets, work)
    streamed = on_host(found, division.streamed)
    auxiliary = plan_auxiliary(
        step,
        plans,
        division.blocks,
        gpus=bool(gpus),
        samples=samples,
        streamed=streamed,
        per_machine=1 if layout is None else layout.nproc,
        host=targets.host,
    )
    sample, is_cuda = run.config.sample, targets.kind == "cuda"
    return PlanReport(
        model=f"{run.spec.name} {arch_here(run.spec, run.config.model)[0]}".strip(),
        policy=str(solution.placement.checkpointing),
        chosen=solution.chosen,
        bucket=step.bucket.described(),
        trains_all=not adapts,
        tokens=sum(map(run.spec.training.num_tokens, step.bucket.items)),
        work=work,
        devices=plans,
        auxiliary=auxiliary,
        previews=bool(sample.every_steps and not sample.device),
        division=division,
        host=streamed,
        host_limit=targets.host,
        verifying=_verifying(run, sum(stage.adapters for stage in found.stages)) if is_cuda else 0,
        flops=work.micro_batches * sum(stage.flops_forward + stage.flops_backward for stage in found.stages),
        is_cuda=is_cuda,
        notes=(*notes, *_on_codes(step, solution, targets.gpus, work)),
        ranks=_plan_of_ranks(run, solution, targets, routes, streamed + sum(plan.host for plan in plans)),
        **_times(solution, targets.gpus, work, overlaps=not run.config.optim.fused_backward),
    )


def _solve(step: PlannedStep, targets: Targets, layout: RankLayout | None) -> tuple[Solution, Workload]:
    """The device and the policy of each block, with the memory of a step, of one rank if there are several; and what a step is there."""
    profiles, adapts = profiles_of(step.job), step.run.config.adapter.method != "full"
    work = step.work if layout is None else work_of_rank(step.work, layout, adapts=adapts)
    solution = Partitioner(
        run=step.run,
        model=_divisible(step, targets),
        targets=targets,
        work=work,
        profile_of=profiles if layout is None else _of_rank(profiles, layout, step.run.precision.reduction),
    ).solve(step.run.config.train.schedule)
    return solution, work_as_run(solution.profile, solution.division, targets.gpus, work)


def _plan_of_ranks(
    run: RunContext, solution: Solution, targets: Targets, routes: Sequence[Route], host: int
) -> RanksPlan | None:
    """What the ranks of a run send, with `host` bytes of each of them in host memory; None for a process alone."""
    if not routes:
        return None
    step = RankStep(
        layout=routes[0].layout,
        profile=solution.profile,
        division=solution.division,
        work=work_of(run),
        gpu=targets.gpus[0] if targets.gpus else None,
    )
    return step.plan(routes, host)


def _verifying(run: RunContext, adapter_bytes: int) -> int:
    """Bytes on the host for the process that verifies exports next to a run on GPUs; 0 if nothing does."""
    adapters, trains_all = run.spec.adapters, run.config.adapter.method == "full"
    verify = adapters.verify_whole if trains_all or run.config.export.merged else adapters.verify
    if verify is None:
        return 0
    shard = max(1, run.config.ranks.shard)  # it reads the adapter whole, of which a rank trains a part
    return bytes_at_use(run.spec, run.arch, 0 if trains_all else shard * adapter_bytes)


def _of_rank(
    profiles: Callable[[Policy], Profile], layout: RankLayout, reduction: torch.dtype
) -> Callable[[Policy], Profile]:
    @cache
    def profile_of(policy: Policy) -> Profile:
        return profile_of_rank(profiles(policy), layout, reduction)

    return profile_of


def num_gpus(run: RunContext, gpus: str) -> int:
    """GPUs of a machine: as `--gpus` names them, or as there are here; 1 on a CPU."""
    if gpus:
        return len(hardware.parse_gpus(gpus))
    return torch.cuda.device_count() if run.devices[0].type == "cuda" else 1


def _routes(run: RunContext, gpus: str, launch: PlannedLaunch) -> tuple[Route, ...]:
    """The links to plan for, with the ranks between them; none for a process alone.

    Raises:
        UserError: If the flags do not fit, or the run cannot have these ranks.
    """
    layout = layout_of(run.config, num_gpus(run, gpus), launch)
    if layout is None:
        return ()
    check_ranks(run, layout.size)
    return parse_links(launch.link, layout)


def _times(solution: Solution, gpus: Sequence[hardware.GPU], work: Workload, *, overlaps: bool) -> dict[str, Any]:
    """The fields of a report about time; empty without GPUs, whose rates are known. Micro-batches may overlap or not."""
    if not gpus:
        return {}
    return {
        "seconds": step_seconds(solution.profile, solution.division, gpus, work),
        "orders": both_orders(solution.profile, solution.division, gpus, work) if overlaps else None,
        "rates": tuple(assumptions(gpus, work)),
    }


def check_plannable(run: RunContext, *, here: bool) -> None:
    """Raise the errors that the run itself would, before anything is planned.

    Args:
        here: Whether the plan is for the devices of this machine.
    """
    if here:
        check_run(run)
    else:
        check_settings(run)
    check_training(run, here=here)


def planned_step(run: RunContext, kind: str = "cuda", gpus: Sequence[hardware.GPU] = ()) -> PlannedStep:
    """A run's largest micro-batch on a kind of device; with several experts, of the one that needs most memory."""
    return PlannedStep.of(as_held(largest_expert_run(run)), kind, gpus=gpus)


def _notes(run: RunContext, gpus: Sequence[hardware.GPU]) -> Iterator[str]:
    config = run.config
    old = dict.fromkeys(gpu.name for gpu in gpus if gpu.half == "fp16")
    if config.model.dtype == "bf16" and old:
        yield f'{" and ".join(old)} cannot compute in bf16, the dtype of this run; set model.dtype = "fp32"'
    if config.train.attention != "sdpa":
        yield f"train.attention = {config.train.attention}: this plan is for the memory of sdpa's kernels; others may need more or less"
    if config.train.compile:
        yield f"train.compile = {config.train.compile}: this plan is for eager blocks with the memory of compiled adapters; compiled blocks need other memory and time"
    if config.base.quantize == "none" and run.stored_as == "fp8":
        yield f"{config.model.here(run.component)} is in scaled 8 bits: planned in that format, like base.quantize = fp8"


def _on_codes(step: PlannedStep, solution: Solution, gpus: Sequence[hardware.GPU], work: Workload) -> Iterator[str]:
    job = replace(step.job, policy=solution.placement.checkpointing or step.job.policy)
    yield from notes_on_codes(job, solution.profile, solution.division, gpus, work)


def notes_on_codes(
    job: StepJob, found: Profile, division: Partition, gpus: Sequence[hardware.GPU], work: Workload
) -> Iterator[str]:
    """What `base.compute` gains of a step's time, which it pays for with accuracy; nothing without it, or without rates.

    Args:
        job: The step.
        found: Its profile.
        division: Device of each block.
        gpus: The devices.
        work: What the step is apart from its model.
    """
    if job.compute == "dtype" or not gpus:
        return
    exact = profile(replace(job, compute="dtype"), like=found)
    gain = step_seconds(exact, division, gpus, replace(work, compute="dtype")) / step_seconds(
        found, division, gpus, work
    )
    advice = "" if gain >= WORTH_CODES else ": too little for the accuracy that it costs, so leave it out here"
    yield f"base.compute = {job.compute} makes a step {gain:.2f} times as fast by this estimate{advice}"


def check_formats(compute: str, gpus: Sequence[hardware.GPU]) -> None:
    """Refuse products in 8 bits on a GPU that has none of that format.

    Raises:
        UserError: With the GPU's name.
    """
    for gpu in gpus if compute != "dtype" else ():
        if gpu.bf16_flops and not rate_of_codes(gpu, compute):
            raise UserError(
                f"base.compute = {compute}: {gpu.name} has no products of this format; leave base.compute out"
            )


def _targets(run: RunContext, gpus: str, host: str, layout: RankLayout | None) -> Targets:
    """The devices of a process."""
    per_machine, reserve = 1 if layout is None else layout.nproc, run.config.train.reserve
    if not gpus and run.devices[0].type == "cpu":
        if host:
            raise UserError(
                f"--host {host} is memory for weights that are streamed to GPUs, and this run is planned for the CPU; leave it out, "
                "or name the GPUs to plan for: --gpus 24GiB"
            )
        # The device is the host itself, so there is no other memory to limit.
        budgets = budgets_here(run.devices, reserve)
        return Targets(kind="cpu", devices=run.devices, budgets=tuple(_part(each, per_machine) for each in budgets))
    found = hardware.parse_gpus(gpus) if gpus else hardware.gpus_here(run.devices)
    check_formats(run.config.base.compute, found)
    if layout is not None:
        found = (hardware.weakest(found),)
    devices = _named(run, len(found)) if gpus else run.devices
    found = hardware.keeping_reserves(found, reserve)
    limit = host_limit(host, here=not gpus)
    return Targets(
        kind="cuda",
        devices=devices,
        budgets=tuple(_of_ranks(each, layout) for each in budgets_of(found)),
        gpus=found,
        host=None if limit is None else limit // per_machine,
    )


def _part(budget: Budget, per_machine: int) -> Budget:
    """A rank's part of the host, which all ranks of a machine share."""
    if per_machine == 1:
        return budget
    return replace(budget, name=f"{budget.name} / {per_machine}", total=budget.total // per_machine)


def _of_ranks(budget: Budget, layout: RankLayout | None) -> Budget:
    return budget if layout is None else replace(budget, name=f"{budget.name} of {layout.size}")


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
