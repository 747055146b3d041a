"""The doctor's word on memory: what the planner says that a run holds on its accelerators, against what they have."""

from collections.abc import Iterator, Sequence

from ditkit_core.config.sizes import GIB
from ditkit_core.data.dataset import Sample
from ditkit_core.diagnostics.doctor.findings import DeviceRow, Finding, MemoryPlan
from ditkit_core.errors import UserError
from ditkit_core.planner.plan import report_of
from ditkit_core.planner.report import PlanReport
from ditkit_core.run.context import RunContext

_REMEDY = "--fit says which settings would fit, and --plan what is held where"


def plan_memory(
    run: RunContext, samples: Sequence[Sample], class_pictures: Sequence[Sample]
) -> tuple[MemoryPlan, list[Finding]]:
    """Plan a run on the accelerators of this machine, as `--plan` does. Nothing is fetched, and nothing is put on a device.

    A plan that does not fit is a warning: it is an estimate, and the trial of the largest micro-batch has the last word.

    Args:
        run: The run, checked.
        samples: All that it trains on, at least one.
        class_pictures: The same of prior preservation; there may be none.
    """
    if run.devices[0].type == "cpu":
        return MemoryPlan(why_not="a run on the CPU shares its memory with all else; --plan says what it takes"), []
    try:
        report = report_of(run, samples=samples, class_pictures=class_pictures)
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
            room = plan.budget.total - plan.budget.reserve
            yield _lacking(
                plan.budget.name,
                f"{report.bucket} is planned to hold {_gib(plan.peak)} of the {_gib(room)} that it can give",
            )
    for row in report.lacking:
        what = f"{row.stage}: {row.name} is planned to hold {_gib(row.peak)} of {_gib(row.available or 0)}"
        yield _lacking(row.device, what, row.remedy)
    if report.host_missing:
        yield _lacking("the host", f"{_gib(report.host_missing)} are lacking for what is streamed and offloaded to it")


def _lacking(where: str, what: str, remedy: str = "") -> Finding:
    remedy = f"{remedy}; or {_REMEDY}" if remedy else _REMEDY
    return Finding(code="D26", severity="warning", where=where, what=what, remedy=remedy)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
