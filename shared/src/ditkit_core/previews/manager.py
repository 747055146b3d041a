"""Previews drawn on a device that does not train, by a process of its own, while training goes on.

All that training waits for is that the weights are copied into a file of the queue. One process at a time draws what waits there
(`worker.py`); it draws the files one after the other and ends when none is left, so that the model is loaded once as long as
there is something to do. It ends with its parent, however that ends: its standard input is a pipe from the parent, which the operating
system closes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ditkit_core.engine.devices import choose_device, per_device
from ditkit_core.errors import Interrupted, UserError, printable
from ditkit_core.io.console import say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.signals import Interrupts
from ditkit_core.models.spec import Expert
from ditkit_core.previews.queue import DRAWS, Preview, drop_after, named, put, tidy, waiting
from ditkit_core.previews.stages import trained_weights_in, why_no_samples
from ditkit_core.run.context import RunContext
from ditkit_core.run.expert_runs import runs_of, saved_step

GRACE_SECONDS = 20.0
"""What the drawing process is given to end by itself."""
_LOOK_SECONDS = 0.2
_TAIL_CHARACTERS = 4096


@contextmanager
def previews_of(
    run: RunContext, folder: RunFolder, on_drawn: Callable[[Path], object], *, trains: bool = True
) -> Iterator["Previews | None"]:
    """Draw a run's previews on `sample.device` for as long as the block lasts, beginning with those that were left from before.

    Args:
        run: The run; of several experts, that of all.
        folder: Its folder, which this process holds, with its configuration stored.
        on_drawn: Called with each folder whose samples changed, when all are drawn.
        trains: Whether the run goes on from its latest save, so that what waits of later steps is not of its course; else all is drawn.

    Yields:
        What takes the previews; None if they are drawn where the model is trained.
    """
    if trains:
        _drop_abandoned(run, folder.pending)
    if not run.config.sample.device:
        if left := len(waiting(folder.pending)):
            warn(f"previews that wait in {folder.pending}: {left}; set sample.device to draw them, or remove them")
        yield None
        return
    every_steps = run.config.sample.every_steps if run.config.sample.prompts or run.config.sample.captions else 0
    if lacking := why_no_samples(run):
        warn(f"no previews: {lacking}")
        every_steps = 0
    with Previews(run, folder, every_steps, on_drawn) as previews:
        yield previews


def generate_left(run: RunContext, folder: RunFolder, on_drawn: Callable[[Path], object]) -> None:
    """Draw the previews of a complete run that are still to be drawn; `on_drawn` as for `previews_of`."""
    if not waiting(folder.pending):
        return
    with previews_of(run, folder, on_drawn, trains=False) as previews:
        if previews is not None:
            previews.wait()


def _drop_abandoned(run: RunContext, pending: Path) -> None:
    """Remove what waits of steps after the latest save, from which training goes on: it takes these steps again."""
    experts = {named(path)[0] for path in waiting(pending)}
    saved: dict[str, int] = {}
    for each in runs_of(run):
        name = "" if each.expert is None else each.expert.name
        if name in experts:  # else no save is read for nothing
            step = saved_step(each, lambda _: None)  # training says it
            saved[name] = -1 if step is None else step
    try:
        drop_after(pending, saved)
    except OSError as error:
        warn(f"a preview of weights that are trained anew stays in {pending}: {error.strerror or error}")


class Previews:
    """The previews of a run and the process that draws them.

    Attributes:
        every_steps: Optimizer steps between two of them; 0 for none.
    """

    def __init__(self, run: RunContext, folder: RunFolder, every_steps: int, on_drawn: Callable[[Path], object]):
        self.every_steps = every_steps
        self._run, self._folder, self._on_drawn = run, folder, on_drawn
        self._device = choose_device(run.config.sample.device, "sample.device")
        self._child: subprocess.Popen[bytes] | None = None
        self._failed: set[str] = set()
        self._log_start = 0

    def __enter__(self) -> Self:
        tidy(self._folder.pending)
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the drawing process if it is at work; what it has not drawn stays in the queue."""
        child, self._child = self._child, None
        if child is None:
            return
        _close(child)
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def taker(self, expert: Expert | None = None) -> Callable[[int, Mapping[str, Tensor]], None]:
        """What has previews drawn while one transformer trains. What hinders it costs a warning, never the run.

        The saves of the other experts are read here, once: they do not change meanwhile.

        Args:
            expert: Which one trains; None if the model has one transformer.

        Returns:
            A function of the optimizer step and what is trained, by canonical name, as it is to be drawn with; written before it returns.
        """
        saved: dict[str, int] = {}
        if expert is not None and self.every_steps:
            try:
                trained = trained_weights_in(self._run, without=expert)[0]
            except UserError as error:
                warn(f"no previews of the {expert.name} expert: {error}")
                return lambda step, weights: None
            saved = {name: each.step for name, each in trained.items() if each.step is not None}

        def take(step: int, weights: Mapping[str, Tensor]) -> None:
            self._look()
            try:
                asked = Preview(step=step, expert="" if expert is None else expert.name, others=saved)
                put(self._folder.pending, asked, weights)
            except UserError as error:
                warn(f"no preview of step {step}: {error}")
            self._start()

        return take

    def wait(self) -> None:
        """Wait until everything is drawn that can be.

        Raises:
            Stopped: If a signal ended it early.
        """
        self._look()
        self._start()
        if self._child is not None:
            say(f"waiting for {len(self._left())} previews that {self._device} draws ({self._folder.previews_log})")
        with Interrupts() as interrupts:
            while self._child is not None:
                if interrupts.requested:
                    raise Interrupted(
                        f"stopped with {len(self._left())} previews not drawn, which wait in {self._folder.pending}; the same command "
                        "draws them"
                    )
                with suppress(subprocess.TimeoutExpired):
                    self._child.wait(_LOOK_SECONDS)
                self._look()
                self._start()
        for path in {self._folder.path, *(Path(each.config.run.folder) for each in runs_of(self._run))}:
            self._on_drawn(path)
        if left := len(waiting(self._folder.pending)):
            warn(f"previews not drawn: {left}, in {self._folder.pending}; the same command tries again")

    def _left(self) -> list[Path]:
        """What waits and was not tried in vain."""
        return [path for path in waiting(self._folder.pending) if path.name not in self._failed]

    def _start(self) -> None:
        """Start the process if there is something to draw and none is at work."""
        if self._child is not None or not self._left():
            return
        devices = self._run.devices
        streamed = 0
        if self._device.type != "cpu":  # as many blocks as training streams: what does not fit there does not fit here
            streamed = sum(per_device(self._run.config.train.swap_blocks, len(devices), "train.swap_blocks"))
        command = [sys.executable, "-P", "-m", "ditkit_core.previews.worker", self._run.spec.import_path]
        command += [str(self._folder.path), self._device.type, str(streamed), *sorted(self._failed)]
        try:
            with open(self._folder.previews_log, "ab") as log:
                self._log_start = log.tell()
                # The pipe ends the child: the operating system closes it with this process, whatever ends that.
                self._child = subprocess.Popen(
                    command, env=_environment(self._device), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True, creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )  # fmt: skip
        except OSError as error:
            warn(f"previews wait: no process to draw them could be started ({error.strerror or error})")

    def _look(self) -> None:
        """Take note of a process that has ended."""
        child = self._child
        if child is None or child.poll() is None:
            return
        _close(child)
        self._child = None
        if child.returncode:
            self._note_failure(child.returncode)

    def _note_failure(self, status: int) -> None:
        """Leave out what a process failed at, so that the next one does not fail at it again: all that waits, if it came to no file."""
        begun, words = self._said()
        left = [path.name for path in self._left()]
        if begun in left:
            self._failed.add(begun)
            what, stays = f"preview {begun} was not drawn", "it stays"
        else:
            self._failed.update(left)
            what, stays = f"previews that were not drawn: {len(left)}", "they stay"
        warn(
            f"{what} (status {status}): {words}; {stays} in {self._folder.pending}, and all that the process said is in "
            f"{self._folder.previews_log}"
        )

    def _said(self) -> tuple[str, str]:
        """Which file the process began last, empty if none, and its last words."""
        begun, words = "", "it said nothing"
        try:
            with open(self._folder.previews_log, "rb") as log:
                log.seek(self._log_start)
                for line in log:
                    text = line.decode("utf-8", "replace").strip()
                    if found := re.fullmatch(f"process [0-9]+{DRAWS}(.+)", text):
                        begun = found[1]
                    words = text[-_TAIL_CHARACTERS:] or words
        except OSError:
            return begun, "its log cannot be read"
        return begun, printable(words)


def visible_devices(device: torch.device, environment: Mapping[str, str]) -> str:
    """`CUDA_VISIBLE_DEVICES` of a process that is to see one device alone, and so can touch no memory of another.

    Args:
        device: As this process counts devices.
        environment: Of this process, which may see some of them only.
    """
    if device.type == "cpu":
        return ""
    index, seen = device.index or 0, environment.get("CUDA_VISIBLE_DEVICES")
    return str(index) if seen is None else seen.split(",")[index].strip()


def _environment(device: torch.device) -> dict[str, str]:
    """What the process finds: the one device, and our modules wherever this process has them from."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": visible_devices(device, os.environ),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _close(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
