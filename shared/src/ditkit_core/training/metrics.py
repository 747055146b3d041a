"""Metrics of a run while it trains: one JSON object per line, and TensorBoard."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

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


@runtime_checkable
class Progress(Protocol):
    """A progress display."""

    def advance(self, amount: float = 1) -> None:
        """Count optimizer steps."""
        ...

    def update(self, **fields: Any) -> None:
        """Show the latest metrics by name."""
        ...


class MetricsLog:
    """Writes metrics.jsonl and TensorBoard's files into a run folder; a context manager.

    A resumed run drops the lines after the step that it starts from, because an earlier start may have been killed after its
    last save. Every step is therefore in the file once.
    """

    def __init__(self, folder: Path, config: LogConfig, *, start_step: int = 0):
        self.path = Path(folder) / "metrics.jsonl"
        self._config = config
        self._start_step = start_step
        self._board: Any = None

    def __enter__(self) -> Self:
        write_text(self.path, "".join(f"{line}\n" for line in self._kept_lines()))
        self._file = open(self.path, "a", encoding="utf-8", newline="\n")
        if self._config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard's files are append-only; purge_step hides entries after the step that the run starts from.
            self._board = SummaryWriter(str(self.path.with_name("tensorboard")), purge_step=self._start_step + 1)
        return self

    def _kept_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        # A crash can leave bytes at the end that are not UTF-8.
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        return [line for line in lines if 0 <= _step_of(line) <= self._start_step]

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write one line of finite numbers and of names, and a TensorBoard scalar for each number.

        Raises:
            UserError: If the disk is full.
        """
        try:
            self._file.write(json.dumps({"step": step, **values}, allow_nan=False) + "\n")
            # Flushed line by line, so that a killed run loses none.
            self._file.flush()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}; free some space") from error
        if self._board is not None:
            for name, value in values.items():
                if not isinstance(value, str):
                    self._board.add_scalar(name, value, step)

    def due(self, step: int) -> bool:
        """Whether a step gets a line."""
        return step % self._config.every_steps == 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _step_of(line: str) -> int:
    """The step of a line; -1 if it is incomplete, as the last line may be after a crash."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
