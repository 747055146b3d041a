"""`train --queue`: adds runs to the queue of this machine, shows and orders it, and works through
it. It needs no model and no torch: each run is trained by its own command in a process of its own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ditkit_core.commands.launch import launch_words, num_processes, program_words
from ditkit_core.commands.options import TYPED, TrainOptions, command_line
from ditkit_core.diagnostics.report.words import format_duration
from ditkit_core.documents.tables import Table
from ditkit_core.errors import UserError
from ditkit_core.io.console import say
from ditkit_core.io.files import json_hash
from ditkit_core.io.nvidia import num_listed_gpus
from ditkit_core.io.run_dir import RunFolder, is_locked
from ditkit_core.io.run_queue import QueuedRun, RunQueue
from ditkit_core.io.run_requests import ask
from ditkit_core.io.signals import Interrupts
from ditkit_core.run.config import RunConfig

POLL_SECONDS = 0.5
"""Time between two looks of a worker at its run and at what it is asked."""
_MOST_KILLS = 2
"""How often a run may be killed without a new save before it counts as failed."""
_TAIL_BYTES = 20_000
"""End of a file of metrics that progress and remaining time are read from."""


def change_queue(config: RunConfig, options: TrainOptions) -> None:
    """Add, move or remove the run of a configuration."""
    queue, folder = RunQueue.of_machine(), config.run_folder
    run = str(folder.path.absolute())
    if options.queue == "remove":
        queue.remove(run)
        say(f"queue:    {run} is removed")
        return
    if options.queue == "move":
        position = queue.move(run, options.position or 0)
    else:
        log = queue.folder / "logs" / f"{folder.name}-{json_hash(run)[:8]}.log"
        entry = QueuedRun(
            run=run,
            command=(*program_words(), *_without_queue(TYPED.get())),
            cwd=os.getcwd(),
            steps=config.train.steps,
            log=str(log),
            group_size=config.ranks.group_size,
        )
        position = queue.add(entry, options.position or 0)
    say(f"queue:    {run} waits at position {position}")
    if not queue.workers():
        indices = ",".join(map(str, range(config.ranks.group_size)))
        on = ("--worker", indices) if config.ranks.group_size > 1 else ()
        start = command_line(Path(sys.argv[0]).stem, "--queue", "start", *on)
        say(f"          no worker trains it yet: {start}")


def work_on_queue(options: TrainOptions) -> int:
    """Do what concerns no single run: list, start, stop, or remove the runs that are complete.
    Returns the exit status."""
    queue = RunQueue.of_machine()
    if options.queue == "list":
        _show(queue)
    elif options.queue == "remove":
        say(f"queue:    {queue.remove_complete()} complete runs are removed")
    elif options.queue in ("stop", "finish"):
        request = "stop" if options.queue == "stop" else "after"
        chosen = options.worker.split(",") if options.worker else ()
        workers = queue.ask_workers(request, chosen)
        if not workers:
            raise UserError("no worker is there to stop; --queue list shows the queue")
        how = "saves its run and ends" if request == "stop" else "ends after its present run"
        say(f"queue:    the worker of GPU {', '.join(workers)} {how}")
    elif options.detach:
        _check_gpus(options.worker)
        _detach(queue, options.worker or "0")
    else:
        _check_gpus(options.worker)
        return _work(queue, options.worker or "0", until_empty=options.until_empty)
    return 0


def _show(queue: RunQueue) -> None:
    """Print the queue as a table."""
    rows = []
    for position, run in enumerate(queue.runs(), 1):
        state = queue.state_of(run)
        alone = " alone" if state == "running" and not queue.has_worker(run.worker) else ""
        gpu = run.worker if state == "running" else ""
        steps, left = progress_of(run, state)
        rows.append((str(position), f"{state}{alone}", run.run, steps, gpu, left, run.error))
    if rows:
        head = ("", "state", "run", "step", "GPU", "left", "error")
        Table(head=head, rows=rows, num_left=len(head)).show()
    else:
        say("the queue is empty; add a run with RUN.toml --queue add")
    workers = queue.workers()
    say(f"workers:  {', '.join(f'GPU {gpu}' for gpu in workers) or 'none (--queue start)'}")


def progress_of(run: QueuedRun, state: str) -> tuple[str, str]:
    """The step that a run in this state is at, of its steps in all, and the time that it still
    takes in words; empty if that is unknown or it is complete."""
    step, steps, seconds = _progress(run)
    left = (steps - step) * seconds
    return f"{step}/{steps}", format_duration(left) if left > 0 and state != "complete" else ""


def _progress(run: QueuedRun) -> tuple[int, int, float]:
    """The step that a run is at, its steps in all, and the seconds of a step. Two experts are
    trained one after the other, and their steps added."""
    folder = RunFolder(Path(run.run))
    experts = [path.parent for path in sorted(folder.path.glob("*/metrics.jsonl"))]
    rows = [_last_rows(RunFolder(path).metrics) for path in experts or [folder.path]]
    step = sum(int(some[-1]["step"]) for some in rows if some)
    seconds = [float(row["seconds"]) for some in rows for row in some if "seconds" in row]
    return step, run.steps * (2 if experts else 1), fmean(seconds) if seconds else 0.0


def _last_rows(metrics: Path) -> list[dict[str, Any]]:
    """The last complete lines of a file of metrics that have a step."""
    with suppress(OSError), open(metrics, "rb") as file:
        size = os.path.getsize(metrics)
        file.seek(max(0, size - _TAIL_BYTES))
        rows = []
        for line in file.read().split(b"\n")[size > _TAIL_BYTES : -1]:
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
        return rows
    return []


def _without_queue(typed: Sequence[str]) -> list[str]:
    """The arguments of a command, without its options of the queue."""
    words, rest = [], iter(typed)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag in ("--queue", "--position"):
            if not equals:
                next(rest)
        else:
            words.append(word)
    return words


def _check_gpus(worker: str) -> None:
    """Refuse a worker of a GPU that this machine has not: its runs would train on the CPU, or fail
    one after the other. Without a driver of NVIDIA the number is not known, and a worker's index is
    a name."""
    present, chosen = num_listed_gpus(), [int(gpu) for gpu in worker.split(",") if gpu.isdecimal()]
    if present and max(chosen, default=0) >= present:
        indices = "0" if present == 1 else f"0 to {present - 1}"
        raise UserError(
            f"--worker {worker}: this machine has {present} GPU{'s' * (present > 1)}; their "
            f"indices are {indices}"
        )


def _detach(queue: RunQueue, worker: str) -> None:
    """Start a worker in a session of its own, which a logout does not end, and wait until it
    works."""
    if queue.has_worker(worker):
        with queue.working(worker):  # raises the error that names it
            pass
    log = queue.folder / f"worker-{worker}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*program_words(), "--queue", "start", "--worker", worker],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    while not queue.has_worker(worker):
        if process.poll() is not None:
            raise UserError(f"the worker ended with status {process.returncode}; see {log}")
        time.sleep(POLL_SECONDS)
    process.returncode = 0  # nobody waits for it, and Python would warn of that
    say(f"queue:    a worker of GPU {worker} works in the background; its output is in {log}")


def _work(queue: RunQueue, worker: str, *, until_empty: bool) -> int:
    """Train the runs of the queue one after the other, until the worker is asked to end."""

    def on_interrupt() -> None:
        say("queue:    the run that is trained saves and waits for the next worker")

    with queue.working(worker) as pending_request, Interrupts(on_interrupt) as signals:
        say(f"queue:    worker of GPU {worker}; --queue stop --worker {worker} ends it")
        while not (signals.requested or pending_request()):
            run = queue.take(worker)
            if run is None:
                if until_empty:
                    break
                time.sleep(POLL_SECONDS)
                continue
            say(f"queue:    training {run.run}; its output is in {run.log}")
            run = _train(run, lambda: signals.requested or pending_request() == "stop")
            queue.put(run)
            say(f"queue:    {run.run} is {run.state}{run.error and ': '}{run.error}")
        return 130 if signals.requested else 0


def _train(run: QueuedRun, is_stopping: Callable[[], bool]) -> QueuedRun:
    """Train a run by its command until that ends, and say what became of it. A command that a
    killed worker has left at work is waited for instead."""
    folder, process, begin = RunFolder(Path(run.run)), None, 0
    if not is_locked(folder.path):
        present, chosen = num_listed_gpus(), run.worker.split(",")
        if present and len(chosen) < run.group_size:
            indices = ",".join(map(str, range(run.group_size)))
            reason = (
                f"ranks.shard or ranks.context needs {run.group_size} GPUs, and this worker has "
                f"{len(chosen)}; start one with --queue start --worker {indices}"
            )
            return replace(run, state="failed", error=reason)
        try:
            process, begin = _started(run)
        except OSError as error:
            reason = f"{run.command[0]} cannot be started: {error.strerror or error}"
            return replace(run, state="failed", error=reason)
    is_told = False
    while is_locked(folder.path) if process is None else process.poll() is None:
        if is_stopping() and not is_told:
            is_told = _told_to_stop(folder, process)
        time.sleep(POLL_SECONDS)
    if process is None:  # its end is not known here: the command says whether it is complete
        return replace(run, state="waiting")
    if process.returncode == 0:
        return replace(run, state="complete", error="", kills=0)
    if is_locked(folder.path):  # another process trains it
        return _train(run, is_stopping)
    if is_stopping():
        return replace(run, state="waiting")
    if process.returncode < 0:
        newest = max((path.name for path in folder.saves()), default="")
        kills = run.kills + 1 if newest == run.newest_save else 1
        reason = f"killed by signal {-process.returncode}"
        if kills < _MOST_KILLS:
            return replace(run, state="waiting", error=reason, kills=kills, newest_save=newest)
        reason += f" {kills} times without a save in between"
        return replace(run, state="failed", error=reason, kills=0)
    if process.returncode == 130:
        return replace(run, state="stopped", error="it was stopped; add it again to continue it")
    return replace(run, state="failed", error=_last_error(run, begin, process.returncode))


def _started(run: QueuedRun) -> "tuple[subprocess.Popen[bytes], int]":
    """Start a run's command on the worker's GPUs, in as many processes as divide it, in a session
    of its own: it outlives the worker, which passes on what it is asked. Also returns where its
    output begins in the log."""
    processes = num_processes(run.group_size, len(run.worker.split(",")))
    log = Path(run.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            launch_words(run.command, processes),
            cwd=run.cwd,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": run.worker},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return process, begin


def _told_to_stop(folder: RunFolder, process: "subprocess.Popen[bytes] | None") -> bool:
    """Tell a run to save and end, as `--tell stop` does; one that does not train yet is
    terminated. False if that has to be tried again."""
    try:
        ask(folder, "stop")
    except UserError:
        if process is None:
            return False
        process.terminate()
    return True


def _last_error(run: QueuedRun, begin: int, status: int) -> str:
    """The last line that a failed command printed into its log from `begin` on, or its last
    error."""
    lines: list[str] = []
    with suppress(OSError), open(run.log, "rb") as file:
        file.seek(max(begin, os.path.getsize(run.log) - 20_000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or [line for line in lines if line] or [f"it ended with status {status}"])[-1]
