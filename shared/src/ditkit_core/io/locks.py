"""Locks of the operating system next to the files that several processes write."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSYS
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from ditkit_core.io.console import say

_SILENT_SECONDS = 2.0
"""A wait that is not worth a line: a list of captions is written in less."""


@contextmanager
def alone_with(file: Path) -> Iterator[None]:
    """Run the block in one process at a time; the others wait. Without effect in a folder that
    cannot be written or locked.

    The file of the lock stays: a process that waits for a file that was removed would not see the
    lock of the next.
    """
    lock_file = file.with_name(f".{file.name}.lock")
    lock = FileLock(lock_file)
    try:
        try:
            acquire(lock, lock_file, timeout=_SILENT_SECONDS)
        except Timeout:
            say(f"waiting for another process that writes {file}")
            lock.acquire()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.release()


def acquire(lock: FileLock, file: Path, timeout: float = 0.0) -> None:
    """Acquire a lock.

    Args:
        file: The lock's file.
        timeout: Seconds to wait for another process.

    Raises:
        Timeout: If another process has it.
        OSError: If the folder cannot be written or locked. Where the operating system has no locks,
            filelock counts the file itself as one: the claim of a process that was killed on
            another machine, or in a container that is gone, would block everybody forever.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flock not supported")
        try:
            lock.acquire(timeout=timeout)
        except Timeout:
            if not isinstance(lock, SoftFileLock):
                raise
    if isinstance(lock, SoftFileLock):
        lock.release()
        raise OSError(ENOSYS, f"{file.parent} has no locks")
