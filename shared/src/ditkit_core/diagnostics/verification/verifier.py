"""Has the exports of a run verified while it trains, and says what came out.

A run on GPUs has it done by a process of its own on the host (`worker.py`), and its next steps do
not wait. On a CPU that process would take the cores that train, so it is done in between.
"""

from typing import Self

import torch

from ditkit_core.diagnostics.verification.exported import (
    current_results,
    is_finished,
    read_results,
    unverified,
)
from ditkit_core.diagnostics.verification.verify import verify_waiting
from ditkit_core.errors import Interrupted, UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.signals import Interrupts
from ditkit_core.io.worker_process import WorkerProcess
from ditkit_core.run.context import RunContext

_LOOK_SECONDS = 0.2


class Verifier:
    """Verifies the exports of one transformer."""

    def __init__(self, run: RunContext, folder: RunFolder, *, apart: bool | None = None):
        """Verify in a process of its own (`apart`), by default where the run trains on GPUs."""
        self._run, self._folder = run, folder
        self._apart = (
            any(device.type != "cpu" for device in run.devices) if apart is None else apart
        )
        self._worker: WorkerProcess | None = None
        self._given_up: set[str] = set()
        self._said = read_results(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the worker if it is running; what it has not verified is verified when the run
        continues."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    @property
    def is_busy(self) -> bool:
        """Whether a process was started whose end is still to be noted."""
        return self._worker is not None

    def start(self) -> None:
        """Begin with the exports that wait, unless it is going on; a failure is a warning and never
        stops the run."""
        self.look()
        if self._worker is not None or not self._left():
            return
        skipped = sorted(self._given_up)
        try:
            if self._apart:
                arguments = [self._run.spec.import_path, str(self._folder.path), *skipped]
                log = self._folder.verification_log
                self._worker = WorkerProcess(
                    "ditkit_core.diagnostics.verification.worker",
                    arguments,
                    log,
                    torch.device("cpu"),
                )
                return
            verify_waiting(self._run, self._folder, skipped)
        except (UserError, OSError) as error:
            self._give_up(str(error))
        self.look()

    def look(self) -> None:
        """Print the results that are new, and note whether the worker has ended."""
        status = None if self._worker is None else self._worker.status()
        results = read_results(self._folder)
        for name, result in results.items():
            if self._said.get(name) == result:
                continue
            if result.agrees:
                say(f"verified: {result.line}")
            elif not is_finished(self._folder, name):
                # that of the finished model ends the run with an error
                warn(f"not what was trained: {result.line}")
        self._said = results
        if status is not None and self._worker is not None:
            worker, self._worker = self._worker, None
            if status:
                self._give_up(
                    f"{worker.last_words()} (status {status}; {self._folder.verification_log})"
                )

    def wait(self) -> None:
        """Wait until all exports are verified.

        Raises:
            Interrupted: If a signal ended it early.
        """
        self.start()
        if self._worker is not None:
            say(f"waiting until exports are verified ({self._folder.verification_log})")
        with Interrupts() as interrupts:
            while self._worker is not None:
                if interrupts.requested:
                    raise Interrupted(
                        "stopped while exports are verified; the same command continues"
                    )
                self._worker.wait(_LOOK_SECONDS)
                self.look()
                # another export may have come after it looked for the last time
                if self._worker is None:
                    self.start()
        for name, result in current_results(self._folder).items():
            if not result.agrees and is_finished(self._folder, name):
                raise UserError(result.line)

    def _left(self) -> list[str]:
        return [export.name for export in unverified(self._folder, self._given_up)]

    def _give_up(self, reason: str) -> None:
        """Leave the exports that wait alone for the rest of this start."""
        if not (left := self._left()):  # it failed after it had verified all of them
            return
        self._given_up.update(left)
        warn(f"not verified: {', '.join(left)}: {reason}")
