"""The doctor's report as text for a terminal and as one self-contained HTML page."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ditkit_core.config.sizes import GIB
from ditkit_core.diagnostics.doctor.findings import (
    CODES,
    BucketRow,
    CheckReport,
    FileRow,
    MemoryPlan,
    StepRow,
    check_json,
    grouped,
    one_line,
)
from ditkit_core.diagnostics.rendering import Part, json_text, parts_page, print_parts
from ditkit_core.diagnostics.report.words import plural
from ditkit_core.io.console import say
from ditkit_core.io.files import write_text
from ditkit_core.io.run_dir import CHECKS
from ditkit_core.io.tables import Table

_MOST_OF_CODE = 8
"""Largest number of findings of one code and severity to print."""
_ORDER = ("error", "warning", "note")


def print_check(checkup: CheckReport) -> None:
    """Print the report."""
    print_parts(_parts(checkup))
    for severity in _ORDER:
        groups = grouped([finding for finding in checkup.findings if finding.severity == severity])
        # Limited per code: a finding about every file must not hide the others.
        for code in dict.fromkeys(group[0].code for group in groups):
            its = [group for group in groups if group[0].code == code]
            for group in its[:_MOST_OF_CODE]:
                say(f"{severity}: {one_line(group)}")
            if more := sum(map(len, its[_MOST_OF_CODE:])):
                say(f"{severity}: {code} and {more} more, which are in the files")
    say(check_verdict(checkup))


def check_verdict(checkup: CheckReport) -> str:
    """The last line: whether the run can be trained, and the number of findings."""
    counts = {
        severity: sum(finding.severity == severity for finding in checkup.findings)
        for severity in _ORDER
    }
    counted = ", ".join(plural(count, severity) for severity, count in counts.items() if count)
    numbers = f" ({counted})" if counted else ""
    return f"{'can be trained' if checkup.trainable else 'cannot be trained as it is'}{numbers}; checked in {checkup.seconds:.0f} s"


def write_check(checkup: CheckReport, folder: Path) -> list[Path]:
    """Write `check.json` and `check.html` into a folder, each atomically."""
    # Fixed names: a second check replaces the first, so that the files always describe the folder
    # as it is.
    files = [folder / name for name in CHECKS]
    write_text(files[0], json_text(check_json(checkup)) + "\n")
    write_text(files[1], check_page(checkup))
    return files


def check_page(checkup: CheckReport) -> str:
    """The report as an HTML page."""
    findings = sorted(
        checkup.findings, key=lambda finding: (_ORDER.index(finding.severity), finding.code)
    )
    rows = [
        [finding.code, finding.severity, finding.where, finding.observation, finding.remedy]
        for finding in findings
    ]
    table = Table(head=["code", "", "where", "what", "how to fix it"], rows=rows)
    first = Part(title="", table=table, row_classes=[finding.severity for finding in findings])
    used_codes = {finding.code for finding in findings}
    codes = Table(
        head=["code", "about"],
        rows=[[code, about] for code, about in CODES.items() if code in used_codes],
    )
    parts = [first, *_parts(checkup, files=True), Part(title="codes", table=codes)]
    return parts_page(
        f"{checkup.model}: check", f"{checkup.model}: {check_verdict(checkup)}", parts
    )


def _parts(checkup: CheckReport, *, files: bool = False) -> list[Part]:
    """All tables with their titles; `files` adds those that may be long."""
    parts = [_buckets(checkup)]
    if files and checkup.files:
        parts.append(Part(title="files", table=_of_rows(checkup.files)))
    if excluded := checkup.excluded:
        rows = [
            [entry.name, entry.reason, "stops the run" if entry.stops else "left out"]
            for entry in excluded
        ]
        # The terminal has them among the findings.
        table = Table(head=["file", "reason", ""], rows=rows) if files else None
        parts.append(Part(title=f"not trained on: {len(rows)}", table=table))
    if (captions := checkup.captions) is not None:
        cut = (
            "length not checked"
            if captions.cut is None
            else f"{len(captions.cut)} too long for the text encoder"
        )
        counted = f"captions: {captions.count}, {captions.distinct} different, {captions.empty} empty, {cut}"
        parts.append(Part(title=counted))
        if files and captions.cut:
            rows = [[cut.sample, str(cut.tokens), cut.kept] for cut in captions.cut]
            table = Table(head=["sample", "tokens cut", "text that is read"], rows=rows)
            parts.append(Part(title="truncated captions", table=table))
    if masks := checkup.masks:
        whites = " to ".join(
            dict.fromkeys(f"{100 * share:.0f} %" for share in (min(masks), max(masks)))
        )
        parts.append(
            Part(
                title=f"loss masks: {plural(len(masks), 'sample')}, {whites} of their pixels learnt in full"
            )
        )
    for title, groups in (
        (("same content", checkup.same), ("nearly alike", checkup.alike)) if files else ()
    ):
        if groups:
            table = Table(head=["samples"], rows=[[", ".join(group)] for group in groups])
            parts.append(Part(title=title, table=table))
    if checkup.memory is not None:
        parts.append(_memory(checkup.memory))
    return [*parts, *map(_step, checkup.steps)]


def _buckets(checkup: CheckReport) -> Part:
    total = sum(row.micro_batches or 0 for row in checkup.buckets)
    epoch = f", {plural(total, 'micro-batch')} in an epoch" if total else ""
    kept, dropped = checkup.kept, checkup.dropped
    frames = f"; {kept} frames are used, {dropped} are not" if kept + dropped else ""
    classes = f" and {plural(checkup.class_images, 'class image')}" if checkup.class_images else ""
    of = f"{plural(checkup.samples, 'sample')}{classes} of {plural(len(checkup.files), 'file')}"
    title = f"{checkup.model}: {of}{epoch}{frames}"
    return Part(title=title, table=_of_rows(checkup.buckets))


def _of_rows(rows: Sequence[BucketRow | FileRow]) -> Table:
    """A table with a column for each field, except fields that say nothing about any row: ten
    columns do not fit a terminal."""
    names = [field.name for field in fields(rows[0])] if rows else []
    names = [
        name
        for name in names
        if name not in _USUAL or any(getattr(row, name) != _USUAL[name] for row in rows)
    ]
    cells = [[_cell(row, name) for name in names] for row in rows]
    return Table(head=[_TITLES.get(name, name) for name in names], rows=cells)


_USUAL = {
    "dataset": "data",
    "references": 0,
    "held_out": 0,
    "seconds": 0,
    "fps": 0,
    "trained_fps": 0,
    "enlarged": 1,
}
"""By field, the value that says nothing: images have no rate, and most runs neither references nor
class images."""
_TITLES = {
    "held_out": "held out",
    "tokens": "tokens each",
    "batch_size": "batch size",
    "micro_batches": "micro-batches",
    "trained_fps": "trained at",
}
_SHOWN = {"seconds": "{:.2f}", "fps": "{:.3g}", "trained_fps": "{:g}", "enlarged": "×{:.2f}"}


def _cell(row: BucketRow | FileRow, name: str) -> str:
    value = getattr(row, name)
    if name == "micro_batches" and row.dataset == "prior" or name == "enlarged" and value == 1:
        return ""
    return "?" if value is None else _SHOWN.get(name, "{}").format(value)


def _memory(plan: MemoryPlan) -> Part:
    if plan.fits is None:
        return Part(title=f"fits: not planned: {plan.why_not}")
    rows = []
    for row in plan.devices:
        free = row.total - row.reserve - row.peak
        sizes = [f"{size / GIB:.2f}" for size in (row.peak, row.reserve, row.total, max(0, free))]
        rows.append([row.device, *sizes, "fits" if row.fits else f"lacks {-free / GIB:.2f}"])
    table = Table(head=["GiB", "planned peak", "reserve", "total", "free", ""], rows=rows)
    return Part(
        title=f"fits: {'yes' if plan.fits else 'no'}, as planned for {plan.batch}", table=table
    )


def _step(row: StepRow) -> Part:
    size = (
        f"{row.frames} frames of {row.height}x{row.width}"
        if row.frames > 1
        else f"{row.height}x{row.width}"
    )
    expert = f" with the {row.expert} expert" if row.expert else ""
    title = f"tried{expert}: {len(row.samples)} x {size}, {row.tokens} tokens, two steps in {row.seconds:.1f} s"
    measured = {
        "loss": ", ".join(f"{loss:.4f}" for loss in row.losses),
        "gradient norm": ", ".join(f"{norm:.3g}" for norm in row.grad_norms),
        "parameters with a gradient": f"{row.parameters - len(row.without_gradient)} of {row.parameters}",
        "a save": {
            True: "bitwise identical when read back",
            False: "differs when read back",
            None: "not made",
        }[row.reloaded],
        "highest memory": f"{row.peak_bytes / GIB:.2f} GiB",
    }
    return Part(title=title, table=Table(rows=[[name, text] for name, text in measured.items()]))
