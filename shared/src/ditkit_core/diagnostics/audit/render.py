"""A precision audit as a table in the terminal, as Markdown with a chart, and as JSON."""

import math
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ditkit_core.diagnostics.audit.audit import BASE
from ditkit_core.diagnostics.audit.findings import AuditFindings, Case, audit_json
from ditkit_core.diagnostics.rendering import json_text
from ditkit_core.io.console import say
from ditkit_core.io.files import atomic_write, write_text
from ditkit_core.io.tables import Table

# Pixels and colours of the chart. PIL draws it, because matplotlib would be a dependency for this one image.
_WIDTH, _ROW, _BAR, _LEFT, _RIGHT, _TOP, _BOTTOM = 1100, 44, 14, 170, 40, 104, 56
_INK, _GREY, _LINE = (30, 30, 30), (110, 110, 110), (215, 215, 215)
_ALONE, _BUT, _DOT = (31, 119, 180), (255, 165, 60), (20, 60, 110)


def print_audit(findings: AuditFindings) -> None:
    """Print the table and its explanation."""
    for line in findings.notes:
        say(line)
    say("")
    _table(findings).show()
    say("")
    for line in _meaning(findings):
        say(line)


def write_audit(findings: AuditFindings, folder: Path) -> list[Path]:
    """Write the findings into a folder, each file atomically.

    Returns:
        The files: JSON, Markdown and an image of the chart.
    """
    files = [folder / f"precision.{ending}" for ending in ("json", "md", "png")]
    write_text(files[0], json_text(audit_json(findings)) + "\n")
    write_text(files[1], audit_markdown(findings))
    with atomic_write(files[2]) as temporary:
        _chart(findings).save(temporary, format="png")
    return files


def audit_markdown(findings: AuditFindings) -> str:
    """The findings as a Markdown page."""
    lines = ["# Precision audit", "", *(f"- {line}" for line in findings.notes), "", *_table(findings).markdown()]
    lines += ["", *(f"- {line}" for line in _meaning(findings)), "", "![errors by place](precision.png)"]
    return "\n".join(lines) + "\n"


def _table(findings: AuditFindings) -> Table:
    head = ["place", "runs in", "velocity", "loss", "gradient", *(f"σ {name}" for name in findings.bin_names)]
    head += ["others low", "tried in", "time", "MiB"]
    rows = []
    for entry in findings.places:
        cost = ["-", "-", "-"]
        if entry.cost is not None:
            mib = entry.cost.num_bytes / 2**20
            cost = [entry.cost.dtype, f"×{entry.cost.time_ratio:.2f}", f"{mib:+.2f}" if entry.cost.num_bytes else "0"]
        rows.append(
            [entry.place, entry.dtype, *_errors(entry.alone), format_error(entry.all_but.overall.gradient), *cost]
        )
    rows.append(["all lowered", "", *_errors(findings.all_lowered), "", "", "", ""])
    spent = [f"{findings.seconds:.3f} s", f"{findings.peak_bytes / 2**20:.2f}"]
    rows.append(["this run", "", *_errors(findings.own), "", "", *spent])
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
        "the cost of matmul is not measured, because model.dtype also sets the stored dtype of the weights; --plan --model.dtype shows it"
    )
    if any(entry.place == BASE for entry in findings.places):
        lines.append(
            f"{BASE}: lowered means products with the frozen base in 8 bits, and the other choice is model.dtype"
        )
    largest = findings.places[0]
    if largest.alone.overall.gradient:
        lines.append(f"what matters most: {largest.place}, which this run has in {largest.dtype}")
    lines += [f"not measured here: {group}: it {reason}" for group, reason in findings.not_measured.items()]
    return lines


def _chart(findings: AuditFindings) -> Image.Image:
    """A bar chart of the gradient's error by place: lowered alone, with a dot for each range of noise levels, and all but this place."""
    height = _TOP + _ROW * len(findings.places) + _BOTTOM
    image = Image.new("RGB", (_WIDTH, height), "white")
    pen = ImageDraw.Draw(image)
    low, high = _decades(findings)

    def at(error: float) -> float:
        share = (math.log10(error) - low) / (high - low)
        return _LEFT + min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT)

    font, small = ImageFont.load_default(16), ImageFont.load_default(13)
    pen.text((16, 12), "Relative error of the gradient against fp64", fill=_INK, font=ImageFont.load_default(20))
    _legend(pen, small, findings)
    for decade in range(low, high + 1):
        x = at(10.0**decade)
        pen.line((x, _TOP - 6, x, height - _BOTTOM), fill=_LINE)
        pen.text((x, height - _BOTTOM + 8), f"1e{decade}", fill=_GREY, font=small, anchor="ma")
    for row, entry in enumerate(findings.places):
        y = _TOP + _ROW * row
        pen.text((_LEFT - 10, y + _ROW / 2), entry.place, fill=_INK, font=font, anchor="rm")
        for offset, error, colour in ((6, entry.alone, _ALONE), (8 + _BAR, entry.all_but, _BUT)):
            if error.overall.gradient:
                pen.rectangle((_LEFT, y + offset, at(error.overall.gradient), y + offset + _BAR - 1), fill=colour)
        for bin_errors in entry.alone.bins:
            if bin_errors.gradient:
                x, middle = at(bin_errors.gradient), y + 6 + _BAR / 2
                pen.ellipse((x - 3, middle - 3, x + 3, middle + 3), fill=_DOT)
    for error, dash in ((findings.own, 6), (findings.all_lowered, 2)):
        if error.overall.gradient:
            x = at(error.overall.gradient)
            for y in range(_TOP - 6, height - _BOTTOM, 2 * dash):
                pen.line((x, y, x, y + dash), fill=_INK)
    return image


def _decades(findings: AuditFindings) -> tuple[int, int]:
    """The lowest and highest power of ten of the chart's axis."""
    cases = [findings.own, findings.all_lowered]
    cases += [case for entry in findings.places for case in (entry.alone, entry.all_but)]
    errors = [error.gradient for case in cases for error in (case.overall, *case.bins)]
    exponents = [math.log10(error) for error in errors if 0 < error < math.inf] or [-1.0]
    low = math.floor(min(exponents))
    return low, max(math.ceil(max(exponents)), low + 1)


def _legend(
    pen: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, findings: AuditFindings
) -> None:
    x, y = 16, 48
    entries = (
        (f"this place alone in {findings.lowered} (dots: by noise level)", _ALONE),
        (f"all but this place in {findings.lowered}", _BUT),
    )
    for text, colour in entries:
        pen.rectangle((x, y + 2, x + 14, y + 13), fill=colour)
        pen.text((x + 20, y), text, fill=_INK, font=font)
        x += 40 + int(pen.textlength(text, font=font))
    pen.text((16, y + 22), f"dashed: this run; dotted: all places in {findings.lowered}", fill=_INK, font=font)
