"""Generates previews on a device that does not train, in a separate process, while training
continues.

Training only waits until the weights are copied into a file of the queue. One worker process at a
time (`worker.py`) generates the previews of the queue's files, one after the other. It ends when
none is left, so the model stays loaded as long as there is work. The worker also ends with its
parent, however the parent ends: its standard input is a pipe from the parent, which the operating
system closes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from torch import Tensor

from ditkit_core.config.sizes import per_device
from ditkit_core.engine.devices import choose_device
from ditkit_core.errors import Interrupted, UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.signals import Interrupts
from ditkit_core.io.worker_process import WorkerProcess
from ditkit_core.previews.queue import GENERATES, Preview, drop_after, named, put, queued
from ditkit_core.previews.stages import trained_weights_in, why_no_samples
from ditkit_core.run.jobs import Jobs

_LOOK_SECONDS = 0.2


@contextmanager
def previews_of(
    jobs: Jobs, folder: RunFolder, on_written: Callable[[Path], object], *, trains: bool = True
) -> Iterator["Previews | None"]:
    """Generate a run's previews on `sample.device` while the context is open, beginning with those
    left in the queue.

    Args:
        folder: Its folder, locked by this process, with the configuration stored.
        on_written: Called with each folder whose samples changed, after all previews are generated.
        trains: Whether training continues from the latest save. Then previews of later steps are
            dropped, because these steps are repeated; else all previews in the queue are generated.

    Yields:
        The object that takes the previews; None if they are generated on the devices that train.
    """
    run = jobs.run
    if trains:
        _drop_abandoned(jobs, folder.pending)
    if not run.config.sample.device:
        if num_queued := len(queued(folder.pending)):
            warn(
                f"{num_queued} previews wait in {folder.pending}; set sample.device to generate "
                f"them, or remove the files"
            )
        yield None
        return
    every_steps = run.config.sample.preview_steps
    if obstacle := why_no_samples(run.config.model, run.experts):
        warn(f"no previews: {obstacle}")
        every_steps = 0
    with Previews(jobs, folder, every_steps, on_written) as previews:
        yield previews


def generate_left(jobs: Jobs, folder: RunFolder, on_written: Callable[[Path], object]) -> None:
    """Generate the previews of a complete run that are left in its queue; `on_written` as for
    `previews_of`."""
    if not queued(folder.pending):
        return
    with previews_of(jobs, folder, on_written, trains=False) as previews:
        if previews is not None:
            previews.wait()


def _drop_abandoned(jobs: Jobs, pending: Path) -> None:
    """Remove previews of steps after the latest save: training continues from there and repeats
    these steps."""
    experts = {named(path)[0] for path in queued(pending)}
    saved: dict[str, int] = {}
    for job in jobs:
        # reading a save takes time, so only for experts that have previews in the queue
        if job.name in experts:
            # no warning about a broken save here: training gives it
            step = job.saved_step(lambda _: None)
            saved[job.name] = -1 if step is None else step
    try:
        drop_after(pending, saved)
    except OSError as error:
        warn(f"could not remove an outdated preview in {pending}: {error.strerror or error}")


class Previews:
    """The previews of a run and the process that generates them.

    Attributes:
        every_steps: Optimizer steps between two of them; 0 for none.
    """

    def __init__(
        self, jobs: Jobs, folder: RunFolder, every_steps: int, on_written: Callable[[Path], object]
    ):
        self.every_steps = every_steps
        self._jobs, self._run, self._folder, self._on_written = jobs, jobs.run, folder, on_written
        self._device = choose_device(self._run.config.sample.device, "sample.device")
        self._child: WorkerProcess | None = None
        self._failed: set[str] = set()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        """End the worker if it is running; unfinished previews stay in the queue."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def queued(self, step: int, expert: str) -> Path:
        """The file that a preview has in the queue; arguments as of `Preview`."""
        return self._folder.pending / Preview(step=step, expert=expert).file_name

    def saves_of_others(self, expert: str) -> dict[str, int] | None:
        """The step of the latest save of each expert but one, which trains; None, after a warning,
        if a save cannot be read."""
        try:
            trained = (
                trained_weights_in(self._jobs, without=expert)[0]
                if expert and self.every_steps
                else {}
            )
        except UserError as error:
            warn(f"no previews of the {expert} expert: {error}")
            return None
        return {name: weights.step for name, weights in trained.items() if weights.step is not None}

    def take(self, preview: Preview, weights: Mapping[str, Tensor]) -> None:
        """Queue a preview of trained parameters by canonical name; they are written before this
        returns. A failure is only a warning."""
        self._look()
        try:
            put(self._folder.pending, preview, weights)
        except UserError as error:
            warn(f"no preview of step {preview.step}: {error}")
        self._start()

    def wait(self) -> None:
        """Wait until all previews are generated, except those that failed.

        Raises:
            Interrupted: If a signal ended it early.
        """
        self._look()
        self._start()
        if self._child is not None:
            say(
                f"waiting for {len(self._left())} previews from {self._device} "
                f"({self._folder.previews_log})"
            )
        with Interrupts() as interrupts:
            while self._child is not None:
                if interrupts.requested:
                    raise Interrupted(
                        f"stopped with {len(self._left())} previews left in "
                        f"{self._folder.pending}; the same command generates them"
                    )
                self._child.wait(_LOOK_SECONDS)
                self._look()
                self._start()
        for path in {self._folder.path, *(job.folder.path for job in self._jobs)}:
            self._on_written(path)
        if num_queued := len(queued(self._folder.pending)):
            warn(
                f"previews not generated: {num_queued}, in {self._folder.pending}; the same "
                f"command tries again"
            )

    def _left(self) -> list[Path]:
        """The files of the queue that have not failed yet."""
        return [path for path in queued(self._folder.pending) if path.name not in self._failed]

    def _start(self) -> None:
        """Start the worker if previews are left and none is running."""
        if self._child is not None or not self._left():
            return
        devices = self._run.devices
        streamed = 0
        # As many blocks as training streams: the model may not fit without it here either.
        if self._device.type != "cpu":
            streamed = sum(
                per_device(self._run.config.train.swap_blocks, len(devices), "train.swap_blocks")
            )
        arguments = [
            self._run.spec.import_path,
            str(self._folder.path),
            self._device.type,
            str(streamed),
            *sorted(self._failed),
        ]
        try:
            self._child = WorkerProcess(
                "ditkit_core.previews.worker", arguments, self._folder.previews_log, self._device
            )
        except OSError as error:
            warn(
                f"previews wait: the process that generates them could not be started "
                f"({error.strerror or error})"
            )

    def _look(self) -> None:
        """Check whether the worker has ended. The file that it failed at is skipped from then on;
        if it began none, all of them."""
        if self._child is None or (status := self._child.status()) is None:
            return
        child, self._child = self._child, None
        if not status:
            return
        begun, waiting = _last_begun(child), [path.name for path in self._left()]
        is_one = begun in waiting
        self._failed.update([begun] if is_one else waiting)
        failure = (
            f"preview {begun} was not generated"
            if is_one
            else f"previews not generated: {len(waiting)}"
        )
        warn(
            f"{failure} (status {status}): {child.last_words()}; "
            f"{'it stays' if is_one else 'they stay'} in {self._folder.pending}, and the "
            f"output of the process is in {self._folder.previews_log}"
        )


def _last_begun(child: WorkerProcess) -> str:
    """The file that the worker began last; empty if none."""
    begun = ""
    with suppress(OSError):  # `last_words` says so
        for text in child.output():
            if match := re.fullmatch(f"process [0-9]+{GENERATES}(.+)", text):
                begun = match[1]
    return begun
