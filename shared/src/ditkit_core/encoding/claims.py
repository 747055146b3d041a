"""Claims of cache entries, so that several processes that share a cache encode each item once.

A claim is a lock of the operating system on a file next to the entry. It ends with its process,
also after kill -9, so that a dead process blocks nobody. Machines that share a cache need a file
system whose locks work between them, as NFS's do. Where they do not, items are encoded by more than
one process: entries are written atomically, so that this costs time and changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ditkit_core.io.locks import acquire


@contextmanager
def claimed(entry: Path) -> Iterator[bool]:
    """Claim an entry for the block, without waiting for another process that has claimed it; yields
    whether this process may encode it.

    The claim is no promise that the entry is missing: look for it inside the block.
    """
    file = entry.with_name(f".{entry.stem}.claim")
    lock = FileLock(file)
    try:
        acquire(lock, file)
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
