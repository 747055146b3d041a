"""SIGKILLs of random ranks at random moments, and the comparison with a run of one process that was never disturbed.

    uv run tools/faults/kill_ranks.py > benchmarks/kill_ranks_cpu.md     # 50 kills, 15 or more of them inside a save; half an hour
    uv run tools/faults/kill_ranks.py --kills 4 --inside 1 --steps 100 --ranks 3

torchrun starts Wan's demo again after each kill (--max-restarts), and it continues from its last save. The last save's index has the digests of
weights, optimizer state, average and metrics, and must be that of the undisturbed run. Each kill needs some steps: a run that ends before all
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
    "--save.every_steps", "4", "--save.keep_last", "3", "--train.threads", "1", "--sample.every_steps", "0",
    "--sample.prompts", "[]", "--sample.captions", "0", "--held_out.clips", "0", "--log.tensorboard", "false", "--ema.decay", "0.9",
)  # fmt: skip


def main() -> int:
    """Run and kill; the exit status is 1 if the runs differ."""
    parser = argparse.ArgumentParser(description="Kill random ranks at random moments.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inside", type=int, default=15, help="at least so many of them while a save is written")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        one, several = Path(temporary) / "one", Path(temporary) / "several"
        train = ["-m", "ditkit_wan.train", "--demo", *FLAGS, "--train.steps", str(given.steps), "--run.folder"]
        subprocess.run([sys.executable, *train, str(one)], check=True, stdout=sys.stderr)
        started = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(given.ranks),
            "--max-restarts",
            str(given.kills + 1),
        ]
        process = subprocess.Popen(
            [*started, *train, str(several)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        rows = kill(process, several / "state", given)
        status = process.wait()
        same = status == 0 and index(one, given.steps) == index(several, given.steps)
    print(
        f"# Kills of random ranks, on a CPU\n\n`uv run tools/faults/kill_ranks.py --kills {given.kills} --inside {given.inside} --steps {given.steps} --ranks {given.ranks} --seed {given.seed}`:\n"
    )
    print("| rank | save that the run had | inside a save |\n|---|---|---|")
    print("\n".join(f"| {rank} | {step} | {'yes' if inside else ''} |" for rank, step, inside in rows))
    inside = sum(each for _, _, each in rows)
    print(f"\n{len(rows)} kills, {inside} inside a save; torchrun ended with {status}; the last save is {'bitwise that' if same else 'NOT that'} "
          "of one process that was never disturbed.")  # fmt: skip
    return int(not same or len(rows) < given.kills or inside < given.inside)


def kill(process: "subprocess.Popen[bytes]", state: Path, given: argparse.Namespace) -> list[tuple[int, str, bool]]:
    """Kill ranks until enough are killed or the run is over; each with the newest save, and whether one was being written."""
    chance, rows = random.Random(given.seed), list[tuple[int, str, bool]]()
    while len(rows) < given.kills and process.poll() is None:
        before, left = newest(state), given.kills - len(rows)
        missing = given.inside - sum(inside for *_, inside in rows)
        # Each start gets a little further: until a save is being written, or for a time after it has begun to save.
        inside, patience = chance.random() < max(0.4, missing / left), chance.uniform(0, 3)
        while process.poll() is None and newest(state) == before:
            time.sleep(0.005)
        end = time.monotonic() + patience
        while process.poll() is None and (not is_saving(state) if inside else time.monotonic() < end):
            time.sleep(0.0005)
        rank = chance.randrange(given.ranks)
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
