"""Write the page of what GPUs measured, from the rows of tools/gpu/gpu_truth.py.

    # from benchmarks/gpu_h100*.jsonl
    uv run tools/gpu/gpu_page.py > benchmarks/gpu_h100.md
    # from other files, the newest first
    uv run tools/gpu/gpu_page.py gpu_truth.jsonl other.jsonl > page.md

Where a file has rows of several runs, the last run that measured a part counts. The page has no
number that is not in a row, but ratios of two.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_truth import PARTS, Row, read, tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COLUMNS = {
    "ditkit": {"trainer": "ditkit", "kernels": "triton", "cuda_graphs": "off"},
    "ditkit, replayed": {"trainer": "ditkit", "kernels": "triton", "cuda_graphs": "on"},
    "diffusers": {"trainer": "diffusers"},
    "musubi-tuner": {"trainer": "musubi-tuner"},
    "DiffSynth-Studio": {"trainer": "DiffSynth-Studio"},
}
"""Columns of the table of steps, and the labels of their rows."""

INTRODUCTION = """# What GPUs measured

`uv run tools/gpu/gpu_page.py > benchmarks/gpu_h100.md` writes this page from the rows that `uv run tools/gpu/gpu_truth.py` appended on the GPU: {files}.

*Steps of models* are training steps of all blocks at published sizes, with random weights: forward, loss, backward, clipping and AdamW, one
sample, bf16. Adapters have rank 32; those of diffusers are on the same layers as ours, those of other trainers on the layers that they choose.
Cells are the median of the steps behind the warm-up, and the peak of all tensors, weights and optimizer included. *ditkit* runs with its Triton
kernels. *Planned* compares what `--plan` says without a GPU. Other columns are named in `tools/gpu/gpu_parts.py` and the files that it imports.
"""


def page(files: Sequence[Path]) -> str:
    """The page in Markdown.

    Args:
        files: Rows, the newest first.
    """
    named = ", ".join(f"[{file.name}]({file.name})" for file in files)
    sections = (line for file in files for line in section(latest(read(file))))
    return "\n".join([INTRODUCTION.format(files=named), *sections]).rstrip() + "\n"


def latest(rows: Sequence[Row]) -> list[Row]:
    """The rows of each part in the last run that measured it, and a row of each run."""
    runs, number = list[Row](), 0
    found: dict[str, tuple[int, list[Row]]] = {}
    for row in rows:
        if row["part"] == "run":
            runs.append(row)
            number += 1
        elif row.get("status") != "skipped":
            last, kept = found.get(row["part"], (number, []))
            found[row["part"]] = number, [*(kept if last == number else ()), row]
    return [*runs, *(row for _, kept in found.values() for row in kept)]


def section(rows: Sequence[Row]) -> Iterator[str]:
    """What one file says."""
    machine = next(
        (
            f"{row['name']}: {row['value']}"
            for row in rows
            if row["part"] == "facts" and "value" in row
        ),
        "",
    )
    runs = [row for row in rows if row["part"] == "run"]
    yield from (f"## {', '.join(dict.fromkeys(row['name'] for row in runs))}", "", machine, "")
    yield from (
        f"{line}\n" for line in dict.fromkeys(f"{row['name']}: {row['value']}" for row in runs)
    )
    yield from steps([row for row in rows if "case" in row])
    yield from failures(rows)
    for part in PARTS:
        if any(row["part"] == part.name for row in rows):
            yield from f"#{tables(rows, [part])}".replace(": not run", "", 1).split("\n")
    yield ""


def steps(rows: Sequence[Row]) -> Iterator[str]:
    """A table with a line for each model, size and policy."""
    if not rows:
        return
    columns = [name for name, labels in COLUMNS.items() if any(_has(row, labels) for row in rows)]
    yield from (
        "### Steps of models",
        "",
        f"| step | {' | '.join(columns)} | planned: memory, time |",
        f"|{'---|' * (len(columns) + 2)}",
    )
    for case, policy, preset in dict.fromkeys(
        (row["case"], row["policy"], row.get("preset", "default")) for row in rows
    ):
        fitting = [
            row for row in rows
            if (row["case"], row["policy"], row.get("preset", "default")) == (case, policy, preset)
        ]  # fmt: skip
        cells = [_cell(fitting, COLUMNS[name]) for name in columns]
        if any(cells):
            fast = "" if preset == "default" else f", {preset}"
            yield f"| {case}, {policy}{fast} | {' | '.join(cells)} | {_planned(fitting)} |"
    yield ""


def _has(row: Row, labels: Row) -> bool:
    return all(row.get(name) == value for name, value in labels.items())


def _cell(rows: Sequence[Row], labels: Row) -> str:
    for row in rows:
        if _has(row, labels) and "seconds" in row:
            peak = f", {row['peak GiB']:.1f} GiB" if "peak GiB" in row else ""
            return f"{row['seconds']:.3f} s{peak}"
    return ""


def _planned(rows: Sequence[Row]) -> str:
    """Ratios of planned to measured, of each way to run ours."""
    found = [
        f"{row['planned / measured']:.3f}, {row['time planned / measured']:.2f}"
        + (" replayed" if row["cuda_graphs"] == "on" else "")
        for row in rows
        if "planned / measured" in row and row["kernels"] == "triton"
    ]
    return "; ".join(found)


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """What did not hold."""
    broken = [row for row in rows if row.get("ok") is False]
    ended = [row for row in rows if row.get("status") == "failed" and row.get("error")]
    if broken or ended:
        yield from ("### What did not hold", "")
        yield from (f"- {row['part']}: {row['name']}{_reason(row)}" for row in broken)
        yield from (f"- {row['part']}: {row['error']}" for row in ended)
        yield ""


def _reason(row: Row) -> str:
    return f": {row['value']}" if row.get("value") else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="rows, the newest first; default: benchmarks/gpu_h100*.jsonl",
    )
    args = parser.parse_args(arguments)
    sys.stdout.write(page(args.files or sorted(BENCHMARKS.glob("gpu_h100*.jsonl"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
