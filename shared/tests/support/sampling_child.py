"""Stands in for the process that draws previews: what is said of the parent needs no second start
of Python."""

import io
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import ModelSpec
from ditkit_core.previews.queue import queued
from ditkit_core.previews.worker import generate_waiting

Behaviour = Literal["draws", "fails", "goes on", "is interrupted"]


class Child(subprocess.Popen):  # type: ignore[type-arg]  # generic for type checkers alone
    """Draws in this process when it is waited for; or has failed at once; or goes on until the pipe
    to it is closed, even while this process is sent SIGTERM."""

    _child_created = False  # nothing to wait for when this object is deleted
    streamed = 0
    """Blocks that are streamed where they are sampled, even if none would be on a CPU."""

    def __init__(
        self,
        spec: ModelSpec,
        behaviour: Behaviour,
        command: list[str],
        stdout: Any,
        environment: dict[str, str],
    ):
        self.spec, self.behaviour, self.command, self.environment = (
            spec,
            behaviour,
            command,
            environment,
        )
        self.stdin: Any = io.BytesIO()
        self.returncode: Any = None
        if behaviour == "fails":
            folder, _, _, *left_out = self._arguments
            first = next(
                file.name
                for file in queued(RunFolder(Path(folder)).pending)
                if file.name not in left_out
            )
            stdout.write(
                f"process 7 generates {first}\ndrawing\nerror: no room on this device\n\n".encode()
            )
            stdout.flush()
            self.returncode = 1

    @property
    def _arguments(self) -> list[str]:
        return self.command[self.command.index(self.spec.import_path) + 1 :]

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.behaviour == "draws":
            folder, device, streamed, *left_out = self._arguments
            generate_waiting(
                self.spec, Path(folder), device, self.streamed or int(streamed), left_out
            )
            self.returncode = 0
        elif self.stdin.closed:
            self.returncode = 130
        else:
            if self.behaviour == "is interrupted":
                signal.raise_signal(signal.SIGTERM)
            raise subprocess.TimeoutExpired(self.command, timeout or 0)
        return self.returncode


@contextmanager
def children(spec: ModelSpec, behaviour: Behaviour) -> Iterator[list[Child]]:
    """All that are started while the block lasts."""
    started: list[Child] = []

    def start(command: list[str], **given: Any) -> Child:
        started.append(Child(spec, behaviour, command, given["stdout"], given["env"]))
        return started[-1]

    with patch("ditkit_core.io.worker_process.subprocess.Popen", start):
        yield started
