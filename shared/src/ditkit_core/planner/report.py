"""A plan as a table, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ditkit_core.config.sizes import gib
from ditkit_core.documents.tables import Table
from ditkit_core.io.console import say
from ditkit_core.planner.auxiliary import AuxiliaryRow
from ditkit_core.planner.memory import DevicePlan
from ditkit_core.planner.plan import StepPlan
from ditkit_core.planner.rank_step import RanksPlan
from ditkit_core.planner.workload import Workload

_PURPOSES = ("weights", "adapters", "gradients", "optimizer", "average", "activations", "workspace")


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The plan of a run: its step on its devices, and what it does besides."""

    step: StepPlan
    """The largest step; of several ranks the part of one of them."""
    model: str
    bucket: str
    """The planned micro-batch."""
    tokens: int
    """Tokens of that micro-batch."""
    num_steps: int
    """Steps of the run, of all transformers that it trains."""
    auxiliary: tuple[AuxiliaryRow, ...] = ()
    """Memory of encoding and sampling."""
    previews: bool = False
    """Whether previews are generated on the training devices."""
    verifying: int = 0
    """Bytes of host memory of the process that verifies exports; 0 if there is none."""
    notes: tuple[str, ...] = ()
    """Differences between the plan and the configuration, line by line."""
    ranks: RanksPlan | None = None
    """For several ranks: what they exchange."""

    @property
    def devices(self) -> tuple[DevicePlan, ...]:
        """The memory of the step on each device."""
        return self.step.devices

    @property
    def work(self) -> Workload:
        """The step apart from its model."""
        return self.step.work

    @property
    def policy(self) -> str:
        """The checkpointing schedule, with a budget resolved."""
        return str(self.step.placement.checkpointing)

    @property
    def is_cuda(self) -> bool:
        """Whether the step is on GPUs."""
        return self.step.targets.kind == "cuda"

    @property
    def hours(self) -> float | None:
        """Time of all steps, with exchanges where the link is known; None if no rate is known.
        Encoding, validation, samples and saves come on top."""
        seconds = self.step.seconds
        if self.ranks is not None:
            seconds = self.ranks.times[0].step if len(self.ranks.times) == 1 else None
        return None if seconds is None else seconds * self.num_steps / 3600

    @property
    def fits(self) -> bool:
        """Whether the run fits all its devices, from encoding to the last sample."""
        return self.step.fits and not self.lacking

    @property
    def host_missing(self) -> int:
        """Missing bytes of host memory; 0 if there is enough or it is unknown. Of several ranks
        each has an equal part."""
        limit = self.step.targets.host
        return 0 if limit is None else max(0, self.step.host - limit)

    @property
    def lacking(self) -> list[AuxiliaryRow]:
        """The stages of encoding and sampling that do not fit."""
        return [row for row in self.auxiliary if row.fits is False]


def plan_json(report: PlanReport) -> dict[str, Any]:
    """The plan as plain values; sizes in bytes."""
    step, orders, ranks = report.step, report.step.orders, report.ranks
    return {
        "model": report.model,
        "fits": report.fits,
        "checkpointing": report.policy,
        "checkpointing_chosen": step.chosen or None,
        "quantize": step.job.quantize,
        "bucket": report.bucket,
        "tokens": report.tokens,
        "micro_batches": report.work.micro_batches,
        "replayed": report.work.has_cuda_graphs,
        "pipelined": report.work.execution.pipelined,
        "devices": [
            {
                "name": plan.budget.name,
                "total": plan.budget.total,
                "reserve": plan.budget.reserve,
                "peak": plan.peak,
                **{purpose: plan.purposes[purpose] for purpose in _PURPOSES},
                "free": plan.free,
                "fits": plan.fits,
                "missing": plan.missing,
                "crossing": plan.crossing,
                "blocks": list(blocks),
                "streamed": sorted(step.partition.streamed.intersection(blocks)),
            }
            for plan, blocks in zip(step.devices, step.partition.blocks, strict=True)
        ],
        "auxiliary": [
            {**asdict(row), "fits": row.fits, "remedy": row.remedy or None}
            for row in report.auxiliary
        ],
        "previews": report.previews,
        "host": {
            "streamed_weights": step.streamed,
            "offloaded_activations": step.host - step.streamed,
            "verifying_exports": report.verifying,
            "available": step.targets.host,
            "missing": report.host_missing,
        },
        "flops_per_step": step.flops,
        "seconds_per_step": step.seconds,
        "steps": report.num_steps,
        "hours": report.hours,
        "assumed_rates": list(step.rates),
        "pipelining": orders and orders.as_json(),
        "notes": list(report.notes),
        **({} if ranks is None else {"ranks": asdict(ranks)}),
    }


def print_measured_plan(
    report: PlanReport, allocated: Sequence[int], reserved: Sequence[int] = ()
) -> None:
    """Print the planned memory of a run, and measured peaks of each device: bytes in tensors (for a
    CPU one figure, of the process), and what torch's allocator took from each GPU."""
    _headline(report)
    rows = _rows(report)
    peak = next(i for i, row in enumerate(rows) if row[0] == "peak") + 1
    names = (
        "measured peak" if report.is_cuda else "measured peak of the process",
        "measured peak with gaps",
    )
    measured = [
        (name, peaks) for name, peaks in zip(names, (allocated, reserved), strict=True) if peaks
    ]
    rows[peak:peak] = [
        [name, *map(gib, peaks), *[""] * (len(report.devices) - len(peaks))]
        for name, peaks in measured
    ]
    _show_devices(report, rows)


def print_plan(report: PlanReport, remedy: str = "", *, why: bool = False) -> None:
    """Print the plan; `remedy` is a command that may find settings with which the training fits,
    `why` adds what it assumes."""
    _headline(report)
    _show_devices(report, _rows(report))
    if report.auxiliary:
        say("")
        head = ["GiB", "on", "weights", "training", "peak", "available", ""]
        Table(
            head=head,
            rows=[_auxiliary_cells(row, report.previews) for row in report.auxiliary],
            num_left=2,
        ).show()
        say("")
    if (ranks := report.ranks) is not None:
        head = ["a rank sends in a step", "GiB", *(f"{time.name}, s" for time in ranks.times)]
        rows = [
            [name, gib(num_bytes), *(_seconds(time.exchanges[index]) for time in ranks.times)]
            for index, (name, num_bytes) in enumerate(ranks.sent.items())
        ]
        rows.append(
            ["not hidden by arithmetic", "", *(_seconds(time.exposed) for time in ranks.times)]
        )
        if all(time.step is not None for time in ranks.times):
            rows.append(["step", "", *(_seconds(time.step or 0.0) for time in ranks.times)])
            rows.append(
                ["efficiency", "", *(f"{time.efficiency or 0.0:.0%}" for time in ranks.times)]
            )
        Table(head=head, rows=rows, num_left=1).show()
        say("")
    *lines, last = _lines(report, why=why)
    for line in lines:
        say(line)
    say(f"{last}; try: {remedy}" if remedy else last)


def _headline(report: PlanReport) -> None:
    work, quantize = report.work, report.step.job.quantize
    base = "as it is" if quantize == "none" else quantize
    computed = "" if work.execution.compute == "dtype" else ", multiplied as it is stored"
    say(f"{report.model}, checkpointing {report.policy}, base {base}{computed}")
    batches = (
        f", {work.micro_batches} micro-batches{' at once' * work.execution.pipelined}"
        if work.micro_batches > 1
        else ""
    )
    say(f"planned for {report.bucket}: {report.tokens} tokens{batches}")


def _show_devices(report: PlanReport, rows: Sequence[Sequence[str]]) -> None:
    Table(
        head=["GiB", *(plan.budget.name for plan in report.devices)], rows=rows, num_left=1
    ).show()


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"


def _auxiliary_cells(row: AuxiliaryRow, previews: bool) -> list[str]:
    frames, height, width = row.size or (0, 0, 0)
    size = (
        f", {frames} frames of {height}x{width}"
        if frames > 1
        else f", {height}x{width}"
        if frames
        else ""
    )
    mode = "" if row.mode == "whole" else f", {row.mode}"
    sizes = map(gib, (row.weights, row.in_use, row.peak))
    available = "?" if row.available is None else gib(row.available)
    fits = {True: "fits", False: f"lacks {gib(row.missing)}", None: ""}[row.fits]
    return [f"{_when(row, previews)}: {row.name}{size}{mode}", row.device, *sizes, available, fits]


def describe_shortfall(row: AuxiliaryRow, previews: bool) -> str:
    """One line on a stage that does not fit, with its remedy."""
    return f"{_when(row, previews)}: {row.name} does not fit {row.device}; {row.remedy}"


def _when(row: AuxiliaryRow, previews: bool) -> str:
    return "preview and sample" if row.stage == "sample" and previews else row.stage


def _rows(report: PlanReport) -> list[list[str]]:
    plans, division = report.devices, report.step.partition
    rows = [[purpose, *(gib(plan.purposes[purpose]) for plan in plans)] for purpose in _PURPOSES]
    if report.step.job.trains_all:
        # There is no adapter, and what the other row counts next to the trained weights is mostly
        # nothing.
        rows[1][0], rows[0][0] = "trained weights", "other weights"
        rows = rows if any(plan.purposes["weights"] for plan in plans) else rows[1:]
    totals = {
        "peak": [plan.peak for plan in plans],
        "reserve": [plan.budget.reserve for plan in plans],
        "total": [plan.budget.total for plan in plans],
        "free": [plan.free for plan in plans],
    }
    rows += [[name, *map(gib, sizes)] for name, sizes in totals.items()]
    rows.append(["blocks", *(f"{blocks[0]}-{blocks[-1]}" for blocks in division.blocks)])
    if division.streamed:
        rows.append(
            [
                "streamed",
                *(str(len(division.streamed.intersection(blocks))) for blocks in division.blocks),
            ]
        )
    rows.append(["", *("fits" if plan.fits else f"lacks {gib(plan.missing)}" for plan in plans)])
    return rows


def _lines(report: PlanReport, *, why: bool) -> Iterator[str]:
    step, ranks = report.step, report.ranks
    if ranks is not None:
        yield from _lines_of_ranks(report, ranks)
    if len(report.devices) > 1:
        sent = ", ".join(f"{plan.crossing / 2**20:.0f} MiB" for plan in report.devices[1:])
        yield f"sent to the next device in each forward: {sent}"
    if step.chosen:
        yield step.chosen
    held = {"streamed weights": step.streamed, "offloaded activations": step.host - step.streamed}
    if any(held.values()):
        available = (
            "" if step.targets.host is None else f", of {gib(step.targets.host)} GiB available"
        )
        parts = ", for ".join(
            f"{purpose}: {gib(size)} GiB" for purpose, size in held.items() if size
        )
        of_rank = f" for each rank{_of_machine(ranks, step.host)}" if ranks else ""
        yield f"host memory for {parts}, page-locked{available}{of_rank}"
    if report.verifying:
        yield f"host memory while an export is verified, in a process of its own: {gib(report.verifying)} GiB"
    yield f"arithmetic: {step.flops / 1e12:.1f} TFLOP per step"
    if step.seconds is not None:
        yield f"time: about {_seconds(step.seconds)} s per step{', without exchanges' if ranks else ''}"
        if report.hours:
            duration = (
                f"{report.hours:.1f} h" if report.hours >= 1 else f"{60 * report.hours:.0f} min"
            )
            yield f"time: about {duration} for {report.num_steps:,} steps; encoding, validation, samples and saves come on top"
        if why:
            yield from (f"the time is an estimate: {rate}" for rate in step.rates)
    if step.orders is not None:
        yield str(step.orders)
    yield from report.notes
    if report.is_cuda and not why:
        estimate = "the time is an estimate, and " if step.seconds is not None else ""
        yield f"{estimate}reserve and workspace are assumed; --why says from what"
    if report.is_cuda and why:
        yield (
            "total: what torch reports, for a size 0.5 GiB and 0.5 % less than a GPU is sold "
            "with; reserve: the CUDA context (0.6 GiB) and gaps between the allocator's blocks (2 "
            "%), both assumed, and train.reserve; workspace: assumed for cuBLAS; "
            f"{'a replayed' if report.work.has_cuda_graphs else 'an eager'} step is planned"
        )
    yield from (describe_shortfall(row, report.previews) for row in report.lacking)
    if any(row.stage == "encode" for row in report.lacking):
        yield "encode: planned for an empty cache; cached samples are not encoded again"
    missing = [
        f"{plan.budget.name} lacks {gib(plan.missing)} GiB"
        for plan in report.devices
        if not plan.fits
    ]
    missing += [f"the host lacks {gib(report.host_missing)} GiB"] if report.host_missing else []
    missing += [
        f"{row.name} on {row.device} lacks {gib(row.missing)} GiB" for row in report.lacking
    ]
    yield f"does not fit: {', '.join(missing)}" if missing else "fits"


def _lines_of_ranks(report: PlanReport, ranks: RanksPlan) -> Iterator[str]:
    yield f"{ranks.layout}; of {ranks.micro_batches} micro-batches of a step a rank has up to {report.work.micro_batches}"
    yield from (f"exchanges are an estimate: {time.rates}" for time in ranks.times)
    if most := max((row.weights for row in report.auxiliary if row.stage == "encode"), default=0):
        yield f"encoders run one at a time on each rank: up to {gib(most)} GiB of weights{_of_machine(ranks, most)}"
    if loading := ranks.loading:
        needed = (
            f"the host needs {gib(loading)} GiB for each rank, besides the rows that stay there"
        )
        yield f"while the model loads, {needed}{_of_machine(ranks, loading, '; ')}"
    if saving := ranks.saving:
        yield f"while a save is written, the host has a copy of what each rank writes: {gib(saving)} GiB{_of_machine(ranks, saving)}"


def _of_machine(ranks: RanksPlan, of_rank: int, begin: str = ", ") -> str:
    return (
        f"{begin}{gib(ranks.layout.nproc * of_rank)} GiB for all {ranks.layout.nproc} of a machine"
    )
