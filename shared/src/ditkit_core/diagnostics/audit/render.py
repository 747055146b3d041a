"""A precision audit as a table for people, as Markdown, and as JSON for programs."""

import json
from collections.abc import Sequence
from pathlib import Path

from ditkit_core.diagnostics.audit.findings import Case, Findings, to_json
from ditkit_core.diagnostics.audit.plot import draw
from ditkit_core.io.console import say
from ditkit_core.io.files import atomic_write, write_text


def show(findings: Findings) -> None:
    """Print the tables and what they mean."""
    for line in findings.notes:
        say(line)
    say("")
    for row in _aligned(*_table(findings)):
        say(row)
    say("")
    for line in _meaning(findings):
        say(line)


def write(findings: Findings, folder: Path) -> list[Path]:
    """Write the findings into a folder, each file whole or not at all.

    Returns:
        The files: JSON, Markdown, a picture.
    """
    files = [folder / f"precision.{ending}" for ending in ("json", "md", "png")]
    write_text(files[0], json.dumps(to_json(findings), indent=1) + "\n")
    write_text(files[1], markdown(findings))
    with atomic_write(files[2]) as temporary:
        draw(findings).save(temporary, format="png")
    return files


def markdown(findings: Findings) -> str:
    """The same as a page."""
    head, rows = _table(findings)
    lines = ["# Precision audit", "", *(f"- {line}" for line in findings.notes), ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (head, ["---", "---", *["---:"] * (len(head) - 2)], *rows)]
    lines += ["", *(f"- {line}" for line in _meaning(findings)), "", "![errors by place](precision.png)"]
    return "\n".join(lines) + "\n"


def _table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Head and cells."""
    head = ["place", "runs in", "velocity", "loss", "gradient", *(f"σ {name}" for name in findings.bin_names)]
    head += ["others low", "tried in", "time", "MiB"]
    rows = []
    for each in findings.places:
        cost = ["-", "-", "-"]
        if each.cost is not None:
            mib = each.cost.num_bytes / 2**20
            cost = [each.cost.dtype, f"×{each.cost.time_ratio:.2f}", f"{mib:+.2f}" if each.cost.num_bytes else "0"]
        rows.append(
            [each.place, each.dtype, *_errors(each.alone), number(each.all_but.overall.gradient), *cost]
        )  # fmt: skip
    rows.append(["all lowered", "", *_errors(findings.all_lowered), "", "", "", ""])
    rows.append(
        [
            "this run",
            "",
            *_errors(findings.own),
            "",
            "",
            f"{findings.seconds:.3f} s",
            f"{findings.peak_bytes / 2**20:.2f}",
        ]
    )
    return head, rows


def _errors(case: Case) -> list[str]:
    overall = case.overall
    return [
        *map(number, (overall.velocity, overall.loss, overall.gradient)),
        *(number(each.gradient) for each in case.bins),
    ]


def number(value: float) -> str:
    """A relative error in two digits; `0` is exactly none."""
    return f"{value:.1e}" if value else "0"


def _meaning(findings: Findings) -> list[str]:
    low = findings.lowered
    none = number(findings.all_lowered.overall.gradient)
    columns = {
        "velocity, loss, gradient": f"relative error against fp64 with this place alone in {low}; σ: of the gradient, by noise level",
        "others low": f"of the gradient with this place alone in fp64 and all others in {low}; with none in fp64 it is {none}",
        "time, MiB": "forward and backward, and highest memory, of this run with the place in the dtype it was tried in, against this run's own",
    }
    lines = [f"{column}: {what}" for column, what in columns.items()]
    lines.append(
        "of matmul, which model.dtype decides together with what weights are stored in, ask --plan --model.dtype what it costs"
    )
    largest = findings.places[0]
    if largest.alone.overall.gradient:
        lines.append(f"what matters most: {largest.place}, which this run has in {largest.dtype}")
    lines += [f"not measured here: {place}: it {reason}" for place, reason in findings.not_measured.items()]
    return lines


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
