"""The queue of this machine: runs of all families in the order in which they are trained, in a JSON
file that a person can read and, while no command writes it, change.

Only locks of the operating system say who works: the lock of a worker's folder, and the lock that
each run has on its own folder. They go with their process, kill -9 included, so that nothing has to
be cleaned up. A run that is `running` in the file without a worker's lock was left by a worker that
was killed: the next worker takes it again, and the run continues from its last save.

Tried and not used: huey 3.5 pickles tasks and forgets the one that a killed worker had begun;
persist-queue 1.1 gave 3 of 200 items to both of two processes; neither can change the order.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import sleep
from typing import Any, Literal

from filelock import FileLock

from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path, read_text, write_text
from ditkit_core.io.run_dir import RunFolder, is_locked, locked

RunState = Literal["waiting", "running", "complete", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """A run in the queue."""

    run: str
    """Its folder, absolute, which stands for it: a run is in the queue once."""
    command: tuple[str, ...]
    """The words of the command that trains it."""
    cwd: str
    """The folder that the command starts in, where its relative paths begin."""
    steps: int
    """Optimizer steps that it has in all."""
    log: str
    """File with the command's output."""
    group_size: int = 1
    """Processes that divide its weights or tokens: a multiple of so many trains it, with a GPU
    each."""
    state: RunState = "waiting"
    worker: str = ""
    """Indices of the GPUs of the worker that trains it, or did."""
    error: str = ""
    """Why it failed, in a line."""
    kills: int = 0
    """How often it was killed since its last save."""
    newest_save: str = ""
    """The newest save when it was killed."""


class RunQueue:
    """The queue in a folder, which any number of processes read and change."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._file = folder / "queue.json"

    @classmethod
    def of_machine(cls) -> "RunQueue":
        """The queue of this user's runs."""
        return cls(local_path("~") / ".ditkit" / "queue")

    def runs(self) -> list[QueuedRun]:
        """The runs in their order."""
        if not self._file.exists():
            return []
        names = {field.name for field in fields(QueuedRun)}
        try:
            entries: list[dict[str, Any]] = json.loads(read_text(self._file))["runs"]
            present = [{k: v for k, v in entry.items() if k in names} for entry in entries]
            return [QueuedRun(**{**entry, "command": tuple(entry["command"])}) for entry in present]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self._file} is damaged ({' '.join(str(error).split())}); correct it, or remove "
                f"it and add the runs again"
            ) from error

    @contextmanager
    def changing(self) -> Iterator[list[QueuedRun]]:
        """The runs as a list that the block changes, and that is written at its end; other
        processes wait meanwhile."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / ".queue.lock"):
                runs = self.runs()
                before = list(runs)
                yield runs
                if runs != before:
                    text = json.dumps({"runs": [asdict(run) for run in runs]}, indent=1)
                    write_text(self._file, text + "\n")
        except OSError as error:
            raise UserError(f"cannot write in {self.folder}: {error.strerror or error}") from error

    def add(self, run: QueuedRun, position: int = 0) -> int:
        """Add a run, at a position among those that wait (from 1; 0: the last). One that ended is
        put in again. Returns the position.

        Raises:
            UserError: If it waits or runs already.
        """
        with self.changing() as runs:
            present = _index(runs, run.run)
            if present is not None:
                if (state := self.state_of(runs[present])) in ("waiting", "running"):
                    raise UserError(f"{run.run} is in the queue already: it is {state}")
                del runs[present]
            return _insert(runs, run, position)

    def move(self, run: str, position: int) -> int:
        """Move a run that waits to a position, as `add`."""
        with self.changing() as runs:
            index = self._there(runs, run)
            if (state := self.state_of(runs[index])) != "waiting":
                raise UserError(f"{run} is {state}; only a run that waits can be moved")
            return _insert(runs, replace(runs.pop(index), state="waiting"), position)

    def remove(self, run: str) -> None:
        """Remove a run that does not run; its folder stays."""
        with self.changing() as runs:
            index = self._there(runs, run)
            if self.state_of(runs[index]) == "running":
                raise UserError(
                    f"{run} is running; stop it first (--tell stop with its --run), then remove it"
                )
            del runs[index]

    def remove_complete(self) -> int:
        """Remove the runs that are complete, and return their number."""
        with self.changing() as runs:
            left = [run for run in runs if run.state != "complete"]
            num_removed = len(runs) - len(left)
            runs[:] = left
        return num_removed

    def _there(self, runs: Sequence[QueuedRun], run: str) -> int:
        if (index := _index(runs, run)) is None:
            raise UserError(f"{run} is not in the queue; --queue list shows which runs are")
        return index

    def take(self, worker: str) -> QueuedRun | None:
        """The next run for a worker, which has its lock; the run is `running` from now on. None if
        no run waits."""
        gpus = set(worker.split(","))
        with self.changing() as runs:
            for index, run in enumerate(runs):
                shares_gpu = bool(gpus & set(run.worker.split(",")))
                if run.state == "running" and (shares_gpu or not self.has_worker(run.worker)):
                    # Left by a worker that was killed. If its command goes on, on GPUs of another
                    # worker, that one waits for it.
                    if is_locked(Path(run.run)) and not shares_gpu:
                        continue
                elif run.state != "waiting" or is_locked(Path(run.run)):
                    continue
                runs[index] = replace(run, state="running", worker=worker, error="")
                return runs[index]
        return None

    def put(self, run: QueuedRun) -> None:
        """Write what became of a run, unless it was removed meanwhile."""
        with self.changing() as runs:
            if (index := _index(runs, run.run)) is not None:
                runs[index] = run

    def state_of(self, run: QueuedRun) -> RunState:
        """The state of a run now: one whose process and whose worker were killed waits again."""
        is_trained = run.state == "running" and (
            self.has_worker(run.worker) or is_locked(Path(run.run))
        )
        return "waiting" if run.state == "running" and not is_trained else run.state

    def position_of(self, run: str) -> int:
        """The position of a run among those that wait, from 1; 0 if it does not wait."""
        waiting = [entry.run for entry in self.runs() if self.state_of(entry) == "waiting"]
        return waiting.index(run) + 1 if run in waiting else 0

    def worker_folder(self, gpu: str) -> Path:
        """The folder of the worker of a GPU, which it locks."""
        return self.folder / f"worker-{gpu}"

    def workers(self) -> list[str]:
        """The GPUs that have a worker."""
        names = [path.name.removeprefix("worker-") for path in self.folder.glob("worker-*")]
        return sorted(filter(self.has_worker, names))

    def has_worker(self, worker: str) -> bool:
        """Whether a process works for one of these GPUs."""
        return any(is_locked(self.worker_folder(gpu)) for gpu in worker.split(","))

    @contextmanager
    def working(self, worker: str) -> Iterator[Callable[[], str]]:
        """Be the worker of some GPUs, whose indices are separated by commas.

        Yields:
            Returns how the worker is asked to end: `stop`, `after` the present run, or empty.
        """
        folders = [self.worker_folder(gpu) for gpu in sorted(set(worker.split(",")))]
        with ExitStack() as stack:
            for folder in folders:
                stack.enter_context(_locked_soon(folder))
                for request in _REQUESTS:
                    (folder / request).unlink(missing_ok=True)  # of a worker that has ended

            def pending_request() -> str:
                return next(
                    (word for word in _REQUESTS for folder in folders if (folder / word).exists()),
                    "",
                )

            yield pending_request

    def ask_workers(self, request: str, gpus: Collection[str] = ()) -> list[str]:
        """Ask the workers of these GPUs, or all, to end: `stop` has their run saved and stopped,
        `after` ends them after their present run. Returns the GPUs."""
        workers = [gpu for gpu in self.workers() if not gpus or gpu in gpus]
        for gpu in workers:
            (self.worker_folder(gpu) / request).touch()
        return workers


_REQUESTS = ("stop", "after")


@contextmanager
def _locked_soon(folder: Path) -> Iterator[None]:
    """Lock a worker's folder; another process may have its lock for a moment, to see whether
    somebody has it."""
    with ExitStack() as stack:
        for attempt in range(10):
            try:
                stack.enter_context(locked(folder))
                break
            except UserError as error:
                if attempt == 9:
                    who = RunFolder(folder).owner() or "unknown"
                    raise UserError(
                        f"GPU {folder.name.removeprefix('worker-')} has a worker already ({who}); "
                        f"stop it with --queue stop"
                    ) from error
                sleep(0.1)
        yield


def _index(runs: Sequence[QueuedRun], run: str) -> int | None:
    return next((index for index, entry in enumerate(runs) if entry.run == run), None)


def _insert(runs: list[QueuedRun], run: QueuedRun, position: int) -> int:
    """Insert a run at a position among those that wait, and return it."""
    waiting = [index for index, entry in enumerate(runs) if entry.state == "waiting"]
    position = min(position or len(waiting) + 1, len(waiting) + 1)
    runs.insert(waiting[position - 1] if position <= len(waiting) else len(runs), run)
    return position
