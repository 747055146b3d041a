"""How much the page in the browser slows down a run: CPU seconds of the training process for the
same steps of a demo, alone and with the page Run open in a browser, which asks every second.

    uv run --group dev tools/bench/bench_page.py --pairs 3 --steps 400

Both are done in turn, each in a new process, because a machine is not equally fast at all times.

Or how long a plan takes after a change of one key, as the page's process plans it, with what it has
measured for the file before the change:

    uv run --group dev tools/bench/bench_page.py --plans zimage/base_lora wan/t2v_14b_lora
"""

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from urllib.parse import urlencode

import torch

from ditkit_core.planner.measurement_cache import keep_measurements
from ditkit_ui import work

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ui" / "tests" / "support"))

from served_page import launched, opened, served

CHANGES = (
    "--optim.lr=3e-4",
    "--data.height=640 --data.width=640",
    "--train.batch_size=2",
    "--train.checkpointing=attn_only",
    "--base.quantize=int8",
    "--adapter.rank=24",
    "--adapter.method=loha",
    "--ema.decay=0.99",
    "--sample.height=896 --sample.width=896",
    "--optim.name=adamw8bit",
)
PROGRAM = Path(sys.executable).with_name("zimage-train")


def flags(steps: int) -> list[str]:
    """A demo with nothing but steps, on one thread."""
    return [
        "--demo",
        "--run.folder=run",
        f"--train.steps={steps}",
        "--train.threads=1",
        "--held_out.clips=0",
        "--held_out.every_steps=0",
        "--sample.prompts=[]",
        "--sample.captions=0",
        "--sample.every_steps=0",
        f"--save.every_steps={steps}",
    ]


@contextmanager
def page_of(folder: Path) -> Iterator[None]:
    """The page Run of the run, open in a browser."""
    with served(folder) as site, launched() as browser, opened(site, browser) as page:
        query = urlencode({"file": str(folder / "run.toml"), "family": "zimage"})
        page.goto(f"{site.url.partition('?')[0]}run?{query}")
        page.get_by_role("button", name="Start").wait_for()
        yield


def cpu_seconds(steps: int, *, with_page: bool) -> float:
    """Of a run's process, from its start to its end."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        words = [str(PROGRAM), *flags(steps)]
        text = subprocess.run([*words, "--changed"], cwd=folder, check=True, capture_output=True)
        (folder / "run.toml").write_bytes(text.stdout)
        with page_of(folder) if with_page else nullcontext():
            # Not `wait` of subprocess: the usage is of this process alone.
            process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0, f"the run ended with {process.returncode}"
    return usage.ru_utime + usage.ru_stime


def plan_seconds(run: str) -> Iterator[tuple[str, float]]:
    """CPU seconds of the plan of a preset (`family/name`) for a GPU with 24 GiB, and after each
    change of it."""
    family, _, name = run.partition("/")
    file = str(ROOT / "packages" / family / "configs" / f"{name}.toml")
    for change in ("", "", *CHANGES):
        begin = process_time()
        arguments = [file, "--plan", "--json", "--gpus=24GiB", *change.split()]
        answer = work.command(family, "train", arguments)
        assert answer["status"] in (0, 3), answer["err"]  # 3: it does not fit
        yield change, process_time() - begin


def print_plans(runs: Sequence[str]) -> None:
    """Print a row for each change, and a column for each preset."""
    torch.set_num_threads(1)
    keep_measurements()
    gc.freeze()
    columns = [list(plan_seconds(run)) for run in runs]
    names = " | ".join(runs)
    print(f"| change | {names} |\n|---|{'---:|' * len(runs)}")
    for number, row in enumerate(zip(*columns, strict=True)):
        name = ("the first plan", "none")[number] if number < 2 else row[0][0].replace("--", "")
        seconds = " | ".join(f"{seconds:.1f}" for _, seconds in row)
        print(f"| {name} | {seconds} |")


def main() -> None:
    """Print a row for each pair, and the median of what the page costs; or the plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plans", nargs="+", default=[])
    options = parser.parse_args()
    if options.plans:
        print_plans(options.plans)
        return
    ratios = []
    print("| pair | alone, CPU s | with the page, CPU s | more |\n|---|---:|---:|---:|")
    for pair in range(options.pairs):
        alone = cpu_seconds(options.steps, with_page=False)
        watched = cpu_seconds(options.steps, with_page=True)
        ratios.append(watched / alone - 1)
        print(f"| {pair + 1} | {alone:.1f} | {watched:.1f} | {ratios[-1]:+.1%} |", flush=True)
    print(f"\nmedian {median(ratios):+.1%}, {options.steps} steps of the demo of Z-Image")


if __name__ == "__main__":
    main()
