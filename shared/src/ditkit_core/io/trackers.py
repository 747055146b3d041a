"""Programs that show a run while it trains: TensorBoard, wandb, trackio.

metrics.jsonl has every number that they get. So a tracker that fails is dropped with one line, and
training goes on.
"""

import importlib.util
import io
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ditkit_core.errors import MissingDependency, UserError, given_to_library
from ditkit_core.io.console import say
from ditkit_core.io.files import json_part, write_text
from ditkit_core.io.run_dir import RunFolder, listed_samples

TIMES = "seconds/"
"""Prefix of the times of a step's parts among metrics."""

_INIT_SECONDS, _FINISH_SECONDS = 30.0, 60.0
"""Without a network wandb would wait longer before training, and without end after it; what is not
uploaded stays in the run's folder."""


class Tracker(Protocol):
    """What a run's numbers are given to."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""

    def close(self, *, failed: bool) -> None:
        """Log what is left, and end."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as a tracker shows it."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The configuration by dotted key, without folders of this machine."""


def check_installed(tracker: str, package: str) -> None:
    """Refuse a tracker whose library is missing, without importing it.

    Args:
        tracker: `log.tracker`.
        package: The distribution that has the extra.
    """
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise MissingDependency(
            f'log.tracker = "{tracker}" needs the library {tracker}: uv sync --extra {tracker} in a checkout, else '
            f'uv pip install "{package}[{tracker}]"; or leave log.tracker out'
        )


class Trackers:
    """The trackers of a run; none of them ends it."""

    def __init__(self, warn: Callable[[str], None]):
        """Begin without any; `warn` is called with one line for each that fails."""
        self._warn = warn
        self._open: dict[str, Tracker] = {}

    def add(self, name: str, make: Callable[[], Tracker]) -> None:
        """Open a tracker; the line about its failure begins with `name`."""
        self._unless_it_fails(name, lambda: self._open.update({name: make()}))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._call_all(lambda tracker: tracker.write(step, values))

    def close(self, *, failed: bool) -> None:
        """Close all of them."""
        self._call_all(lambda tracker: tracker.close(failed=failed))

    def _call_all(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            self._unless_it_fails(name, lambda tracker=tracker: act(tracker))  # type: ignore[misc]

    def _unless_it_fails(self, name: str, act: Callable[[], None]) -> None:
        try:
            # Whatever a library raises: no curve is worth hours of training.
            with given_to_library("it failed", "it gets no more numbers"):
                try:
                    act()
                except OSError as error:  # a full disk says enough by itself
                    raise UserError(error.strerror or str(error)) from error
        except UserError as error:
            self._warn(f"{name}: {error}; the run goes on, and its numbers are in metrics.jsonl")
            self._open.pop(name, None)


class TensorBoard:
    """A file of scalars for TensorBoard.

    torch's SummaryWriter writes the same in a thread, where a full disk is a traceback on stderr
    and an error of a later call.
    """

    def __init__(self, folder: Path, start_step: int):
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        self._path = (
            folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        )
        # The files are append-only; a session that starts hides entries from its step on.
        first = start_step + 1 if start_step else 0
        self._append(step=first, file_version="brain.Event:2")
        self._append(step=first, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(step=step, summary=Summary(value=scalars))

    def close(self, *, failed: bool) -> None:
        """Nothing is left open."""

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        with open(self._path, "ab") as file:
            RecordWriter(file).write(Event(wall_time=time.time(), **fields).SerializeToString())


class LibraryTracker:
    """A run in wandb or trackio: its numbers, its settings, and the samples in its folder.

    `tracker.json` in the run's folder has the id, so that a resumed run continues the same one, and
    which samples were logged.
    """

    def __init__(
        self,
        folder: Path,
        library: str,
        project: str,
        run: TrackedRun,
        *,
        is_new: bool = False,
        is_said: bool = False,
    ):
        """Open the run.

        Args:
            library: `wandb` or `trackio`.
            project: The project's name there.
            run: The run's name and settings.
            is_new: Whether training starts anew, so that this is another run than any before.
            is_said: Whether this process has said already where the run is.
        """
        self._folder, self._library = RunFolder(folder), library
        self._memory = _memory(self._folder)
        if is_new or library not in self._memory:
            # Samples that are there already are of an earlier start; this one generates its own.
            stamps = {path.stem: stamp for path, stamp in _lists(self._folder)} if is_new else {}
            self._memory[library] = {"id": uuid.uuid4().hex[:12], "samples": stamps}
        self._logged: dict[str, int] = self._memory[library]["samples"]
        self._looked = 0
        self._remember()  # before the run is there, so that a kill makes no second one
        self._backend = _BACKENDS[library](
            self._folder, project, run, self._memory[library]["id"], is_said=is_said
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._backend.log(step, values)
        self.log_samples()

    def close(self, *, failed: bool) -> None:
        try:
            self.log_samples()
        finally:
            self._backend.finish(failed=failed)

    def log_samples(self) -> None:
        """Log the samples that are new in the run's folder: they come while it trains, and from
        another process also after it."""
        folder = self._folder.samples
        if not folder.is_dir() or (changed := folder.stat().st_mtime_ns) == self._looked:
            return
        for path, stamp in _lists(self._folder):
            if self._logged.get(path.stem) == stamp:
                continue
            media = {
                f"samples/{sample.file.stem.removeprefix(f'{path.stem}-')}": self._backend.media(
                    sample.file, sample.prompt
                )
                for sample in listed_samples(path)
                if sample.file.is_file()
            }
            self._backend.log(int(path.stem.removeprefix("step-")), media)
            self._logged[path.stem] = stamp
            self._remember()
        self._looked = changed

    def _remember(self) -> None:
        write_text(self._folder.tracker, json.dumps(self._memory, indent=1) + "\n")


def _lists(folder: RunFolder) -> list[tuple[Path, int]]:
    """The lists of generated samples, each with the time it was written."""
    return [(path, path.stat().st_mtime_ns) for path in sorted(folder.samples.glob("step-*.json"))]


def has_new_samples(folder: Path, library: str) -> bool:
    """Whether a run's folder has samples that its tracker has not."""
    stamps = _memory(RunFolder(folder)).get(library, {}).get("samples", {})
    return any(stamps.get(path.stem) != stamp for path, stamp in _lists(RunFolder(folder)))


def _memory(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """By library, the id of the run there and the samples that were logged; empty if there is
    none."""
    try:
        stored = json_part(folder.tracker)
        return {
            name: {"id": str(entry["id"]), "samples": dict(entry["samples"])}
            for name, entry in stored.items()
        }
    except (TypeError, KeyError, ValueError):
        # damaged: another run there, and nothing is lost here
        return {}


class _Wandb:
    def __init__(
        self, folder: RunFolder, project: str, run: TrackedRun, id: str, *, is_said: bool = False
    ):
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=_FINISH_SECONDS,
            disable_git=True,
            save_code=False,
        )
        is_online = wandb.setup().settings.mode == "online"
        if is_online and not wandb.login(prompt=False):  # `init` would ask on the terminal
            raise UserError(
                "nobody is logged in (wandb login); WANDB_MODE=offline needs no login and no "
                "network"
            )
        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            name=run.name,
            id=id,
            resume="allow",
            dir=str(folder.path),
            config=dict(run.settings),
            settings=settings,
        )
        # An axis of our own: wandb drops what is logged for an earlier step of its own axis, such
        # as a preview from another device.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if not is_online:  # a folder of its own each time, and each has to be uploaded
            say(f"wandb:    offline; upload it with: wandb sync {self._run.settings.sync_dir}")
        elif not is_said:
            say(f"wandb:    {self._run.url}")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "step": step})

    def media(self, path: Path, caption: str) -> Any:
        return (self._wandb.Video if path.suffix == ".mp4" else self._wandb.Image)(
            str(path), caption=caption
        )

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    def __init__(
        self, folder: RunFolder, project: str, run: TrackedRun, id: str, *, is_said: bool = False
    ):
        import trackio

        self._trackio = trackio
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=project,
                name=run.name,
                config=dict(run.settings),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # `init` can only resume by name, and runs of several folders may have one name.
        self._run.id = id
        if not is_said:
            say(f"trackio:  trackio show --project {project}")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def media(self, path: Path, caption: str) -> Any:
        return (self._trackio.Video if path.suffix == ".mp4" else self._trackio.Image)(
            str(path), caption=caption
        )

    def finish(self, *, failed: bool) -> None:
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()


_BACKENDS: Mapping[str, Callable[..., _Wandb | _Trackio]] = {"wandb": _Wandb, "trackio": _Trackio}
