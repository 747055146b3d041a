"""Runs a program that measures what a demo teaches, for one seed."""

import subprocess
import sys

from workspace import ROOT


def check_taught(program: str, images: int) -> None:
    """Assert that what is new is right after training alone, and what was known before and after.

    Args:
        program: Of tools/.
        images: Samples of each prompt.
    """
    command = [sys.executable, str(ROOT / "tools" / program), "--seeds", "0", "--images", str(images)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| 0 ")]
    right = {(row[1], row[2]): int(row[4].removesuffix(" %")) for row in rows}
    assert right["new", "before"] <= 10 and right["new", "after"] >= 80
    assert right["known", "before"] >= 80 and right["known", "after"] >= 80
