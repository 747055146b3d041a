"""Runs a program that measures what a demo teaches, for one seed."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from workspace import ROOT


def check_taught(program: Sequence[str], images: int, folder: Path) -> None:
    """Assert that what is new is right after training alone, what was known before and after, and
    that the loss fell by a fifth.

    Args:
        program: A program of tools/demo, and its arguments.
        images: Samples of each prompt.
        folder: Where the run is kept.
    """
    command = [
        sys.executable,
        str(ROOT / "tools" / "demo" / program[0]),
        *program[1:],
        "--seeds",
        "0",
        "--images",
        str(images),
    ]
    command += ["--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [
        line.strip("| ").split(" | ")
        for line in done.stdout.splitlines()
        if line.startswith("| 0 ")
    ]
    right = {(row[1], row[2]): int(row[4].removesuffix(" %")) for row in rows}
    assert right["new", "before"] <= 10 and right["new", "after"] >= 80
    assert right["known", "before"] >= 80 and right["known", "after"] >= 80
    lines = (folder / "seed-0" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [record["held_out"] for record in map(json.loads, lines) if "held_out" in record]
    assert held_out[-1] <= 0.8 * held_out[0]
