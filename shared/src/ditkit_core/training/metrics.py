"""Metrics of a run while it trains: one JSON object per line, and what trackers show of them."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError, argument
from ditkit_core.io.files import write_text
from ditkit_core.io.trackers import (
    TIMES,
    LibraryTracker,
    TensorBoard,
    TrackedRun,
    Trackers,
    has_new_samples,
)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The `[log]` section: where the numbers of a run are written."""

    every_steps: int = setting(1, resume="free")
    """Optimizer steps between two lines of metrics.jsonl; a line describes its own step only."""
    tensorboard: bool = setting(True, resume="free")
    """Also write these metrics for TensorBoard."""
    tracker: Literal["none", "wandb", "trackio"] = setting("none", resume="free")
    """Also log metrics, samples and configuration with this library, an extra of the packages. If
    it fails, the run goes on without it."""
    project: str = setting("ditkit", resume="free")
    """Project of the tracker in which the run is shown under its name."""

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise UserError(
                f"{argument('log.every_steps')} = {self.every_steps} must be at least 1"
            )


class MetricsLog:
    """Writes metrics.jsonl into a run folder, and gives the same numbers to trackers; a context
    manager.

    A resumed run drops the lines after the step that it starts from, because an earlier start may
    have been killed after its last save. One that starts anew drops all lines. Every step is
    therefore in the file once.
    """

    def __init__(
        self,
        folder: Path,
        config: LogConfig,
        *,
        start_step: int = 0,
        digest: str = "",
        tracked: TrackedRun | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ):
        """Write nothing yet.

        Args:
            start_step: The step of the save that the run starts from; 0 without a save.
            digest: What `saved` returned for that save; empty if it has none.
            tracked: What trackers show of the run; None for its folder's name alone.
            warn: Called with one line if earlier lines were changed, and if a tracker fails.
        """
        self.path = Path(folder) / "metrics.jsonl"
        self._config, self._start_step, self._digest, self._warn = config, start_step, digest, warn
        self._trackers = Trackers(warn)
        self._tracked = tracked or TrackedRun(name=self.path.parent.name)

    def __enter__(self) -> Self:
        kept = self._kept()
        self._hash = hashlib.blake2b(digest_size=16)
        for line in kept.split("\n")[:-1]:
            self._hash.update(_lasting(json.loads(line)))
        if self._digest not in ("", self._hash.hexdigest()):
            self._warn(
                f"{self.path} was changed or damaged since step {self._start_step} was saved; its "
                f"readable lines stay"
            )
        write_text(self.path, kept)
        with ExitStack() as opened:
            try:
                self._file = opened.enter_context(
                    open(self.path, "a", encoding="utf-8", newline="\n")
                )
            except OSError as error:
                raise self._unwritable(error) from error
            self._add_trackers()
            opened.pop_all()
        return self

    def _add_trackers(self) -> None:
        config, folder = self._config, self.path.parent
        if config.tensorboard:
            board = folder / "tensorboard"
            self._trackers.add(
                f"cannot write {board}", lambda: TensorBoard(board, self._start_step)
            )
        if (library := config.tracker) != "none":
            is_new = self._start_step == 0
            self._trackers.add(
                f'log.tracker = "{library}"',
                lambda: LibraryTracker(
                    folder, library, config.project, self._tracked, is_new=is_new
                ),
            )

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
                f"{self.path} cannot be read ({error.strerror}); correct its permissions, or "
                f"remove it"
            ) from error
        return "".join(f"{line}\n" for line in lines if 0 <= _step_of(line) <= self._start_step)

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write one line of finite numbers and of names; trackers get the numbers."""
        row = {"step": step, **values}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            # Flushed line by line, so that a killed run loses none.
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error
        self._hash.update(_lasting(row))
        self._trackers.write(
            step, {name: value for name, value in values.items() if not isinstance(value, str)}
        )

    def saved(self) -> str:
        """Flush all lines to disk, for a save of this step, and return a digest of their values,
        times and memory left out."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        return self._hash.hexdigest()

    def due(self, step: int) -> bool:
        """Whether a step gets a line."""
        return step % self._config.every_steps == 0

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._trackers.close(failed=kind is not None)
        with suppress(OSError):  # it writes what `write` could not, which has been reported
            self._file.close()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror or error}; free some space")


def log_left_samples(
    folder: Path,
    config: LogConfig,
    tracked: TrackedRun,
    warn: Callable[[str], None],
    *,
    is_said: bool = False,
) -> None:
    """Give the tracker the samples that were written when training had ended: by another process,
    or with all experts.

    Args:
        is_said: Whether this process has said already where the tracker's run is.
    """
    if config.tracker != "none" and has_new_samples(folder, config.tracker):
        trackers = Trackers(warn)
        trackers.add(
            f'log.tracker = "{config.tracker}"',
            lambda: LibraryTracker(
                folder, config.tracker, config.project, tracked, is_said=is_said
            ),
        )
        trackers.close(failed=False)


_OF_THE_MACHINE = (
    "seconds",
    "data_seconds",
    "tokens_per_second",
    "peak_memory_bytes",
    "peak_reserved_bytes",
    "wait_seconds",
    "sent_bytes",
    "mfu",
    "replays",
)


def is_of_the_machine(name: str) -> bool:
    """Whether a number differs each time that a step runs: times and memory."""
    return name in _OF_THE_MACHINE or name.startswith(TIMES)


def _lasting(row: Mapping[str, Any]) -> bytes:
    """What is the same whenever and wherever a line is made, so that an interrupted run has the
    saves of an undisturbed one."""
    return json.dumps(
        {name: value for name, value in row.items() if not is_of_the_machine(name)}
    ).encode()


def _step_of(line: str) -> int:
    """The step of a line; -1 if it is incomplete or damaged, as the last line may be after a
    crash."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1
