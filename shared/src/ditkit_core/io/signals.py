"""Handling signals: a training run ends after the current optimizer step and saves; other commands
end at once with a message."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_ENDING = ("SIGTERM", "SIGHUP", "SIGBREAK")
"""Signals that end a process besides SIGINT; SIGHUP comes when the terminal is closed, SIGBREAK is
Windows'."""


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Inside the block, these signals raise KeyboardInterrupt like Ctrl-C; by default they would
    end the process without a word."""
    with _handled(_interrupt, _ENDING, replaced=lambda handler: handler == signal.SIG_DFL):
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def signals_by_default() -> Iterator[None]:
    """Inside the block, SIGINT and these signals end the process at once and without a word, for a
    call that waits outside of Python."""
    with _handled(signal.SIG_DFL, ("SIGINT", *_ENDING), replaced=lambda _: True):
        yield


class Interrupts(ExitStack):
    """Inside the block, SIGINT, SIGTERM, SIGHUP and (Windows) SIGBREAK only set `requested`; a
    second Ctrl-C interrupts.

    An ignored SIGHUP stays ignored, because `nohup` lets a run outlive its terminal.
    """

    def __init__(self, on_interrupt: Callable[[], None] | None = None) -> None:
        """Install the handlers.

        Args:
            on_interrupt: Called at the first Ctrl-C, to say what follows, since a step may take a
                minute. It runs in a thread of its own: a handler that prints may come in the middle
                of another line.
        """
        super().__init__()
        self.requested, self._on_interrupt = False, on_interrupt
        self.enter_context(_handled(self._on_signal, ("SIGINT", *_ENDING), replaced=lambda _: True))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        if number == signal.SIGINT and self._on_interrupt is not None:
            threading.Thread(target=self._on_interrupt, name="ditkit-interrupt").start()


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
    names: tuple[str, ...],
    replaced: Callable[[Any], bool],
) -> Iterator[None]:
    """Install a handler for the block where `replaced` says so of the present one, and restore that
    at its end.

    Python allows handlers only in the main thread, so in other threads the block does nothing.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # some exist only on some platforms
        numbers = [getattr(signal, name) for name in names if name in dir(signal)]
        for number in numbers:
            present = signal.getsignal(number)
            if replaced(present) and not (
                number == getattr(signal, "SIGHUP", None) and present == signal.SIG_IGN
            ):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, present in before.items():
            # None means a handler that was not installed from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if present is None else present)
