"""Metrics of a run while it trains: one JSON object per line, and TensorBoard."""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The `[log]` section."""

    every_steps: int = setting(1, resume="free")
    """Optimizer steps between two lines of metrics.jsonl; a line describes its own step only."""
    tensorboard: bool = setting(True, resume="free")
    """Also write these metrics for TensorBoard."""

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise UserError(f"log.every_steps = {self.every_steps} must be at least 1")


class MetricsLog:
    """Writes metrics.jsonl and TensorBoard's files into a run folder; a context manager.

    A resumed run drops the lines after the step that it starts from, because an earlier start may have been killed
    after its last save. One that starts anew drops all lines. Every step is therefore in the file once.
    """

    def __init__(
        self,
        folder: Path,
        config: LogConfig,
        *,
        start_step: int = 0,
        digest: str = "",
        warn: Callable[[str], None] = lambda line: None,
    ):
        """Write nothing yet.

        Args:
            start_step: The step of the save that the run starts from; 0 without a save.
            digest: What `saved` returned for that save; empty if it has none.
            warn: Called with one line if earlier lines were changed, and if TensorBoard's files cannot be written.
        """
        self.path = Path(folder) / "metrics.jsonl"
        self._config, self._start_step, self._digest, self._warn = config, start_step, digest, warn
        self._board: _EventFile | None = None

    def __enter__(self) -> Self:
        kept = self._kept()
        self._hash = hashlib.blake2b(digest_size=16)
        for line in kept.split("\n")[:-1]:
            self._hash.update(_lasting(json.loads(line)))
        if self._digest not in ("", self._hash.hexdigest()):
            self._warn(
                f"{self.path} was changed or damaged since step {self._start_step} was saved; its readable lines stay"
            )
        write_text(self.path, kept)
        try:
            self._file = open(self.path, "a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise self._unwritable(error) from error
        if self._config.tensorboard:
            try:
                self._board = _EventFile(self.path.with_name("tensorboard"), self._start_step)
            except OSError as error:
                self._drop_board(error)
        return self

    def _kept(self) -> str:
        """The lines of the steps before the one that the run starts from."""
        if self._start_step == 0:
            return ""
        try:
            # A crash can leave bytes at the end that are not UTF-8.
            lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read ({error.strerror}); correct its permissions, or remove it"
            ) from error
        return "".join(f"{line}\n" for line in lines if 0 <= _step_of(line) <= self._start_step)

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write one line of finite numbers and of names, and a TensorBoard scalar for each number.

        Raises:
            UserError: If the disk is full.
        """
        row = {"step": step, **values}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            # Flushed line by line, so that a killed run loses none.
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error
        self._hash.update(_lasting(row))
        if self._board is not None:
            try:
                self._board.write(step, {name: value for name, value in values.items() if not isinstance(value, str)})
            except OSError as error:
                self._drop_board(error)

    def saved(self) -> str:
        """Flush all lines to disk, for a save of this step, and return a digest of their values, times and memory left out."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        return self._hash.hexdigest()

    def due(self, step: int) -> bool:
        """Whether a step gets a line."""
        return step % self._config.every_steps == 0

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # it writes what `write` could not, which has been reported
            self._file.close()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror or error}; free some space")

    def _drop_board(self, error: OSError) -> None:
        """Go on without TensorBoard: it has no number that metrics.jsonl lacks."""
        self._warn(
            f"cannot write {self.path.with_name('tensorboard')}: {error.strerror or error}; the run goes on, and its numbers are in "
            f"{self.path.name} only"
        )
        self._board = None


class _EventFile:
    """A file of scalars for TensorBoard.

    torch's SummaryWriter writes the same in a thread, where a full disk is a traceback on stderr and an error of a later call.
    """

    def __init__(self, folder: Path, start_step: int):
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        # The files are append-only; a session that starts hides entries from its step on.
        first = start_step + 1 if start_step else 0
        self._append(step=first, file_version="brain.Event:2")
        self._append(step=first, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(step=step, summary=Summary(value=scalars))

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        with open(self._path, "ab") as file:
            RecordWriter(file).write(Event(wall_time=time.time(), **fields).SerializeToString())


_OF_THE_MACHINE = ("seconds", "tokens_per_second", "peak_memory_bytes", "peak_reserved_bytes")


def _lasting(row: Mapping[str, Any]) -> bytes:
    """What is the same whenever and wherever a line is made, so that the saves of an interrupted run are those of an undisturbed one."""
    return json.dumps({name: value for name, value in row.items() if name not in _OF_THE_MACHINE}).encode()


def _step_of(line: str) -> int:
    """The step of a line; -1 if it is incomplete or damaged, as the last line may be after a crash."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1
