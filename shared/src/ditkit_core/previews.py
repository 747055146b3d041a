"""Previews drawn on a device that does not train, by a process of its own, while training goes on.

All that training waits for is that the weights are copied into a file of the queue. One process at a time draws what waits there
(`preview_process.py`); it draws the files one after the other and ends when none is left, so that the model is loaded once as long as
there is something to do. It ends with its parent, however that ends: its standard input is a pipe from the parent, which the operating
system closes.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ditkit_core.console import say, warn
from ditkit_core.devices import choose_device, spread
from ditkit_core.errors import Stopped, UserError, printable
from ditkit_core.expert_runs import runs_of, trained_in, what_drawing_lacks
from ditkit_core.interrupts import Interrupts
from ditkit_core.model import Expert
from ditkit_core.preview_queue import Preview, put, tidy, waiting
from ditkit_core.report_page import write_report
from ditkit_core.run import Run
from ditkit_core.run_folder import RunFolder

GRACE_SECONDS = 20.0
"""What the drawing process is given to end by itself."""
_LOOK_SECONDS = 0.2
_TAIL_BYTES = 4096


@contextmanager
def previews_of(run: Run, folder: RunFolder) -> Iterator["Previews | None"]:
    """Draw a run's previews on `sample.device` for as long as the block lasts, beginning with those that were left from before.

    Args:
        run: The run; of several experts, that of all.
        folder: Its folder, which this process holds, with its configuration stored.

    Yields:
        What takes the previews; None if they are drawn where the model is trained.
    """
    if not run.config.sample.device:
        if left := len(waiting(folder.pending)):
            warn(f"previews that wait in {folder.pending}: {left}; set sample.device to draw them, or remove them")
        yield None
        return
    every_steps = run.config.sample.every_steps if run.config.sample.prompts or run.config.sample.captions else 0
    if lacking := what_drawing_lacks(run):
        warn(f"no previews: {lacking}")
        every_steps = 0
    with Previews(run, folder, every_steps) as previews:
        yield previews


def draw_left(run: Run, folder: RunFolder) -> None:
    """Draw the previews of a complete run that are still to be drawn, and write its report anew."""
    if not waiting(folder.pending):
        return
    with previews_of(run, folder) as previews:
        if previews is not None:
            previews.wait()


class Previews:
    """The previews of a run and the process that draws them.

    Attributes:
        every_steps: Optimizer steps between two of them; 0 for none.
    """

    def __init__(self, run: Run, folder: RunFolder, every_steps: int):
        self.every_steps = every_steps
        self._run, self._folder = run, folder
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

    def put(self, step: int, weights: Mapping[str, Tensor], expert: Expert | None = None) -> None:
        """Have a preview drawn. What hinders it costs a warning, never the run.

        Args:
            step: The optimizer step.
            weights: What is trained, by canonical name, as it is to be drawn with; written before this returns.
            expert: Whose weights they are; None if the model has one transformer.
        """
        self._look()
        try:
            put(self._folder.pending, self._preview(step, expert), weights)
        except UserError as error:
            warn(f"no preview of step {step}: {error}")
        self._start()

    def wait(self) -> None:
        """Wait until everything is drawn that can be, and write the reports of the run anew.

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
                    raise Stopped(
                        f"stopped with {len(self._left())} previews not drawn, which wait in {self._folder.pending}; the same command "
                        "draws them"
                    )
                with suppress(subprocess.TimeoutExpired):
                    self._child.wait(_LOOK_SECONDS)
                self._look()
                self._start()
        for path in {self._folder.path, *(Path(each.config.run.folder) for each in runs_of(self._run))}:
            write_report(path)
        if self._failed:
            warn(f"previews not drawn: {len(self._failed)}, in {self._folder.pending}; the same command tries again")

    def _preview(self, step: int, expert: Expert | None) -> Preview:
        if expert is None:
            return Preview(step=step)
        saved = {name: each.step for name, each in trained_in(self._run)[0].items() if name != expert.name}
        return Preview(
            step=step, expert=expert.name, others={name: save for name, save in saved.items() if save is not None}
        )

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
            streamed = sum(spread(self._run.config.train.swap_blocks, len(devices), "train.swap_blocks"))
        command = [sys.executable, "-P", "-m", "ditkit_core.preview_process", self._run.spec.found_at]
        command += [str(self._folder.path), self._device.type, str(streamed), *sorted(self._failed)]
        try:
            with open(self._folder.previews_log, "ab") as log:
                self._log_start = log.tell()
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
            name = next((path.name for path in self._left()), "")
            self._failed.add(name)
            warn(
                f"preview {name} was not drawn (status {child.returncode}): {self._last_line()}; it stays in {self._folder.pending}, "
                f"and all that the process said is in {self._folder.previews_log}"
            )

    def _last_line(self) -> str:
        with open(self._folder.previews_log, "rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").split("\n")
        return printable(next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing"))


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
