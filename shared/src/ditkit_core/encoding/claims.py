"""Claims of cache entries, so that several processes that share a cache encode each item once.

A claim is a lock of the operating system on a file next to the entry. It ends with its process,
also after kill -9, so that a dead process blocks nobody. Machines that share a cache need a file
system whose locks work between them, as NFS's do. Where they do not, items are encoded by more than
one process: entries are written atomically, so that this costs time and changes nothing.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOSYS
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from ditkit_core.io.console import say


@contextmanager
def claimed(entry: Path) -> Iterator[bool]:
    """Claim an entry for the block, without waiting for another process that has claimed it; yields
    whether this process may encode it.

    The claim is no promise that the entry is missing: look for it inside the block.
    """
    file = entry.with_name(f".{entry.stem}.claim")
    lock = FileLock(file)
    try:
        _acquire(lock, file)
    except Timeout:
        yield False
        return
    except OSError as error:
        if not isinstance(error, PermissionError):  # another user's claim
            with suppress(
                OSError
            ):  # without locks the file says nothing, and there would be one for each entry
                file.unlink()
        # a folder that cannot be written or locked: writing the entry says what is wrong, if
        # anything
        yield True
        return
    try:
        yield True
    finally:
        # Before the release: a process that opens the file now gets a lock on it, and finds the
        # entry.
        with suppress(OSError):
            file.unlink()
        lock.release()


@contextmanager
def alone_with(file: Path) -> Iterator[None]:
    """Run the block in one process at a time; the others wait. Without effect in a folder that
    cannot be written or locked."""
    lock_file = file.with_name(f".{file.name}.lock")
    lock = FileLock(lock_file)
    try:
        try:
            _acquire(lock, lock_file)
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


def _acquire(lock: FileLock, file: Path) -> None:
    """Acquire a lock at once.

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
            lock.acquire(timeout=0)
        except Timeout:
            if not isinstance(lock, SoftFileLock):
                raise
    if isinstance(lock, SoftFileLock):
        lock.release()
        raise OSError(ENOSYS, f"{file.parent} has no locks")
