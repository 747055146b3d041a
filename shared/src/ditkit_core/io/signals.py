"""Handling signals: a training run ends after the current optimizer step and saves; other commands end at once with a message."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Inside the block, SIGTERM raises KeyboardInterrupt like Ctrl-C; by default it would end the process silently."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Interrupts:
    """Inside the block, SIGINT, SIGTERM, SIGHUP (a closed terminal) and (Windows) SIGBREAK only set `requested`; a second Ctrl-C interrupts.

    An ignored SIGHUP stays ignored, because `nohup` lets a run outlive its terminal. Python allows handlers only in the main thread, so in
    other threads the block does nothing. On exit the previous handlers are restored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
                number = getattr(signal, name, None)  # some exist only on some platforms
                if number is None or (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                    continue
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None means a handler that was not installed from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
