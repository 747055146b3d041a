"""A checkup as text for a terminal and as one HTML page that needs nothing else."""

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ditkit_core.diagnostics.doctor.findings import CODES, Checkup, Finding, MemoryPlan, StepRow, to_json
from ditkit_core.io.console import CONSOLE, say
from ditkit_core.io.files import write_text
from ditkit_core.io.run_dir import CHECKS

_MOST_LINES = 20
"""Lines of a table that are printed; the files have all of them."""
_MOST_OF_CODE = 8
"""Findings of one code and severity that are printed."""
_ORDER = ("error", "warning", "note")
_IN_TABLE = ("D02", "D03")
"""Codes of what is left out, which has a table of its own."""
Rows = Sequence[Sequence[str]]


def show(checkup: Checkup) -> None:
    """Print the checkup."""
    for title, head, rows in _tables(checkup):
        say(title)
        if rows:
            _print_table(head, rows)
        say("")
    for severity in _ORDER:
        found = [each for each in checkup.findings if each.severity == severity and each.code not in _IN_TABLE]
        for code in dict.fromkeys(each.code for each in found):  # what is said of every file hides nothing else
            its = [each for each in found if each.code == code]
            for finding in its[:_MOST_OF_CODE]:
                say(f"{severity}: {finding}")
            if len(its) > _MOST_OF_CODE:
                say(f"{severity}: {code} and {len(its) - _MOST_OF_CODE} more, which are in the files")
    say(verdict(checkup))


def verdict(checkup: Checkup) -> str:
    """The last line."""
    counts = {severity: sum(each.severity == severity for each in checkup.findings) for severity in _ORDER}
    counted = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for severity, count in counts.items() if count)
    found = f" ({counted})" if counted else ""
    return f"{'can be trained' if checkup.trainable else 'cannot be trained as it is'}{found}; checked in {checkup.seconds:.0f} s"


def write(checkup: Checkup, folder: Path) -> list[Path]:
    """Write `check.json` and `check.html` into a folder, each whole or not at all.

    Returns:
        The files.

    Raises:
        UserError: If they cannot be written.
    """
    files = [folder / name for name in CHECKS]
    write_text(files[0], json.dumps(to_json(checkup), indent=1) + "\n")
    write_text(files[1], page(checkup))
    return files


def page(checkup: Checkup) -> str:
    """The checkup as HTML."""
    parts = [f"<h1>{_text(checkup.model)}: {_text(verdict(checkup))}</h1>"]
    head = ["code", "", "where", "what", "how to mend it"]
    found = sorted(checkup.findings, key=lambda each: (_ORDER.index(each.severity), each.code))
    parts.append(_html_table(head, [_cells(each) for each in found], classes=[each.severity for each in found]))
    for title, names, rows in _tables(checkup, files=True):
        parts.append(f"<h2>{_text(title)}</h2>")
        if rows:
            parts.append(_html_table(names, rows))
    used = {each.code for each in found}
    parts.append("<h2>codes</h2>")
    parts.append(_html_table(["code", "about"], [[code, about] for code, about in CODES.items() if code in used]))
    return _PAGE.format(title=_text(f"{checkup.model}: check"), body="\n".join(parts))


def _cells(finding: Finding) -> list[str]:
    return [finding.code, finding.severity, finding.where, finding.what, finding.remedy]


Titled = tuple[str, Sequence[str], Rows]


def _tables(checkup: Checkup, *, files: bool = False) -> list[Titled]:
    """Titles, heads and rows of all that is a table; `files`: one of the files too, which may be long."""
    tables = [_buckets(checkup)]
    if files and checkup.files:
        tables.append(_files(checkup))
    if checkup.excluded:
        rows = [[each.name, each.reason, "stops the run" if each.stops else "left out"] for each in checkup.excluded]
        shown = rows if files else rows[:_MOST_LINES]
        tables.append((f"not trained on: {len(rows)}", ["file", "reason", ""], shown))
    if checkup.captions is not None:
        tables.append((_captions(checkup), [], []))
    if files and checkup.captions is not None and checkup.captions.cut:
        rows = [[cut.sample, str(cut.tokens), cut.kept] for cut in checkup.captions.cut]
        tables.append(("captions that are cut", ["sample", "tokens cut", "what is read"], rows))
    if files:
        for title, groups in (("same content", checkup.same), ("nearly alike", checkup.alike)):
            if groups:
                tables.append((title, ["samples"], [[", ".join(group)] for group in groups]))
    if checkup.memory is not None:
        tables.append(_memory(checkup.memory))
    tables += map(_step, checkup.steps)
    return tables


def _buckets(checkup: Checkup) -> Titled:
    total = sum(row.micro_batches or 0 for row in checkup.buckets)
    epoch = f", {total} micro-batches in an epoch" if total else ""
    kept, dropped = checkup.kept, checkup.dropped
    frames = f"; {kept} frames are kept, {dropped} of these files are not" if kept + dropped else ""
    classes = f" and {checkup.class_pictures} class pictures" if checkup.class_pictures else ""
    title = f"{checkup.model}: {checkup.samples} samples{classes} of {len(checkup.files)} files{epoch}{frames}"
    head = [
        "dataset",
        "frames",
        "height",
        "width",
        "references",
        "samples",
        "held out",
        "tokens each",
        "in a micro-batch",
        "micro-batches",
    ]
    rows = [
        [
            row.dataset, *map(_number, (row.frames, row.height, row.width, row.references, row.samples, row.held_out, row.tokens, row.batch_size)),
            _number(row.micro_batches) if row.dataset == "data" else "",
        ]
        for row in checkup.buckets
    ]  # fmt: skip
    return title, head, rows


def _files(checkup: Checkup) -> Titled:
    head = [
        "dataset",
        "file",
        "samples",
        "seconds",
        "fps",
        "trained at",
        "frames",
        "kept",
        "dropped",
        "height",
        "width",
        "enlarged",
    ]
    rows = [
        [
            row.dataset, row.file, str(row.samples), f"{row.seconds:.2f}", f"{row.fps:.3g}", f"{row.trained_fps:g}", str(row.frames), str(row.kept),
            str(row.dropped), str(row.height), str(row.width), f"×{row.enlarged:.2f}" if row.enlarged > 1 else "",
        ]
        for row in checkup.files
    ]  # fmt: skip
    return "files", head, rows


def _captions(checkup: Checkup) -> str:
    row = checkup.captions
    assert row is not None
    cut = "not looked at for length" if row.cut is None else f"{len(row.cut)} too long for the text encoder"
    return f"captions: {row.count}, {row.distinct} different, {row.empty} empty, {cut}"


def _memory(plan: MemoryPlan) -> Titled:
    if plan.fits is None:
        return f"fits: not planned: {plan.why_not}", [], []
    head = ["GiB", "planned peak", "reserve", "total", "free", ""]
    rows = []
    for row in plan.devices:
        free = row.total - row.reserve - row.peak
        sizes = [f"{size / 2**30:.2f}" for size in (row.peak, row.reserve, row.total, max(0, free))]
        rows.append([row.device, *sizes, "fits" if row.fits else f"lacks {-free / 2**30:.2f}"])
    verdict = "yes" if plan.fits else "no"
    return f"fits: {verdict}, as planned for {plan.batch}", head, rows


def _step(row: StepRow) -> Titled:
    size = f"{row.frames} frames of {row.height}x{row.width}" if row.frames > 1 else f"{row.height}x{row.width}"
    arrived = row.parameters - len(row.without_gradient)
    title = f"tried{f' with the {row.expert} expert' if row.expert else ''}: {len(row.samples)} x {size}, {row.tokens} tokens, two steps in {row.seconds:.1f} s"
    losses = ", ".join(f"{loss:.4f}" for loss in row.losses)
    norms = ", ".join(f"{norm:.3g}" for norm in row.grad_norms)
    saved = {True: "comes back to the bit", False: "comes back otherwise", None: "not made"}[row.reloaded]
    rows = [
        ["loss", losses], ["gradient norm", norms], ["parameters with a gradient", f"{arrived} of {row.parameters}"], ["a save", saved],
        ["highest memory", f"{row.peak_bytes / 2**30:.2f} GiB"],
    ]  # fmt: skip
    return title, ["", ""], rows


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _print_table(head: Sequence[str], rows: Rows) -> None:
    """A table in a terminal, aligned text elsewhere; what is a number stands right."""
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    if CONSOLE.is_terminal:
        table = Table(*head)
        for column, is_right in zip(table.columns, right, strict=True):
            column.justify = "right" if is_right else "left"
        for row in rows:
            table.add_row(*map(escape, row))
        CONSOLE.print(table)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = zip(row, widths, right, strict=True)
        say("  ".join(cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in cells).rstrip())


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdigit() or cell in ("", "?")


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _html_table(head: Sequence[str], rows: Rows, classes: Iterable[str] = ()) -> str:
    if not rows:
        return "<p>none</p>"
    names = [*classes] or [""] * len(rows)
    lines = ["<table>", "<tr>" + "".join(f"<th>{_text(name)}</th>" for name in head) + "</tr>"]
    for row, name in zip(rows, names, strict=True):
        cells = "".join(
            f'<td class="n">{_text(cell)}</td>' if _is_number(cell) else f"<td>{_text(cell)}</td>" for cell in row
        )
        lines.append(f'<tr class="{name}">{cells}</tr>' if name else f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; background: #fff; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1.05rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left; vertical-align: top; overflow-wrap: anywhere; }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
tr.error td {{ background: #fde8e8; }} tr.warning td {{ background: #fff6dd; }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #181818; }} th, td {{ border-color: #444; }}
tr.error td {{ background: #4a1f1f; }} tr.warning td {{ background: #443a14; }} }}
</style></head>
<body>
{body}
</body></html>
"""
