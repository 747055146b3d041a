"""SIGKILLs of random ranks at random moments, many of them inside a save, while torchrun starts the
toy's train command again after each.

python shared/tests/support/killed_ranks_of_toy.py FOLDER KILLS INSIDE    # writes FOLDER/kills.json
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from threading import Event, Thread

import torch
from cases_at_once import launch
from one_rank_of_toy import FLAGS, WORLDS, prepare

FLAGS_OF_KILLS = (
    *FLAGS, "--save.every_steps", "2", "--save.keep_last", "2", "--held_out.clips", "0",
    "--sample.prompts", "[]", "--sample.captions", "0",
)  # fmt: skip
PATIENCE = 0.2
"""Seconds from the first save of a start until a kill, at most."""


def train(folder: Path, name: str) -> None:
    """What a rank does."""
    rank = os.environ["RANK"]
    (folder / f"{name} {rank}.pid").write_text(str(os.getpid()))
    with (folder / f"{name} {rank}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    sys.exit(WORLDS[folder].train(name, int(os.environ["STEPS"]), *FLAGS_OF_KILLS))


class Killer(Thread):
    """Kills a rank after each start of them has saved, until it has killed often enough."""

    def __init__(self, folder: Path, kills: int, inside: int):
        super().__init__(daemon=True)
        self.folder, self.kills, self.inside = folder, kills, inside
        self.rows: list[tuple[int, str, bool]] = []
        """Of each kill: the rank, the newest save, and whether one was being written."""
        self.over = Event()

    def run(self) -> None:
        chance, state = random.Random(0), self.folder / "killed" / "state"
        while len(self.rows) < self.kills and not self.over.is_set():
            before, missing = newest(state), self.inside - sum(inside for *_, inside in self.rows)
            inside = chance.random() < max(0.5, missing / (self.kills - len(self.rows)))
            rank, patience = chance.randrange(2), chance.uniform(0, PATIENCE)
            while newest(state) == before and not self.over.is_set():
                time.sleep(0.005)
            end = time.monotonic() + patience
            while (
                not (is_saving(state) if inside else time.monotonic() > end)
                and not self.over.is_set()
            ):
                time.sleep(0.0005)
            if self.over.is_set():
                return
            saving = is_saving(state)
            os.kill(int((self.folder / f"killed {rank}.pid").read_text()), signal.SIGKILL)
            self.rows.append((rank, newest(state), saving))


def newest(state: Path) -> str:
    """The name of the newest save."""
    return max((path.name for path in state.glob("step-*")), default="")


def is_saving(state: Path) -> bool:
    """Whether a save is being written."""
    return any(state.glob(".step-*.tmp"))


if __name__ == "__main__":
    folder, kills, inside = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    prepare(folder)
    killer = Killer(folder, kills, inside)
    killer.start()
    # Each start takes at least two steps; on a busy computer many more, until the killer sees a
    # save while it is written. What is left after the last kill is trained undisturbed.
    steps = 8 * kills + 100
    os.environ["STEPS"] = str(steps)
    ended = launch(train, folder, "killed", restarts=kills + 1)
    killer.over.set()
    killer.join()
    alone = launch(train, folder, "alone", num=1)
    (folder / "kills.json").write_text(
        json.dumps({"killed": ended, "alone": alone, "rows": killer.rows, "steps": steps})
    )
