"""The last lines of a run's logs, for a page that is watched."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ditkit_core.diagnostics.rendering import Html, element
from ditkit_core.diagnostics.report.words import format_number
from ditkit_core.io.run_dir import RunFolder

NUM_LINES = 8
"""Lines of a log that a page shows."""
_TAIL_BYTES, _LONGEST = 65_536, 300
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""A terminal's sequence for colours and for the cursor."""


def last_lines(path: Path, count: int = NUM_LINES) -> list[str]:
    """The last lines of a text file as a terminal would show them; none if it is missing, unreadable or no ordinary file.

    Of a line that was written over, as progress bars do, only the last text is shown.
    """
    try:
        if not path.is_file():  # a pipe would wait for its writer
            return []
        with path.open("rb") as file:
            file.seek(-min(_TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            text = _STYLE.sub("", file.read(_TAIL_BYTES).decode("utf-8", "replace"))
    except OSError:
        return []
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return [line for line in lines if line][-count:]


def log_part(folder: Path, log: Path | None = None) -> Html:
    """The last lines of the files in a run's folder, and of one that its output was redirected into; empty if there are none.

    Args:
        folder: The run's folder, with or without folders of experts.
        log: The file with the output of the run's command.
    """
    run = RunFolder(folder)
    logs = {} if log is None else {str(log): last_lines(log)}
    logs[run.log.name] = last_lines(run.log)
    for metrics in (run.metrics, *sorted(folder.glob("*/metrics.jsonl"))):
        logs[metrics.relative_to(folder).as_posix()] = [_numbers(line) for line in last_lines(metrics)]
    for path in (run.previews_log, run.verification_log):
        logs[path.name] = last_lines(path)
    parts = [_lines(name, lines) for name, lines in logs.items() if lines]
    return (
        element("details", element("summary", "Last lines"), element("div", *parts, class_="charts"), open="")
        if parts
        else Html()
    )


def _lines(name: str, lines: Sequence[str]) -> Html:
    return element(
        "figure", element("figcaption", name), element("pre", "\n".join(line[:_LONGEST] for line in lines), dir="auto")
    )


def _numbers(line: str) -> str:
    """A line of a metrics file as text, without the numbers of single parts; the line itself if it is none."""
    try:
        row = json.loads(line)
        step = int(row.pop("step"))
        numbers = {name: value for name, value in row.items() if "/" not in name}
        cells = (f"{name} {format_number(value)}" for name, value in numbers.items() if isinstance(value, int | float))
        return "  ".join([f"step {step}", *cells])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return line  # incomplete while the run writes, or cut
