"""A plan as a table, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ditkit_core.config.sizes import gib
from ditkit_core.io.console import say
from ditkit_core.io.tables import Table
from ditkit_core.planner.auxiliary import AuxiliaryRow
from ditkit_core.planner.memory import DevicePlan, Partition
from ditkit_core.planner.ranks.traffic import RanksPlan
from ditkit_core.planner.step_time import Comparison
from ditkit_core.planner.workload import Workload

_PURPOSES = ("weights", "adapters", "gradients", "optimizer", "average", "activations", "workspace")


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The contents of a plan."""

    model: str
    policy: str
    """The checkpointing schedule, with a budget resolved."""
    bucket: str
    """The planned micro-batch."""
    tokens: int
    """Tokens of that micro-batch."""
    work: Workload
    devices: tuple[DevicePlan, ...]
    division: Partition
    host: int
    """Bytes of weights in page-locked host memory."""
    flops: int
    """Floating-point operations of a step."""
    is_cuda: bool
    seconds: float | None = None
    """Time of a step; None if no rate is known."""
    num_steps: int = 0
    """Steps of the run, of all transformers that it trains."""
    rates: tuple[str, ...] = ()
    """The rates that the time is estimated from, a line for each GPU."""
    auxiliary: tuple[AuxiliaryRow, ...] = ()
    """Memory of encoding and sampling."""
    previews: bool = False
    """Whether previews are generated on the training devices."""
    host_limit: int | None = None
    """Bytes of host memory for streamed weights; None if unknown."""
    verifying: int = 0
    """Bytes of host memory of the process that verifies exports; 0 if there is none."""
    orders: Comparison | None = None
    """Utilisation of the devices with and without train.pipelined; None if nothing can overlap, or no rate is known."""
    notes: tuple[str, ...] = ()
    """Differences between the plan and the configuration, line by line."""
    chosen: str = ""
    """The choice of a checkpointing budget, in one line."""
    trains_all: bool = False
    """Whether all weights are trained, so that what the purpose `adapters` counts are these."""
    ranks: RanksPlan | None = None
    """For several ranks: what they exchange. All other figures are one rank's."""

    @property
    def hours(self) -> float | None:
        """Time of all steps, with exchanges where the link is known; None if no rate is known. Encoding, validation, samples and saves come on top."""
        seconds = self.seconds
        if self.ranks is not None:
            seconds = self.ranks.times[0].step if len(self.ranks.times) == 1 else None
        return None if seconds is None else seconds * self.num_steps / 3600

    @property
    def fits(self) -> bool:
        """Whether the run fits all its devices, from encoding to the last sample."""
        return self.training_fits and not self.lacking

    @property
    def training_fits(self) -> bool:
        """Whether the training steps fit their devices and the host."""
        return all(device.fits for device in self.devices) and not self.host_missing

    @property
    def host_missing(self) -> int:
        """Missing bytes of host memory; 0 if there is enough or it is unknown. Of several ranks each has an equal part."""
        return 0 if self.host_limit is None else max(0, self.host + self.host_activations - self.host_limit)

    @property
    def host_activations(self) -> int:
        """Bytes of offloaded activations in page-locked host memory."""
        return sum(device.host for device in self.devices)

    @property
    def lacking(self) -> list[AuxiliaryRow]:
        """The stages of encoding and sampling that do not fit."""
        return [row for row in self.auxiliary if row.fits is False]


def plan_json(report: PlanReport) -> dict[str, Any]:
    """The plan as plain values; sizes in bytes."""
    ranks = {} if report.ranks is None else {"ranks": asdict(report.ranks)}
    return {
        "model": report.model,
        "fits": report.fits,
        "checkpointing": report.policy,
        "checkpointing_chosen": report.chosen or None,
        "quantize": report.work.quantize,
        "bucket": report.bucket,
        "tokens": report.tokens,
        "micro_batches": report.work.micro_batches,
        "replayed": report.work.is_replayed,
        "pipelined": report.work.pipelined,
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
                "streamed": sorted(report.division.streamed.intersection(blocks)),
            }
            for plan, blocks in zip(report.devices, report.division.blocks, strict=True)
        ],
        "auxiliary": [_row_json(row) for row in report.auxiliary],
        "previews": report.previews,
        "host": {
            "streamed_weights": report.host,
            "offloaded_activations": report.host_activations,
            "verifying_exports": report.verifying,
            "available": report.host_limit,
            "missing": report.host_missing,
        },
        "flops_per_step": report.flops,
        "seconds_per_step": report.seconds,
        "steps": report.num_steps,
        "hours": report.hours,
        "assumed_rates": list(report.rates),
        "pipelining": None if report.orders is None else _orders_json(report.orders),
        "notes": list(report.notes),
        **ranks,
    }


def _row_json(row: AuxiliaryRow) -> dict[str, Any]:
    # `remedy` is null in JSON where the row fits, not an empty text.
    values = asdict(row)
    remedy = values.pop("remedy")
    return {**values, "fits": row.fits, "remedy": remedy or None}


def _orders_json(orders: Comparison) -> dict[str, Any]:
    both = {"accumulated": orders.accumulated, "pipelined": orders.pipelined}
    return {
        "source": "estimated",
        "gain": orders.gain,
        **{name: {"seconds": order.seconds, "utilisation": list(order.utilisation)} for name, order in both.items()},
    }


def print_measured_plan(report: PlanReport, allocated: Sequence[int], reserved: Sequence[int] = ()) -> None:
    """Print the planned memory of a run, and measured peaks of each device: bytes in tensors (for a CPU one figure, of the process), and what torch's
    allocator took from each GPU."""
    _headline(report)
    rows = _rows(report)
    row_index = next(i for i, row in enumerate(rows) if row[0] == "peak") + 1
    names = "measured peak" if report.is_cuda else "measured peak of the process", "measured peak with gaps"
    for peaks, name in zip((allocated, reserved), names, strict=True):
        if peaks:
            rows.insert(row_index, [name, *map(gib, peaks), *[""] * (len(report.devices) - len(peaks))])
            row_index += 1
    _show_devices(report, rows)


def print_plan(report: PlanReport, remedy: str = "") -> None:
    """Print the plan; `remedy` is a command that may find settings with which the training fits."""
    _headline(report)
    _show_devices(report, _rows(report))
    if report.auxiliary:
        say("")
        head = ["GiB", "on", "weights", "training", "peak", "available", ""]
        Table(head=head, rows=_auxiliary_rows(report), num_left=2).show()
        say("")
    if report.ranks is not None:
        _show_exchanges(report.ranks)
        say("")
    *lines, last = _lines(report)
    for line in lines:
        say(line)
    say(f"{last}; try: {remedy}" if remedy else last)


def _headline(report: PlanReport) -> None:
    base = "as it is" if report.work.quantize == "none" else report.work.quantize
    computed = "" if report.work.compute == "dtype" else ", multiplied as it is stored"
    say(f"{report.model}, checkpointing {report.policy}, base {base}{computed}")
    count, at_once = report.work.micro_batches, " at once" * report.work.pipelined
    batches = f", {count} micro-batches{at_once}" if count > 1 else ""
    say(f"planned for {report.bucket}: {report.tokens} tokens{batches}")


def _show_devices(report: PlanReport, rows: Sequence[Sequence[str]]) -> None:
    Table(head=["GiB", *(plan.budget.name for plan in report.devices)], rows=rows, num_left=1).show()


def _show_exchanges(ranks: RanksPlan) -> None:
    """The exchanges of a rank in a step, with their times by link."""
    head = ["a rank sends in a step", "GiB", *(f"{time.name}, s" for time in ranks.times)]
    rows = [
        [name, gib(num_bytes), *(_seconds(time.exchanges[index]) for time in ranks.times)]
        for index, (name, num_bytes) in enumerate(ranks.sent.items())
    ]
    rows.append(["not hidden by arithmetic", "", *(_seconds(time.exposed) for time in ranks.times)])
    if all(time.step is not None for time in ranks.times):
        rows.append(["step", "", *(_seconds(time.step or 0.0) for time in ranks.times)])
        rows.append(["efficiency", "", *(f"{time.efficiency or 0.0:.0%}" for time in ranks.times)])
    Table(head=head, rows=rows, num_left=1).show()


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"


def _auxiliary_rows(report: PlanReport) -> list[list[str]]:
    return [
        [
            f"{_when(row, report.previews)}: {row.name}{_of(row)}",
            row.device,
            gib(row.weights),
            gib(row.in_use),
            gib(row.peak),
            "?" if row.available is None else gib(row.available),
            {True: "fits", False: f"lacks {gib(row.missing)}", None: ""}[row.fits],
        ]
        for row in report.auxiliary
    ]


def describe_shortfall(row: AuxiliaryRow, previews: bool) -> str:
    """One line on a stage that does not fit, with its remedy."""
    return f"{_when(row, previews)}: {row.name} does not fit {row.device}; {row.remedy}"


def _when(row: AuxiliaryRow, previews: bool) -> str:
    return "preview and sample" if row.stage == "sample" and previews else row.stage


def _of(row: AuxiliaryRow) -> str:
    """Size of the sample, and the mode unless it is `whole`."""
    frames, height, width = row.size or (0, 0, 0)
    size_text = f", {frames} frames of {height}x{width}" if frames > 1 else f", {height}x{width}" if frames else ""
    return size_text if row.mode == "whole" else f"{size_text}, {row.mode}"


def _rows(report: PlanReport) -> list[list[str]]:
    plans, division = report.devices, report.division
    rows = [[purpose, *(gib(plan.purposes[purpose]) for plan in plans)] for purpose in _PURPOSES]
    if report.trains_all:
        # There is no adapter, and what the other row counts next to the trained weights is mostly nothing.
        rows[1][0], rows[0][0] = "trained weights", "other weights"
        rows = rows if any(plan.purposes["weights"] for plan in plans) else rows[1:]
    rows.append(["peak", *(gib(plan.peak) for plan in plans)])
    rows.append(["reserve", *(gib(plan.budget.reserve) for plan in plans)])
    rows.append(["total", *(gib(plan.budget.total) for plan in plans)])
    rows.append(["free", *(gib(plan.free) for plan in plans)])
    rows.append(["blocks", *(f"{blocks[0]}-{blocks[-1]}" for blocks in division.blocks)])
    if division.streamed:
        rows.append(["streamed", *(str(len(division.streamed.intersection(blocks))) for blocks in division.blocks)])
    rows.append(["", *("fits" if plan.fits else f"lacks {gib(plan.missing)}" for plan in plans)])
    return rows


def _lines(report: PlanReport) -> list[str]:
    lines, ranks = [], report.ranks
    if ranks is not None:
        lines += [
            f"{ranks.layout}; of {ranks.micro_batches} micro-batches of a step a rank has up to {report.work.micro_batches}",
            *(f"exchanges are an estimate: {time.rates}" for time in ranks.times),
        ]
        if encoders := [row.weights for row in report.auxiliary if row.stage == "encode"]:
            lines.append(
                f"encoders run one at a time on each rank: up to {gib(max(encoders))} GiB of weights, "
                f"{gib(ranks.layout.nproc * max(encoders))} GiB for all {ranks.layout.nproc} of a machine"
            )
        if ranks.loading:
            lines.append(
                f"while the model loads, the host needs {gib(ranks.loading)} GiB for each rank, besides the rows that stay there; "
                f"{gib(ranks.layout.nproc * ranks.loading)} GiB for all {ranks.layout.nproc} of a machine"
            )
        if ranks.saving:
            lines.append(
                f"while a save is written, the host has a copy of what each rank writes: {gib(ranks.saving)} GiB, "
                f"{gib(ranks.layout.nproc * ranks.saving)} GiB for all {ranks.layout.nproc} of a machine"
            )
    if len(report.devices) > 1:
        sent = ", ".join(f"{plan.crossing / 2**20:.0f} MiB" for plan in report.devices[1:])
        lines.append(f"sent to the next device in each forward: {sent}")
    if report.chosen:
        lines.append(report.chosen)
    held = {"streamed weights": report.host, "offloaded activations": report.host_activations}
    if any(held.values()):
        available = "" if report.host_limit is None else f", of {gib(report.host_limit)} GiB available"
        parts = ", for ".join(f"{purpose}: {gib(size)} GiB" for purpose, size in held.items() if size)
        rank_text = (
            ranks and f" for each rank, {gib(ranks.host_of_machine)} GiB for all {ranks.layout.nproc} of a machine"
        )
        lines.append(f"host memory for {parts}, page-locked{available}{rank_text or ''}")
    if report.verifying:
        lines.append(f"host memory while an export is verified, in a process of its own: {gib(report.verifying)} GiB")
    lines.append(f"arithmetic: {report.flops / 1e12:.1f} TFLOP per step")
    if report.seconds is not None:
        exchanges = "" if ranks is None else ", without exchanges"
        lines.append(f"time: about {_seconds(report.seconds)} s per step{exchanges}")
        if report.hours:
            duration = f"{report.hours:.1f} h" if report.hours >= 1 else f"{60 * report.hours:.0f} min"
            lines.append(
                f"time: about {duration} for {report.num_steps:,} steps; encoding, validation, samples and saves come on top"
            )
        lines += [f"the time is an estimate: {rate}" for rate in report.rates]
    if report.orders is not None:
        lines.append(str(report.orders))
    lines += report.notes
    if report.is_cuda:
        lines.append(
            "total: what torch reports, for a size 0.5 GiB and 0.5 % less than a GPU is sold with; reserve: the CUDA context (0.6 GiB) and gaps "
            "between the allocator's blocks (2 %), both assumed, and train.reserve; "
            f"workspace: assumed for cuBLAS; {'a replayed' if report.work.is_replayed else 'an eager'} step is planned"
        )
    lines += [describe_shortfall(row, report.previews) for row in report.lacking]
    if any(row.stage == "encode" for row in report.lacking):
        lines.append("encode: planned for an empty cache; cached samples are not encoded again")
    missing = [f"{plan.budget.name} lacks {gib(plan.missing)} GiB" for plan in report.devices if not plan.fits]
    missing += [f"the host lacks {gib(report.host_missing)} GiB"] if report.host_missing else []
    missing += [f"{row.name} on {row.device} lacks {gib(row.missing)} GiB" for row in report.lacking]
    lines.append(f"does not fit: {', '.join(missing)}" if missing else "fits")
    return lines
