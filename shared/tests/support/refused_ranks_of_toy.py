"""Random `[ranks]` tables given to the toy's train command on real ranks, up to where it would
train: for `commands/test_refused_ranks.py`.

Each start of torchrun's agent runs many tables one after the other, in processes that are forked
from this one.
"""

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed as dist
from cases_at_once import launch
from one_rank_of_toy import WORLDS, prepare

from ditkit_core.commands import train
from ditkit_core.config.resolve import resolve
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError
from ditkit_core.run.checks import check_ranks
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.toy import TOY, ToyArch

KEYS = ("shard", "context", "timeout", "shards")
NUMBERS = (1, 1, 2, 2, 3, 4, 6, 8, 0, -1, 10**9, 2.5, '"2"', "true", "[2]")


def write_tables(folder: Path, size: int, num: int) -> list[bool]:
    """Write run files with random tables; whether each fits so many processes."""
    random, fits = Random(size), list[bool]()
    for number in range(num):
        chosen = random.sample(KEYS, random.randint(0, 3))
        table = "".join(f"{key} = {random.choice(NUMBERS)}\n" for key in chosen)
        file = folder / f"{size} {number}.toml"
        file.write_text(f"[ranks]\n{table}[train]\naccumulation = {random.randint(1, 8)}\n")
        try:
            config = resolve(RunConfig, file=file)
            check_ranks(create_run(TOY, config, ToyArch()), size)
            if size % config.ranks.context:
                Ranks(0, size).grouped(config.ranks.context)
            fits.append(True)
        except UserError:
            fits.append(False)
    return fits


def work(folder: Path, name: str) -> None:
    """What a rank does: the exit status of each table."""
    size, _, num = name.partition(" of ")
    rank, statuses = int(os.environ["RANK"]), list[int]()
    with (folder / f"{name} {rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(folder)
    nothing: Any = lambda *given: None
    train._left = lambda jobs: []  # type: ignore[attr-defined]
    train._finish = train.say_results = nothing  # type: ignore[attr-defined]
    for number in range(int(num)):
        # The store keeps why the ranks before a restart ended.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        flags = (f"{size} {number}.toml", "--train.device", "cpu", "--encode.device", "cpu")
        statuses.append(WORLDS[folder].train(f"{size} {number}", 1, *flags))
        if dist.is_initialized():  # a refused run leaves that to the end of its process
            dist.destroy_process_group()
    (folder / f"{name} {rank}.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    into, num = Path(sys.argv[1]), int(sys.argv[2])
    prepare(into)
    found = {}
    for size in (2, 3, 4):
        fits, name = write_tables(into, size, num), f"{size} of {num}"
        ended = launch(work, into, name, num=size)
        found[size] = {"ended": ended, "fits": fits}
    (into / "worlds.json").write_text(json.dumps(found))
