"""Runs as their folders show them, and starting them: each is a command of its own session, which
goes on when the page ends."""

import json
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.commands.launch import launch_words
from ditkit_core.diagnostics.report.data import read_sections
from ditkit_core.diagnostics.report.server import last_lines
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import ListedSample, RunFolder, is_locked, listed_samples
from ditkit_core.io.run_queue import RunQueue
from ditkit_ui import texts

OUTPUT = ".started.log"
"""What a command prints that the page started, in the run's folder; hidden, because a folder with
other files is no new run's."""
SHEET_OUTPUT = ".sheet.log"
"""The same of the command that makes a sheet."""
_STARTED: dict[Path, "subprocess.Popen[bytes]"] = {}
"""The commands that this page started: training by the run's folder, sheets by their output."""
_STARTING = threading.Lock()
"""A button that is pressed twice starts one command."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run does now."""

    kind: str
    """A key of `texts.STATES`."""
    step: int = 0
    position: int = 0
    """In the queue, among those that wait, from 1; 0 if it does not wait."""

    @property
    def text(self) -> str:
        """A line about it."""
        return texts.STATES[self.kind].format(step=self.step, position=self.position)

    @property
    def is_alive(self) -> bool:
        """Whether a process works on it."""
        return self.kind in ("starting", "running")


def run_state(folder: RunFolder) -> RunState:
    """The state of a run, by the files in its folder and the commands that this page started."""
    started = _STARTED.get(folder.path.resolve())
    status = started.poll() if started else None
    if is_locked(folder.path):
        return RunState(kind="running", step=last_step(folder))
    if started and status is None:
        return RunState(kind="starting")
    step = last_step(folder)
    if position := RunQueue.of_machine().position_of(str(folder.path.absolute())):
        return RunState(kind="waiting", step=step, position=position)
    if (completed := folder.completed_step()) is not None and not status:
        return RunState(kind="complete", step=completed)
    if folder.owner() or (status is not None and status < 0):
        return RunState(kind="killed", step=step)  # who ends by itself takes its name out
    if status not in (None, 0, 130):
        return RunState(kind="failed", step=step)
    is_new = not folder.config_file.exists()
    return RunState(kind="new") if is_new else RunState(kind="stopped", step=step)


def last_step(folder: RunFolder) -> int:
    """The last step with a logged number, of the expert that trains if there are several."""
    steps = [0]
    for metrics in (folder.metrics, *folder.path.glob("*/metrics.jsonl")):
        for line in last_lines(metrics):  # of a long file the end alone: this is asked every second
            with suppress(ValueError, TypeError, AttributeError):
                steps.append(int(json.loads(line).get("step", 0)))
    return max(steps)


def runs_below(folders: Sequence[Path]) -> list[RunFolder]:
    """The runs in `runs/` of some folders, the newest first."""
    times = {
        file.parent.resolve(): file.stat().st_mtime
        for folder in folders
        for file in folder.glob("runs/*/config.toml")
    }
    return [RunFolder(path) for path in sorted(times, key=times.__getitem__, reverse=True)]


def program(family: str, name: str) -> str:
    """The command of a family, in the environment that this page runs in."""
    scripts = sysconfig.get_path("scripts")
    path = shutil.which(f"{family}-{name}", path=scripts) or shutil.which(f"{family}-{name}")
    if path is None:
        raise UserError(
            f"there is no program {family}-{name} in {scripts}; install ditkit-{family}"
        )
    return path


def start_run(family: str, file: Path, folder: RunFolder, processes: int = 1) -> None:
    """Start or continue the run of a run file, as the command in a shell would, in so many
    processes.

    Raises:
        UserError: If it runs already, or cannot be started.
    """
    with _STARTING:
        if run_state(folder).is_alive:
            raise UserError(f"{folder.path} runs already")
        arguments = [program(family, "train"), str(file)]
        words = launch_words(arguments, processes)
        _STARTED[folder.path.resolve()] = _start(words, folder.path / OUTPUT)


def _start(arguments: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
    """Start a command in a session of its own, which goes on when the page ends, with its output in
    a file."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "wb") as file:
            return subprocess.Popen(
                list(arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
    except OSError as error:
        raise UserError(f"cannot start in {output.parent}: {error.strerror or error}") from error


def leave_to_queue(folder: RunFolder) -> None:
    """Forget how a command ended that this page started, and what it printed: from now on the
    queue's worker trains the run."""
    if not run_state(folder).is_alive:
        _STARTED.pop(folder.path.resolve(), None)
        (folder.path / OUTPUT).unlink(missing_ok=True)


def start_sheet(family: str, folder: RunFolder, arguments: Sequence[str]) -> None:
    """Start the command that makes a sheet of a run's saves, or goes on with it.

    Raises:
        UserError: If one makes a sheet of this run already, or it cannot be started.
    """
    output = (folder.path / SHEET_OUTPUT).resolve()
    with _STARTING:
        if sheet_status(folder) == "running":
            raise UserError(f"a sheet of {folder.path} is made already")
        _STARTED[output] = _start([program(family, "sample"), *arguments], output)


def sheet_status(folder: RunFolder) -> str:
    """Whether the command for a sheet that this page started is `running`, `done` or `failed`;
    `none` if it started none."""
    started = _STARTED.get((folder.path / SHEET_OUTPUT).resolve())
    status = started.poll() if started else None
    if started is None or status is None:
        return "running" if started else "none"
    return "failed" if status else "done"


def last_output(folder: RunFolder) -> list[str]:
    """The last lines of the command that trains it."""
    return last_lines(folder.path / OUTPUT) or last_lines(folder.log)


def samples_by_step(folder: RunFolder) -> Mapping[int, list[ListedSample]]:
    """The samples that were generated while it trained."""
    lists = sorted(folder.samples.glob("step-*.json"))
    steps = {int(path.stem.removeprefix("step-")): listed_samples(path) for path in lists}
    return {
        step: [sample for sample in samples if sample.file.is_file()]
        for step, samples in steps.items()
    }


def saved_steps(folder: RunFolder) -> list[int]:
    """The steps of a run's saves, and of those of its experts."""
    saves = [*folder.state.glob("step-*"), *folder.path.glob("*/state/step-*")]
    return sorted({int(save.name.removeprefix("step-")) for save in saves})


def best_step(folder: RunFolder) -> int | None:
    """The step with the lowest validation loss after the start; None if it was not measured."""
    sections = read_sections(folder.path)
    measured = sections[0].series.get("held_out") if sections else None
    later = (
        [(v, s) for s, v in zip(measured.steps, measured.values, strict=True) if s]
        if measured
        else []
    )
    return min(later)[1] if later else None


def run_program(family: str, command: str, arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Call a command and wait for it; its exit status, and at least one line: what it printed."""
    done = subprocess.run(
        [program(family, command), *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return done.returncode, lines or [texts.ENDED.format(status=done.returncode)]
