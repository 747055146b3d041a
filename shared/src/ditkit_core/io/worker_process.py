"""A process that works for this one while it trains, and ends with it.

Its standard input is a pipe from the parent, which the operating system closes however the parent
ends. What it prints goes to a log.
"""

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ditkit_core.errors import UserError, keys_shown, printable
from ditkit_core.io.allocator import allocator_settings
from ditkit_core.io.console import prepare_streams, warn

GRACE_SECONDS = 20.0
"""Time for the worker to end by itself before it is killed."""
_OWN_GRACE_SECONDS = 10.0
"""Time between the end of the parent and the end of the worker, if its work cannot be
interrupted."""
_TAIL_CHARACTERS = 4096
"""Longest message that is taken from the last line of a worker's log."""
_NICENESS = 10
"""Lower priority than training, with which the worker may share the processors."""


class WorkerProcess:
    """A worker, from the side of its parent."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path, device: torch.device):
        """Start `python -m module arguments`.

        Args:
            log: The file that its output is appended to.
            device: The only device that it sees.

        Raises:
            OSError: If it cannot be started.
        """
        with open(log, "ab") as file:
            self._log, self._log_start = log, file.tell()
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                env=_environment(device),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                # A session (or group) of its own: Ctrl-C goes to training, which decides what
                # happens to the worker.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        if self._child.poll() is not None:
            self._close()
        return self._child.returncode

    def wait(self, seconds: float) -> None:
        """Wait until it ends, at most for this time."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)

    def end(self) -> None:
        """End it."""
        self._close()
        try:
            self._child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def output(self) -> Iterator[str]:
        """The lines that it has printed.

        Raises:
            OSError: If the log cannot be read.
        """
        with open(self._log, "rb") as log:
            log.seek(self._log_start)
            for line in log:
                yield line.decode("utf-8", "replace").strip()

    def last_words(self) -> str:
        """The last line that it has printed, for a message."""
        words = "it printed nothing"
        try:
            for text in self.output():
                words = text[-_TAIL_CHARACTERS:] or words
        except OSError:
            return "its log cannot be read"
        return printable(words)

    def _close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()  # which ends it


def work(act: Callable[[], None]) -> int:
    """Do the work of a worker process, with low priority and until the parent ends.

    Returns:
        The exit status: 0 for success; 1 for a mistake that the user can fix, with the message in
        the last line; 130 when the parent has ended.
    """
    prepare_streams()
    if lower := getattr(os, "nice", None):  # not on Windows
        lower(_NICENESS)
    # A parent may have left SIGINT ignored, which children inherit; `_end_with_parent` needs it to
    # interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with keys_shown():
            act()
    except UserError as error:
        warn(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _end_with_parent() -> None:
    """Interrupt the main thread when the pipe from the parent is closed, and end the process if
    that is not enough."""
    while os.read(0, 1):  # nothing is ever written: the read returns when the pipe is closed
        pass
    _thread.interrupt_main()
    time.sleep(_OWN_GRACE_SECONDS)
    os._exit(130)


def visible_devices(device: torch.device, environment: Mapping[str, str]) -> str:
    """`CUDA_VISIBLE_DEVICES` of a process that sees one device only, so that it cannot use memory
    of the devices that train.

    Args:
        device: The device, with its index in this process.
        environment: The environment of this process, in which only some devices may be visible.
    """
    if device.type == "cpu":
        return ""
    # Entries may be UUIDs or a permutation: the index of this process selects an entry and is not a
    # device number.
    index, visible = device.index or 0, environment.get("CUDA_VISIBLE_DEVICES")
    return str(index) if visible is None else visible.split(",")[index].strip()


def _environment(device: torch.device) -> dict[str, str]:
    """The environment of the worker: one visible device, its allocator's settings, and this
    process's module search path."""
    return {
        **os.environ,
        **allocator_settings(os.environ),
        "CUDA_VISIBLE_DEVICES": visible_devices(device, os.environ),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
