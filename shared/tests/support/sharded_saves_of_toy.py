"""What the ranks do for `distributed/test_sharded_checkpoint.py`: full fine-tunes whose saves are
written while they train."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from ditkit_core.distributed import sharded_checkpoint
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError
from ditkit_core.testing.replicas import STEPS, CountedRanks, Divided, Replicas, forked
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.training import trainer

NAME = "full"
WRITE = sharded_checkpoint.write_part
Part = sharded_checkpoint.Part


def train(
    folder: Path, ranks: Ranks, *, name: str = NAME, shard: int = 2, steps: int = STEPS
) -> Any:
    whole = Replicas(
        TOY,
        ToyArch(dim=32, depth=2),
        toy_items(6, ragged=True),
        folder,
        (name,),
        Divided(ranks.size, shard),
    )
    ranks.shard = shard
    return whole.train(name, ranks, steps=steps, into="run")


def plain(folder: Path, ranks: Ranks) -> list[tuple[int, float]]:
    """Ranks in each process group that this rank made, and seconds that an exchange in it may take;
    the group of the test is none of them."""
    ranks.grouped(2)  # as for `ranks.context`
    train(folder, ranks)
    groups = set(distributed_c10d._world.pg_map) - {distributed_c10d._get_default_group()}
    of_cpu = torch.device("cpu")
    return sorted(
        (group.size(), group._get_backend(of_cpu).options._timeout.total_seconds())
        for group in groups
    )


def adapter(folder: Path, ranks: Ranks, *, steps: int = STEPS) -> Any:
    """Three ranks have two, two and none of the four rows of a factor."""
    return train(folder, ranks, name="lora, five micro-batches", shard=3, steps=steps)


def slow(folder: Path, ranks: Ranks) -> bool:
    """Whether the fourth step began before the save after the third was written."""
    begun, seen, count = threading.Event(), list[bool](), [0]
    step = trainer.training_step

    def counting(*given: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] == 4:
            begun.set()
        return step(*given, **named)

    def waiting(into: Path, part: Part, ranks: Ranks) -> Any:
        seen.append(begun.wait(60))
        return WRITE(into, part, ranks)

    trainer.training_step = counting  # type: ignore[attr-defined]
    sharded_checkpoint.write_part = waiting
    train(folder, ranks)
    return seen == [True, True]


def full_disk(folder: Path, ranks: Ranks) -> str:
    """What each rank says when the second one cannot write its part of the second save."""

    def failing(path: Path, shapes: Any, tensor_of: Callable[[str], Tensor], metadata: Any) -> None:
        if ranks.rank == 1 and len(list((folder / "run" / "state").glob("step-*"))) == 1:
            raise OSError(28, "No space left on device")
        WRITE_FILE(path, shapes, tensor_of, metadata)

    sharded_checkpoint.write_safetensors = failing
    try:
        train(folder, ranks)
    except UserError as error:
        return str(error)
    return ""


WRITE_FILE = sharded_checkpoint.write_safetensors


def killed(folder: Path, ranks: Ranks) -> None:
    """The second rank is killed once its part of the second save is written, before anybody else
    knows."""

    def dying(path: Path, shapes: Any, tensor_of: Callable[[str], Tensor], metadata: Any) -> None:
        WRITE_FILE(path, shapes, tensor_of, metadata)
        if ranks.rank == 1 and (folder / "run" / "state" / "step-000003").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    sharded_checkpoint.write_safetensors = dying
    train(folder, ranks)


def alone(rank: int, num: int, folder: Path) -> None:
    """A rank whose group is lost."""
    meeting = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num)
    killed(folder, CountedRanks(rank, num))


def kill(folder: Path) -> list[int | None]:
    """The exit codes of two ranks, one of which is killed."""
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=alone, args=(rank, 2, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    into = Path(sys.argv[1])
    made = {
        name: forked(num, partial(work, into / name), into / name)
        for name, num, work in (
            ("plain", 4, plain),
            ("adapter", 3, adapter),
            ("slow", 2, slow),
            ("full disk", 2, full_disk),
        )
    }
    for name, num, work in (("plain", 4, train), ("adapter", 3, adapter)):
        run = into / f"{name} in halves"
        forked(num, partial(work, run, steps=STEPS // 2), run)
        forked(num, partial(work, run), run / "second half")
    print(json.dumps({**made, "codes": kill(into / "killed")}))
