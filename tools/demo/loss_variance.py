"""How much the loss differs from step to step with and without `flow.stratified`: `uv run
tools/demo/loss_variance.py`.

It trains a family's demo with a rate so small that no weight changes, so that steps differ by their
samples, noise and noise levels alone, and compares the variance of the steps' loss. Both runs of a
row have the same samples and noise.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from demo_runs import run_demo

MICRO_BATCHES = (2, 4, 8, 16)
FLAGS = ("--optim.lr=1e-30", "--log.every_steps=1", "--sample.prompts=[]", "--held_out.clips=0")


def losses(family: str, folder: Path, count: int, steps: int, *, stratified: bool) -> list[float]:
    """The loss of each step with `count` samples in a step."""
    flags = [
        *FLAGS,
        "--train.batch_size",
        "1",
        "--train.accumulation",
        str(count),
        "--train.steps",
        str(steps),
    ]
    run_demo(family, folder, 0, [*flags, "--flow.stratified", str(stratified).lower()])
    rows = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [row["loss"] for row in rows if "loss" in row]


def main() -> None:
    """Print a row for each family and number of samples in a step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print(
        "| family | samples in a step | mean of the loss, stratified / not | its standard "
        "deviation | ratio of the variances |"
    )
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for family in ("wan", "flux2"):
            for count in MICRO_BATCHES:
                stratified, plain = (
                    losses(
                        family,
                        Path(temporary) / f"{family}-{count}-{kind}",
                        count,
                        options.steps,
                        stratified=kind,
                    )
                    for kind in (True, False)
                )
                means = " / ".join(
                    f"{statistics.fmean(sample):.4f}" for sample in (stratified, plain)
                )
                deviations = " / ".join(
                    f"{statistics.stdev(sample):.4f}" for sample in (stratified, plain)
                )
                ratio = statistics.variance(stratified) / statistics.variance(plain)
                print(f"| {family} | {count} | {means} | {deviations} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
