"""The doctor's check of memory: the planned memory of a run against the memory of its
accelerators."""

from collections.abc import Iterator, Sequence

from ditkit_core.config.sizes import gib
from ditkit_core.data.dataset import Sample
from ditkit_core.diagnostics.doctor.findings import DeviceRow, Finding, MemoryPlan
from ditkit_core.errors import UserError
from ditkit_core.planner.report import PlanReport
from ditkit_core.run.context import RunContext
from ditkit_core.run.plans.plan import report_of

_REMEDY = "--fit finds settings that fit, and --plan prints the memory of each device"


def plan_memory(
    run: RunContext, samples: Sequence[Sample], class_images: Sequence[Sample]
) -> tuple[MemoryPlan, list[Finding]]:
    """Plan a run on the accelerators of this machine, as `--plan` does. Nothing is downloaded, and
    nothing is placed on a device.

    A plan that does not fit is only a warning: it is an estimate, and the trial of the largest
    micro-batch decides.

    Returns:
        The plan, and a finding for each device, encoder or sample that does not fit.
    """
    if run.devices[0].type == "cpu":
        return MemoryPlan(
            why_not="a run on the CPU shares memory with other programs; --plan prints its peak"
        ), []
    try:
        report = report_of(run, samples=samples, class_images=class_images)
    except UserError as error:
        return MemoryPlan(why_not=str(error)), []
    rows = tuple(
        DeviceRow(
            device=plan.budget.name,
            peak=plan.peak,
            reserve=plan.budget.reserve,
            total=plan.budget.total,
            fits=plan.fits,
        )
        for plan in report.devices
    )
    return MemoryPlan(batch=report.bucket, devices=rows, fits=report.fits), list(_findings(report))


def _findings(report: PlanReport) -> Iterator[Finding]:
    for plan in report.devices:
        if not plan.fits:
            yield _shortage(
                plan.budget.name,
                f"{report.bucket} needs {gib(plan.peak)} GiB according to the plan, and "
                f"{gib(plan.budget.available)} GiB are available",
            )
    for row in report.lacking:
        observation = f"{row.stage}: {row.name} needs {gib(row.peak)} GiB according to the plan, of {gib(row.available or 0)} GiB"
        yield _shortage(row.device, observation, row.remedy)
    if report.host_missing:
        yield _shortage(
            "the host",
            f"{gib(report.host_missing)} GiB are missing for streamed weights and offloaded "
            f"activations",
        )


def _shortage(where: str, observation: str, remedy: str = "") -> Finding:
    remedy = f"{remedy}; or {_REMEDY}" if remedy else _REMEDY
    return Finding("D26", where, observation, remedy)
