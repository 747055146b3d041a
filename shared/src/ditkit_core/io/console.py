"""What is printed: rich on a terminal, plain lines elsewhere, and nothing at all once nobody listens."""

import errno
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, SupportsFloat

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_LINES = 10
"""Lines that a progress bar prints at most where there is no terminal to draw on."""

_SHORT_SECONDS = 60
"""What takes no longer is told without an estimate."""
_SPEED_SECONDS = 3600.0
"""What an estimate of the time left is drawn from. rich's half a minute gives none where one item takes longer than that."""

CONSOLE = Console()

_FORMATS = {
    "loss": "loss {:.4f}",
    "held_out": "held-out {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad norm {:.3g}",
    "seconds": "{:.2f} s/step",
    "tokens_per_second": "{:.0f} tokens/s",
    "peak_memory_bytes": "peak {:.2f} GiB",
}


def prepare_streams() -> None:
    """Make a redirected stdout UTF-8, whatever the platform's default, and let no character stop a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")


_HUSHED = {
    # torchao registers two enums in a way that torch now calls deprecated, at every import of peft or a transformers model.
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses is deprecated",
    # diffusers looks for tensor classes that torchao has removed; they serve none of our files.
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
}
"""By logger: what libraries say at import that nobody who trains can mend."""


def hush_libraries() -> None:
    """Leave out these messages, and no others of the same loggers."""
    for name, message in _HUSHED.items():
        logging.getLogger(name).addFilter(_Hushed(message))


@dataclass(frozen=True)
class _Hushed(logging.Filter):
    message: str

    def filter(self, record: logging.LogRecord) -> bool:
        return self.message not in record.getMessage()


def say(text: str) -> None:
    """Print to stdout, unwrapped and without markup, so that paths and TOML come out as they are."""
    with _listened_to():
        if CONSOLE.is_terminal:
            CONSOLE.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)


def warn(text: str) -> None:
    """Print one line to stderr."""
    print(" ".join(text.split("\n")), file=sys.stderr, flush=True)


class Bar(Protocol):
    """A progress bar in use."""

    def advance(self, amount: float = 1) -> None:
        """Report that `amount` more are done."""
        ...

    def update(self, **fields: SupportsFloat) -> None:
        """Set figures shown beside the bar, before the advance that they belong to; others stay as they were.

        Known are loss, held_out, lr, grad_norm, seconds (of a step), tokens_per_second and peak_memory_bytes.
        """
        ...


class NullProgress:
    """Progress that nobody watches: it is a bar, and what stages of which each has a bar are given in place of `progress`."""

    def __init__(self, stage: str = "", total: int = 0) -> None:
        """Take what a stage says of itself."""

    @staticmethod
    def advance(amount: float = 1) -> None:
        """Show nothing."""

    @staticmethod
    def update(**fields: SupportsFloat) -> None:
        """Show nothing."""

    def __enter__(self) -> Callable[[float], None]:
        return self.advance

    def __exit__(self, *exception: object) -> None:
        pass


@contextmanager
def progress(stage: str, total: int, completed: int = 0) -> Iterator[Bar]:
    """Show how far a stage is.

    Args:
        stage: What is being done, in a word or two.
        total: How many there are to do.
        completed: How many were done before.
    """
    if not CONSOLE.is_terminal:
        yield _PlainBar(stage, total, completed)
        return
    bar = _DrawnBar(stage, total, completed)
    with Live(get_renderable=bar.drawing, console=CONSOLE):
        yield bar


class _DrawnBar:
    """Draws a bar, and its figures below it, since side by side they are wider than most terminals."""

    def __init__(self, stage: str, total: int, completed: int):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._figures = dict[str, str]()
        self._bar = Progress(*columns, TimeRemainingColumn(), console=CONSOLE, speed_estimate_period=_SPEED_SECONDS)
        self._task = self._bar.add_task(stage, total=total, completed=completed)

    def drawing(self) -> Group:
        """What stands on the terminal now."""
        return Group(self._bar, *([Text("  ".join(self._figures.values()))] if self._figures else []))

    def advance(self, amount: float = 1) -> None:
        self._bar.advance(self._task, amount)

    def update(self, **fields: SupportsFloat) -> None:
        self._figures |= _figures(fields)


class _PlainBar:
    """Prints a line whenever another tenth is done, and early on how long it will take if that is long."""

    def __init__(self, stage: str, total: int, completed: int):
        self._stage, self._total, self._done, self._figures = stage, max(total, 1), float(completed), dict[str, str]()
        self._start, self._done_before, self._estimated = time.monotonic(), self._done, False
        self._shown = completed

    def advance(self, amount: float = 1) -> None:
        printed = self._done * PLAIN_LINES // self._total
        self._done += amount
        if abs(self._done - round(self._done)) < 1e-6:  # parts of one that add up to it
            self._done = float(round(self._done))
        if self._done * PLAIN_LINES // self._total > printed:
            left = self._left()
            if left or int(self._done) > self._shown:  # parts of an item are worth a line if it says how long they take
                self._shown = int(self._done)
                say("  ".join([f"{self._stage} {self._shown}/{self._total}", *left, *self._figures.values()]))
        elif not self._estimated:  # the first tenth may take hours
            for estimate in self._left():
                say(f"{self._stage} {int(self._done)}/{self._total}  {estimate}")

    def _left(self) -> list[str]:
        """How long the rest will take, in one text; none while little is known of it, or where it is soon over."""
        seconds, done = time.monotonic() - self._start, self._done - self._done_before
        if seconds < _SHORT_SECONDS or not 0 < done < self._total - self._done_before:
            return []
        self._estimated = True
        minutes = round(seconds / done * (self._total - self._done) / 60)
        return [f"about {minutes // 60} h {minutes % 60} min left" if minutes >= 60 else f"about {minutes} min left"]

    def update(self, **fields: SupportsFloat) -> None:
        self._figures |= _figures(fields)


def _figures(fields: dict[str, SupportsFloat]) -> dict[str, str]:
    """Each figure with its unit."""
    units = {name: 2**30 if name.endswith("_bytes") else 1 for name in fields}
    return {name: _FORMATS[name].format(float(value) / units[name]) for name, value in fields.items()}


@contextmanager
def _listened_to() -> Iterator[None]:
    """When the reader of stdout is gone (`| head`), print into the void: it is no reason to lose hours of training."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EINVAL):  # Windows says EINVAL
            raise
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, sys.stdout.fileno())
        os.close(void)
