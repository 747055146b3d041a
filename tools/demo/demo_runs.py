"""What the programs that measure a demo share: runs of it by its command, with other prompts, for
each seed."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def parser_of(about: str) -> argparse.ArgumentParser:
    """The parser of such a program; flags that it does not know are passed to the demo. `about` is
    what `--help` says."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--images", type=int, default=6, help="samples of each prompt, before and after training"
    )
    parser.add_argument("--folder", type=Path, help="where to keep the runs")
    return parser


def measure(
    given: tuple[argparse.Namespace, list[str]],
    family: str,
    prompts: Sequence[str],
    head: Callable[[], str],
    rows: Callable[[Path, int], list[str]],
) -> None:
    """Run a family's demo for each seed, and print a table.

    Args:
        given: What the parser found: its options, and the flags of the demo.
        family: The demo is `FAMILY-train --demo`.
        prompts: What is sampled, before and after training.
        head: Measures the judge; returns what is printed before the rows.
        rows: From the folder and seed of a run.
    """
    options, flags = given
    print(head(), flush=True)
    sampled = [
        "--sample.prompts",
        json.dumps(list(prompts)),
        "--sample.images",
        str(options.images),
        *flags,
    ]
    minutes, verdicts = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            folder = (options.folder or Path(temporary)) / f"seed-{seed}"
            took, verdict = run_demo(family, folder, seed, sampled)
            minutes.append(took)
            verdicts.append(f"- seed {seed}: {verdict}")
            print("\n".join(rows(folder, seed)), flush=True)
    each_run = ", ".join(f"{each:.1f}" for each in minutes)
    print("\nWhat each run said at its end:\n\n" + "\n".join(verdicts))
    print(
        f"\nMinutes of each run, with {len(prompts) * options.images} samples before and after: "
        f"{each_run}"
    )


def run_demo(family: str, folder: Path, seed: int, flags: Sequence[str]) -> tuple[float, str]:
    """The demo by its command; returns its minutes and its verdict, which is empty without held-out
    files."""
    command = [
        sys.executable,
        "-c",
        f"from ditkit_{family}.cli import train; raise SystemExit(train())",
        "--demo",
    ]
    command += [
        "--run.folder",
        str(folder),
        "--train.seed",
        str(seed),
        "--sample.seed",
        str(1000 * seed),
        *flags,
    ]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("validation loss")]
    return (time.monotonic() - began) / 60, (verdicts or [""])[-1]
