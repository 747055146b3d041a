"""Several ranks for tests: a script started once in each of a few processes, that talk over gloo::

    # my_ranks.py
    if __name__ == "__main__":
        as_rank(lambda: {"sum": ...})

    # test_my_ranks.py
    tables = run_ranks(Path(__file__).with_name("my_ranks.py"), folder=tmp_path)

Starting costs seconds, most of them imports, so a script runs many cases and returns one table, and
tests assert on its entries.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ditkit_core.testing.scripts import start


class RanksFailed(AssertionError):
    """The ranks that failed, with the output of each."""


def run_ranks(
    script: Path,
    *arguments: str,
    folder: Path,
    num: int = 2,
    seconds: float = 280.0,
    grace: float = 5.0,
) -> list[Any]:
    """Run a script that calls `as_rank` in `num` processes.

    Args:
        script: A Python file.
        arguments: Its command line.
        folder: Empty or new; where the ranks meet, and where they write.
        num: How many.
        seconds: How long they may take.
        grace: Seconds that the others have to end by themselves once one has failed; they may be
            waiting for it.

    Returns:
        What the work of each rank returned.

    Raises:
        RanksFailed: If one fails or takes too long; none is left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[BaseProcess] = []
    try:
        for rank in range(num):
            variables = {
                "RANK": str(rank), "WORLD_SIZE": str(num), "RANKS_FOLDER": str(folder),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            }  # fmt: skip
            log = _log(folder, rank)
            processes.append(start(script, *arguments, out=log, err=log, variables=variables))
        late = _wait(processes, seconds, grace)
    finally:
        for process in processes:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    if late or any(codes):
        ending = f"not done after {seconds:g} s" if late else f"ended with {codes}"
        outputs = (
            f"rank {rank}: {_log(folder, rank).read_text(errors='replace')[-4000:]}"
            for rank in range(num)
        )
        raise RanksFailed("\n".join([f"{script.name}: {ending}", *outputs]))
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(num)]


def _wait(processes: Sequence[BaseProcess], seconds: float, grace: float) -> bool:
    """Wait until all have ended, or one has failed and the others had their grace; whether time ran
    out."""
    end = time.monotonic() + seconds
    failed = False
    while any(process.exitcode is None for process in processes):
        if time.monotonic() > end:
            return not failed
        if not failed and any(process.exitcode for process in processes):
            failed, end = True, min(end, time.monotonic() + grace)
        time.sleep(0.02)
    return False


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def run_ranks_once(script: Path, *arguments: str, base: Path) -> list[Any]:
    """The same, once in a run of tests for each list of arguments.

    Args:
        base: As for `once`.
    """
    return once(
        base,
        "_".join((script.stem, *arguments)),
        lambda folder: run_ranks(script, *arguments, folder=folder),
    )


def once(base: Path, name: str, make: Callable[[Path], Any]) -> Any:
    """The result of a work that is done once in a run of tests, by whichever of its processes asks
    first.

    Args:
        base: pytest's folder for this run (`tmp_path_factory.getbasetemp()`); the folders of
            pytest-xdist's workers are in the run's.
        name: Of the work, unique in the run.
        make: Does it, in a new folder; returns what JSON can hold.

    Raises:
        AssertionError: What the work failed with, in every process that asks.
    """
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    table = folder / "tables.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not table.exists():
            try:
                outcome: Any = {"made": make(folder / "work")}
            except AssertionError as error:
                outcome = {"failed": str(error)}
            table.write_text(json.dumps(outcome))
        stored = json.loads(table.read_text())
    if "failed" in stored:
        raise AssertionError(stored["failed"])
    return stored["made"]


def as_rank(work: Callable[[], Any]) -> None:
    """In a script: join the other ranks, do the work with one thread, and hand its result to
    `run_ranks`.

    Args:
        work: Returns what JSON can hold.
    """
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    num = int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["RANKS_FOLDER"])
    with joined(rank, num, folder):
        (folder / f"rank_{rank}.json").write_text(json.dumps(work()))


@contextmanager
def joined(rank: int, num: int, folder: Path) -> Iterator[None]:
    """Inside the block this process is one of `num` ranks that meet in a folder; all leave it
    together."""
    meeting = f"file://{folder / 'store'}"
    # As long as a script has: one rank may be slow on a machine that does much else.
    limit = timedelta(seconds=280)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num, timeout=limit)
    yield
    dist.barrier()  # the others may still be reading from this one
    dist.destroy_process_group()


def process_of_rank(rank: int, parent: int) -> int | None:
    """The process of a rank that torchrun, `parent`, started; None if there is none now. Needs
    /proc."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            match = re.search(r"^PPid:\s*(\d+)", status.read_text(), re.MULTILINE)
            environment = status.with_name("environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if match and int(match[1]) == parent and f"RANK={rank}".encode() in environment:
            return int(status.parent.name)
    return None
