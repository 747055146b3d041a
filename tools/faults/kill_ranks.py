"""SIGKILLs of random ranks at random moments, and the comparison with a run of one process that was
never disturbed.

    # 50 kills, 15 or more of them inside a save; half an hour
    uv run tools/faults/kill_ranks.py > benchmarks/kill_ranks_cpu.md
    uv run tools/faults/kill_ranks.py --kills 4 --inside 1 --steps 100 --ranks 3
    uv run tools/faults/kill_ranks.py --families wan flux2 zimage --methods lora full --kills 8 \\
        --inside 2 --steps 60

torchrun starts a family's demo again after each kill (--max-restarts), and it continues from its
last save. The last save's index has the digests of weights, optimizer state, average and metrics,
and must be that of the undisturbed run. Each kill needs some steps: a run that ends before all
kills is a failure, too, and wants more of them.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ditkit_core.testing.ranks import process_of_rank

FLAGS = (
    "--save.every_steps", "4", "--save.keep_last", "3", "--train.threads", "1",
    "--sample.every_steps", "0",
    "--sample.prompts", "[]", "--sample.captions", "0", "--held_out.clips", "0",
    "--log.tensorboard", "false", "--ema.decay", "0.9",
)  # fmt: skip


METHODS = {
    "lora": (),
    "full": ("--adapter.method", "full", "--optim.lr", "1e-4", "--export.forms", '["diffusers"]'),
}
CAPTION = {"lora": "adapters", "full": "all weights"}
FAMILIES = ("wan", "flux2", "zimage")


def main() -> int:
    """Run and kill; the exit status is 1 if the runs differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="of each kind of run")
    parser.add_argument(
        "--inside", type=int, default=15, help="at least so many of them while a save is written"
    )
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=["wan"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["lora"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("# Kills of random ranks, on a CPU")
    return max(
        [kill_run(family, method, args) for family in args.families for method in args.methods]
    )


def kill_run(family: str, method: str, args: argparse.Namespace) -> int:
    """Kill a family's demo on ranks; prints the kills, and returns 1 if something is not as it
    should be."""
    with tempfile.TemporaryDirectory() as temporary:
        one, several = Path(temporary) / "one", Path(temporary) / "several"
        train = [
            "-m",
            f"ditkit_{family}.train",
            "--demo",
            *FLAGS,
            *METHODS[method],
            "--train.steps",
            str(args.steps),
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([sys.executable, *train, "--run.folder", str(one)], check=True, **quiet)
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(args.ranks),
            "--max-restarts",
            str(args.kills + 1),
        ]
        process = subprocess.Popen(
            [sys.executable, *torchrun, *train, "--run.folder", str(several)], **quiet
        )
        rows = kill(process, several / "state", args)
        status = process.wait()
        same = status == 0 and index(one, args.steps) == index(several, args.steps)
    print(f"\n## {family}, {CAPTION[method]}, {args.ranks} ranks, {args.steps} steps\n")
    print("| rank | save that the run had | inside a save |\n|---|---|---|")
    print(
        "\n".join(f"| {rank} | {step} | {'yes' if inside else ''} |" for rank, step, inside in rows)
    )
    inside = sum(inside for _, _, inside in rows)
    verdict = "bitwise that" if same else "NOT that"
    print(
        f"\n{len(rows)} kills, {inside} inside a save; torchrun ended with {status}; the last save "
        f"is {verdict} of one process that was never disturbed.",
        flush=True,
    )
    return int(not same or len(rows) < args.kills or inside < args.inside)


def kill(
    process: "subprocess.Popen[bytes]", state: Path, args: argparse.Namespace
) -> list[tuple[int, str, bool]]:
    """Kill ranks until enough are killed or the run is over; each with the newest save, and whether
    one was being written."""
    chance, rows = random.Random(args.seed), list[tuple[int, str, bool]]()
    while len(rows) < args.kills and process.poll() is None:
        before, left = newest(state), args.kills - len(rows)
        missing = args.inside - sum(inside for *_, inside in rows)
        # Each start gets a little further: until a save is being written, or for a time after it
        # has begun to save.
        inside, patience = chance.random() < max(0.4, missing / left), chance.uniform(0, 3)
        while process.poll() is None and newest(state) == before:
            time.sleep(0.005)
        end = time.monotonic() + patience
        while process.poll() is None and (
            not is_saving(state) if inside else time.monotonic() < end
        ):
            time.sleep(0.0005)
        rank = chance.randrange(args.ranks)
        if (found := process_of_rank(rank, process.pid)) is not None:
            saving = is_saving(state)
            os.kill(found, signal.SIGKILL)
            rows.append((rank, newest(state), saving))
    return rows


def newest(state: Path) -> str:
    """The name of the newest save."""
    return max((path.name for path in state.glob("step-*")), default="none")


def is_saving(state: Path) -> bool:
    """Whether a save is being written."""
    return any(state.glob(".step-*.tmp"))


def index(run: Path, step: int) -> object:
    """The index of the last save."""
    return json.loads((run / "state" / f"step-{step:06d}" / "state.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
