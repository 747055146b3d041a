"""`train --plan`: the memory of a run on each device, before anything is loaded or written."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ditkit_core.adapters.files.entry import is_to_be_fetched
from ditkit_core.data.dataset import Sample
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU, parse_gpus
from ditkit_core.planner.plan import notes_on_codes, plan_step
from ditkit_core.planner.rank_layout import PlannedLaunch, RankLayout, layout_of, parse_links
from ditkit_core.planner.rank_step import RankStep
from ditkit_core.planner.report import PlanReport
from ditkit_core.planner.targets import targets_of
from ditkit_core.run.checks import check_ranks, check_run, check_settings, check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext
from ditkit_core.run.jobs import jobs_of
from ditkit_core.run.plans.auxiliary_plan import plan_auxiliary
from ditkit_core.run.plans.planned_step import PlannedStep
from ditkit_core.run.read_at_use import bytes_at_use

ALONE = PlannedLaunch()
"""No flags about ranks."""


def make_report(
    run: RunContext, gpus: str = "", host: str = "", launch: PlannedLaunch = ALONE
) -> PlanReport:
    """Plan a run.

    Args:
        gpus: The GPUs to plan for, of one machine; empty for the run's devices on this machine.
        host: Memory for streamed weights on the host; empty for its free memory, or no limit with
            `gpus`.
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
    """Plan a run that was checked already, as `make_report`; its training samples and class images
    may be known already, else the dataset is read."""
    configured, jobs = run, jobs_of(run)
    run = jobs.largest
    execution = run.execution
    layout = planned_layout(run.config, gpus, launch)
    if layout is not None:
        check_ranks(run, layout.size)
    routes = () if layout is None else parse_links(launch.link, layout)
    targets = targets_of(execution, gpus, host, layout)
    # Notes are about the run as configured.
    notes = (
        *jobs.notes(),
        *_notes(
            configured.config,
            configured.stored_formats.values(),
            configured.component,
            targets.gpus,
        ),
    )
    step = PlannedStep.of(run, targets.kind, samples, class_images, targets.gpus)
    plan = plan_step(step.job, targets, layout)
    auxiliary = plan_auxiliary(
        step,
        plan.devices,
        plan.partition.blocks,
        gpus=bool(gpus),
        samples=samples,
        streamed=plan.streamed,
        per_machine=1 if layout is None else layout.nproc,
        host=targets.host,
    )
    sample, gpus_planned = run.config.sample, targets.gpus
    job = plan.job.with_execution(checkpointing=plan.placement.checkpointing or plan.job.schedule)
    ranks = None
    if layout is not None:
        gpu = gpus_planned[0] if gpus_planned else None
        of_rank = RankStep(
            layout=layout,
            profile=plan.profile,
            division=plan.partition,
            work=plan.job.work,
            gpu=gpu,
        )
        ranks = of_rank.plan(routes, plan.host)
    adapter_bytes = sum(stage.adapters for stage in plan.profile.stages)
    return PlanReport(
        step=plan,
        model=f"{run.spec.name} {arch_here(run.spec, run.config.model)[0]}".strip(),
        bucket=step.bucket.described(),
        tokens=sum(map(run.spec.training.num_tokens, step.bucket.items)),
        num_steps=sum(job.run.config.train.steps for job in jobs),
        auxiliary=auxiliary,
        previews=bool(sample.every_steps and not sample.device),
        verifying=_verifying(run.spec, run.config, run.arch, adapter_bytes) if gpus_planned else 0,
        notes=(*notes, *notes_on_codes(job, plan.profile, plan.partition, gpus_planned, plan.work)),
        ranks=ranks,
    )


def _verifying(spec: ModelSpec, config: RunConfig, arch: Any, adapter_bytes: int) -> int:
    """Bytes on the host for the process that verifies exports next to a run on GPUs; 0 if nothing
    does."""
    adapters, trains_all = spec.adapters, config.adapter.method == "full"
    verify = adapters.verify_whole if trains_all or config.export.merged else adapters.verify
    if verify is None:
        return 0
    shard = max(1, config.ranks.shard)  # it reads all of the adapter, and a rank trains a part
    return bytes_at_use(spec, arch, 0 if trains_all else shard * adapter_bytes)


def planned_layout(config: RunConfig, gpus: str, launch: PlannedLaunch) -> RankLayout | None:
    """The ranks of a run on the GPUs of a machine, as `--gpus` names them, or as there are here;
    None for a process alone."""
    if gpus:
        count = len(parse_gpus(gpus))
    else:
        count = torch.cuda.device_count() if config.train.torch_devices[0].type == "cuda" else 1
    return layout_of(config.ranks, count, launch, devices=config.train.devices)


def check_plannable(run: RunContext, *, here: bool) -> None:
    """Raise the errors that the run itself would, before anything is planned; `here` for the
    devices of this machine."""
    if here:
        check_run(run)
    else:
        check_settings(run)
    check_training(run, here=here)


def planned_step(run: RunContext, kind: str = "cuda", gpus: Sequence[GPU] = ()) -> PlannedStep:
    """A run's largest micro-batch on a kind of device; with several experts, of the one that needs
    most memory."""
    return PlannedStep.of(jobs_of(run).largest, kind, gpus=gpus)


def _notes(
    config: RunConfig, stored: Iterable[str], component: str, gpus: Sequence[GPU]
) -> Iterator[str]:
    old = dict.fromkeys(gpu.name for gpu in gpus if gpu.half == "fp16")
    if config.model.dtype == "bf16" and old:
        yield f'{" and ".join(old)} cannot compute in bf16, the dtype of this run; set model.dtype = "fp32"'
    for key, entry in config.base.assistants:
        if entry and is_to_be_fetched(entry):
            yield f"{key} is not here yet: this plan leaves out its matrices, which samples need"
    if config.train.attention != "sdpa":
        yield f"train.attention = {config.train.attention}: this plan is for the memory of sdpa's kernels; others may need more or less"
    if config.base.quantize == "none" and (formats := sorted(set(stored))):
        yield f"{config.model.here(component)} is in {' and '.join(formats)}: planned as it is stored"
