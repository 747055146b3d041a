"""A precision audit as a document: a table and a chart."""

import math
from collections.abc import Mapping
from pathlib import Path

from ditkit_core.diagnostics.audit.audit import BASE
from ditkit_core.diagnostics.audit.findings import AuditFindings, Case, audit_json
from ditkit_core.diagnostics.audit.pictures import Picture, picture_table
from ditkit_core.diagnostics.embedded import PageMedia
from ditkit_core.documents.document import Bars, Document, Media, Strip, Text
from ditkit_core.documents.tables import Table

_LEFT, _WIDTH = 110, 560
"""Left edge of the bars of the chart, and the largest width of a bar, in SVG units."""


def audit_document(
    findings: AuditFindings, folder: Path = Path(), pictures: Mapping[Path, Picture] | None = None
) -> Document:
    """The findings with their explanation.

    Args:
        folder: The folder that the page is written into, which links begin at.
        pictures: What low precision does to a picture, by the files that show it; None if nothing
            was sampled.
    """
    notes, meaning = Text(lines=findings.notes), Text(lines=_meaning(findings))
    return Document(
        title="Precision audit",
        sections=[
            notes,
            _table(findings),
            meaning,
            _chart(findings),
            *(_pictures(pictures, folder) if pictures else ()),
        ],
        values=audit_json(findings),
    )


def _pictures(pictures: Mapping[Path, Picture], folder: Path) -> tuple[Table, Media]:
    media = PageMedia(folder)
    tiles = [media.tile(file, picture.name, picture.name) for file, picture in pictures.items()]
    strips = [Strip(tiles=tiles)]
    table = picture_table(list(pictures.values()))
    return table, Media(title="The same sample in other dtypes", strips=strips)


def _table(findings: AuditFindings) -> Table:
    head = [
        "place",
        "runs in",
        "velocity",
        "loss",
        "gradient",
        *(f"σ {name}" for name in findings.bin_names),
    ]
    head += ["others low", "tried in", "time", "MiB"]
    rows = []
    for entry in findings.op_groups:
        cost = ["-", "-", "-"]
        if entry.cost is not None:
            mib = entry.cost.num_bytes / 2**20
            cost = [
                entry.cost.dtype,
                f"×{entry.cost.time_ratio:.2f}",
                f"{mib:+.2f}" if entry.cost.num_bytes else "0",
            ]
        rows.append(
            [
                entry.op_group,
                entry.dtype,
                *_errors(entry.alone),
                format_error(entry.all_but.overall.gradient),
                *cost,
            ]
        )
    rows.append(["all lowered", "", *_errors(findings.all_lowered), "", "", "", ""])
    spent = [f"{findings.seconds:.3f} s", f"{findings.peak_bytes / 2**20:.2f}"]
    rows.append(["this run", "", *_errors(findings.as_run), "", "", *spent])
    return Table(head=head, rows=rows, num_left=2)


def _errors(case: Case) -> list[str]:
    overall = case.overall
    return [
        *map(format_error, (overall.velocity, overall.loss, overall.gradient)),
        *(format_error(bin_errors.gradient) for bin_errors in case.bins),
    ]


def format_error(value: float) -> str:
    """A relative error with two digits; `0` means exactly zero."""
    return f"{value:.1e}" if value else "0"


def _meaning(findings: AuditFindings) -> list[str]:
    low = findings.lowered
    none = format_error(findings.all_lowered.overall.gradient)
    columns = {
        "velocity, loss, gradient": f"relative error against fp64 with this place alone in {low}; σ: of the gradient, by noise level",
        "others low": f"of the gradient with this place alone in fp64 and all others in {low}; with none in fp64 it is {none}",
        "time, MiB": "time of forward and backward, and peak memory, with the place in the dtype of `tried in`, compared with this run",
    }
    lines = [f"{column}: {meaning}" for column, meaning in columns.items()]
    lines.append(
        "the cost of matmul is not measured, because model.dtype also sets the stored dtype of the "
        "weights; --plan --model.dtype shows it"
    )
    if any(entry.op_group == BASE for entry in findings.op_groups):
        lines.append(
            f"{BASE}: lowered means products with the frozen base in 8 bits, and the other choice "
            f"is model.dtype"
        )
    largest = findings.op_groups[0]
    if largest.alone.overall.gradient:
        lines.append(
            f"what matters most: {largest.op_group}, which this run has in {largest.dtype}"
        )
    lines += [
        f"not measured here: {group}: it {reason}"
        for group, reason in findings.not_measured.items()
    ]
    return lines


def _chart(findings: AuditFindings) -> Bars:
    """The errors of the gradient on a logarithmic axis."""
    low_dtype, cases = findings.lowered, [findings.as_run, findings.all_lowered]
    cases += [case for entry in findings.op_groups for case in (entry.alone, entry.all_but)]
    errors = [error.gradient for case in cases for error in (case.overall, *case.bins)]
    exponents = [math.log10(error) for error in errors if 0 < error < math.inf] or [-1.0]
    low = math.floor(min(exponents))
    high = max(math.ceil(max(exponents)), low + 1)

    def width(error: float) -> float:
        share = (math.log10(error) - low) / (high - low) if error else 0.0
        return round(min(max(share, 0.0), 1.0) * _WIDTH, 1)

    return Bars(
        title="Relative error of the gradient against fp64",
        description="Errors by place, as in the table",
        legend=(
            f"this place alone in {low_dtype} (dots: by noise level)",
            f"all but this place in {low_dtype}; dashed: this run; dotted: all places in {low_dtype}",
        ),
        left=_LEFT,
        right=_LEFT + _WIDTH,
        ticks=[(_LEFT + width(10.0**power), f"1e{power}") for power in range(low, high + 1)],
        rows=[
            (
                entry.op_group,
                width(entry.alone.overall.gradient),
                width(entry.all_but.overall.gradient),
                [_LEFT + width(error.gradient) for error in entry.alone.bins if error.gradient],
            )
            for entry in findings.op_groups
        ],
        marks=[
            (dashes, _LEFT + width(case.overall.gradient))
            for dashes, case in ((6, findings.as_run), (2, findings.all_lowered))
            if case.overall.gradient
        ],
    )
