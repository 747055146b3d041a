"""Console output: rich on a terminal, plain lines elsewhere, and nothing once nobody can read it
any more. A run keeps its lines in a file, too."""

import errno
import io
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol, SupportsFloat, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ditkit_core.errors import printable

PLAIN_LINES = 10
"""Maximum number of lines that a progress bar prints if there is no terminal."""

_SHORT_SECONDS = 60
"""Shorter stages print no estimate of the remaining time."""
_SPEED_SECONDS = 3600.0
"""Period that the remaining time is estimated from. With rich's default of 30 s there is no
estimate if an item takes longer than that."""

_NOBODY_READS = (errno.EPIPE, errno.EINVAL, errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""A pipe without a reader (EINVAL on Windows), a terminal that is gone, a full disk under a log
file."""


class _Output:
    """stdout or stderr. Once nobody can read it, output is discarded: neither `| head` nor a full
    log disk may end hours of training."""

    def __init__(self, name: str):
        self._name = name

    @property
    def _stream(self) -> TextIO | None:
        # looked up each time: tests and `redirect_stdout` replace it
        stream: TextIO | None = getattr(sys, self._name)
        # While rich shows a bar, the stream passes everything on to the console, which would come
        # back here.
        return getattr(stream, "rich_proxied_file", stream) if self._name == "stdout" else stream

    def write(self, text: str) -> int:
        self._discarding(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._discarding(lambda stream: stream.flush())

    def _discarding(self, act: Callable[[TextIO], object]) -> None:
        stream = self._stream
        if stream is None:  # the process was started without it
            return
        try:
            act(stream)
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            # Replacing the file descriptor also keeps Python from failing when it flushes the
            # stream at exit.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._name == "stdout":
                warn(f"stdout cannot be written ({error.strerror}); nothing more is printed there")

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    @property
    def encoding(self) -> str:
        return "utf-8" if self._stream is None else self._stream.encoding


_STDOUT, _STDERR = _Output("stdout"), _Output("stderr")
CONSOLE = Console(file=cast(TextIO, _STDOUT), emoji=False)  # `:cat:` in a path stays as it is

_FORMATS = {
    "loss": "loss {:.4f}",
    "held_out": "validation {:.4f}",
    "seconds": "{:.2f} s/step",
    "peak_memory_bytes": "peak {:.2f} GiB",
    "lr": "lr {:.2e}",
    "grad_norm": "grad norm {:.3g}",
    "mfu": "MFU {:.0%}",
    "tokens_per_second": "{:.0f} tokens/s",
    "wait_seconds": "waited {:.2f} s",
    "data_seconds": "data {:.2f} s",
    "peak_reserved_bytes": "with gaps {:.2f} GiB",
    "sent_bytes": "sent {:.2f} GiB",
}
"""By figure, its text; the most important first. All figures are in `metrics.jsonl`."""


_COMMAND = re.compile(r"\w-(train|encode|sample|export|watch) ")


def prepare_streams() -> None:
    """Use UTF-8 for a redirected stdout, whatever the platform's default, and replace characters
    that cannot be printed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")


_muted = False


def mute() -> None:
    """Print nothing more but errors, for a process that works alongside one that prints, or that
    has said why it ends."""
    global _muted
    _muted = True


LOG_BYTES = 4_000_000
"""Size from which a log is renamed and a new one begun. The one before it is replaced, so a run
keeps between one and two of this size."""
_log: Path | None = None


def keep_log(path: Path | None) -> None:
    """From now on append each printed line to a file, with its time; None ends that.

    Progress is written as plain lines, also where a terminal shows bars. The file is opened for
    each line, so it may be moved or removed. If it cannot be written, that is one warning, and no
    error.
    """
    global _log
    _log = path


def note(text: str) -> None:
    """Write lines into the log alone, if there is one; control characters are escaped."""
    global _log
    if (path := _log) is None:
        return
    try:
        if path.exists():
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):  # a pipe would wait for its reader
                raise OSError(errno.EINVAL, "it is no file")
            if about.st_size > LOG_BYTES:
                # on Windows it may be open in a viewer: the next line tries again
                with suppress(OSError):
                    path.replace(path.with_name(f"{path.name}.1"))
        when = datetime.now().astimezone().isoformat(" ", "seconds")
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write("".join(f"{when}  {printable(line)}\n" for line in text.split("\n")))
    except OSError as error:
        _log = None
        warn(f"{path} cannot be written ({error.strerror or error}); the run goes on without it")


def say(text: str) -> None:
    """Print lines to stdout without markup, on a terminal as `wrap_prose` says; control characters are
    escaped."""
    if _muted:
        return
    note(text)
    text = "\n".join(map(printable, text.split("\n")))
    if CONSOLE.is_terminal:
        CONSOLE.print(wrap_prose(text), markup=False, highlight=False, soft_wrap=True)
    else:
        print(text, file=_STDOUT, flush=True)


def wrap_prose(line: str) -> str:
    """A line of prose wrapped by words at the width of the terminal, 80 columns if it has none.

    What is aligned or copied stays as it is: several lines (TOML, JSON), a line with columns (two
    spaces) or with a command of ours, and a word that is longer than the terminal is wide (a path).
    """
    is_prose = not ("\n" in line or "  " in line.strip() or _COMMAND.search(line))
    if not is_prose or cell_len(line) <= CONSOLE.width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    first, *words = line.split()
    rows = [indent + first]
    for word in words:  # textwrap counts a wide character as one column
        if cell_len(f"{rows[-1]} {word}") <= CONSOLE.width:
            rows[-1] += f" {word}"
        else:
            rows.append(f"{indent}  {word}")
    return "\n".join(rows)


def warn(text: str) -> None:
    """Print one line to stderr, on a terminal as `wrap_prose` says; control characters are escaped."""
    if not _muted:
        complain(text)


def complain(text: str) -> None:
    """Print the line that says why the process ends, which is never muted."""
    line = " ".join(text.split("\n"))
    note(line)
    line = printable(line)
    print(wrap_prose(line) if _STDERR.isatty() else line, file=_STDERR, flush=True)


def doing(text: str) -> None:
    """Say on a terminal what takes a while; nothing where stderr is a file or a pipe."""
    if _STDERR.isatty():
        warn(f"{text} ...")


class Bar(Protocol):
    """A progress bar in use."""

    def advance(self, amount: float = 1) -> None:
        """Report that `amount` more items are done."""
        ...

    def begin(self, completed: int) -> None:
        """Report that `completed` items are done, and estimate the remaining time from the items
        that follow alone.

        For the end of a first item that took longer than others will, and for items that an earlier
        process has done.
        """
        ...

    def update(self, **fields: SupportsFloat) -> None:
        """Set figures to show with the bar, before the advance that they belong to; other figures
        stay.

        Known figures are loss, held_out, lr, grad_norm, seconds (of a step), data_seconds (waited
        for data in it), tokens_per_second, peak_memory_bytes, peak_reserved_bytes, wait_seconds
        (for other ranks) and sent_bytes (to them).
        """
        ...


class NullProgress:
    """Progress that shows nothing: an instance replaces a bar, and the class itself replaces the
    function `progress`."""

    def __init__(self, stage: str = "", total: int = 0) -> None:
        """Accept the arguments of `progress`."""

    @staticmethod
    def advance(amount: float = 1) -> None:
        """Show nothing."""

    @staticmethod
    def begin(completed: int) -> None:
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
    """Show the progress of a stage.

    Args:
        stage: Name of the stage, in a word or two.
        completed: Number of items that were done before.

    Yields:
        The bar.
    """
    if _muted:
        yield NullProgress()
        return
    if not CONSOLE.is_terminal:
        yield _PlainBar(stage, total, completed)
        return
    bar = _LiveBar(stage, total, completed)
    with Live(get_renderable=bar.rendered, console=CONSOLE):
        yield bar


class _LiveBar:
    """A bar on a terminal with its figures in the line below, as many as fit. The log gets plain
    lines."""

    def __init__(self, stage: str, total: int, completed: int):
        self._logged = _PlainBar(stage, total, completed, note)
        texts = f"{stage}  {total}/{total} 10:00:00 10:00:00"
        bar = BarColumn(min(40, max(4, CONSOLE.width - len(texts))))
        columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn())
        self._figures = dict[str, str]()
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=CONSOLE, speed_estimate_period=_SPEED_SECONDS
        )
        self._task = self._bar.add_task(stage, total=total, completed=completed)

    def rendered(self) -> Group:
        """The present content on the terminal: a line that wraps would jump up and down when a
        figure changes its length."""
        line = ""
        for figure in (self._figures[name] for name in _FORMATS if name in self._figures):
            longer = f"{line}  {figure}" if line else figure
            if len(longer) > CONSOLE.width:
                break  # what is less important would else change places with it
            line = longer
        return Group(self._bar, *([Text(line)] if line else []))

    def advance(self, amount: float = 1) -> None:
        self._bar.advance(self._task, amount)
        self._logged.advance(amount)

    def begin(self, completed: int) -> None:
        # rich counts the time from the first change on, and without the items of that change.
        self._bar.update(self._task, completed=completed)
        self._logged.begin(completed)

    def update(self, **fields: SupportsFloat) -> None:
        self._figures |= _figures(fields)
        self._logged.update(**fields)


class _PlainBar:
    """Prints a line after each tenth, and an early estimate of the remaining time if the stage
    takes long."""

    def __init__(
        self, stage: str, total: int, completed: int, print_lines: Callable[[str], None] = say
    ):
        self._print = print_lines
        self._stage, self._total, self._done, self._figures = (
            stage,
            max(total, 1),
            float(completed),
            dict[str, str](),
        )
        self._start, self._done_before, self._estimated = time.monotonic(), self._done, False
        self._shown = completed

    def advance(self, amount: float = 1) -> None:
        printed = self._done * PLAIN_LINES // self._total
        self._done += amount
        # shares of an item that add up to it, except for rounding
        if abs(self._done - round(self._done)) < 1e-6:
            self._done = float(round(self._done))
        if self._done * PLAIN_LINES // self._total > printed:
            remaining = self._left()
            # a share of an item is only worth a line with an estimate
            if remaining or int(self._done) > self._shown:
                self._shown = int(self._done)
                self._print(
                    "  ".join(
                        [
                            f"{self._stage} {self._shown}/{self._total}",
                            *remaining,
                            *self._figures.values(),
                        ]
                    )
                )
        elif not self._estimated:  # the first tenth may take hours, so estimate before it is done
            for estimate in self._left():
                self._print(f"{self._stage} {int(self._done)}/{self._total}  {estimate}")

    def begin(self, completed: int) -> None:
        self._start, self._done_before, self._estimated = time.monotonic(), float(completed), False
        self.advance(completed - self._done)

    def _left(self) -> list[str]:
        """The estimated remaining time as a list of one text; empty in the first minute, before the
        first item, and at the end."""
        seconds, done = time.monotonic() - self._start, self._done - self._done_before
        if seconds < _SHORT_SECONDS or not 0 < done < self._total - self._done_before:
            return []
        self._estimated = True
        return [f"about {_time_text(seconds / done * (self._total - self._done))} left"]

    def update(self, **fields: SupportsFloat) -> None:
        self._figures |= _figures(fields)


def _time_text(seconds: float) -> str:
    """An estimate, no finer than it is good for."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(10, round(seconds / 10) * 10)} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _figures(fields: dict[str, SupportsFloat]) -> dict[str, str]:
    """The figures as texts with units; times of the parts of a step are for files alone."""
    units = {name: 2**30 if name.endswith("_bytes") else 1 for name in fields}
    return {
        name: _FORMATS[name].format(float(value) / units[name])
        for name, value in fields.items()
        if name in _FORMATS
    }
