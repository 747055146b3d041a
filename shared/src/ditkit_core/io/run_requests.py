"""What a user asks of a run while it trains: samples, a save, or its end, by an empty file in the
run's folder."""

import os
from contextlib import suppress

from ditkit_core.config.nearest import nearest_word
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder, is_locked

REQUESTS = {
    "sample": "samples are generated after the step that runs now",
    "save": "the state is saved, and exported, after the step that runs now",
    "stop": "the run saves and ends after the step that runs now; the same command continues it",
}
"""The requests, and what follows each."""


def check_request(name: str) -> None:
    """Refuse a word that is no request."""
    if name not in REQUESTS:
        near = nearest_word(name, REQUESTS)
        remedy = f"did you mean {near}?" if near else f"choose among {', '.join(REQUESTS)}"
        raise UserError(f'--tell must be one of {", ".join(REQUESTS)}, not "{name}"; {remedy}')


def ask(folder: RunFolder, name: str) -> str:
    """Ask a run for something; returns what follows. An expert's folder stands for the run that
    contains it.

    A file without contents exists or does not: no reader sees half of it, and asking twice is
    asking once.

    Raises:
        UserError: If no process trains in the folder, or nothing can be written there.
    """
    above = RunFolder(folder.path.absolute().parent)
    folder = above if is_locked(above.path) else folder
    if not is_locked(folder.path):
        raise UserError(
            f"{folder.path} is not running, so there is nobody to tell; start it again to continue "
            f"it"
        )
    try:
        while True:
            folder.requests.mkdir(exist_ok=True)
            # the run removed the folder, empty, since the line above
            with suppress(FileNotFoundError):
                (folder.requests / name).touch()
                return REQUESTS[name]
    except OSError as error:
        raise UserError(f"cannot write in {folder.requests}: {error.strerror or error}") from error


def pending(folder: RunFolder) -> frozenset[str]:
    """What is asked of a run. Without a request its folder of requests is missing, which one system
    call finds."""
    try:
        return frozenset(os.listdir(folder.requests)) & REQUESTS.keys()
    except OSError:
        return frozenset()


def remove_requests(folder: RunFolder, names: set[str]) -> None:
    """Remove requests, after what they asked for was done: a kill in between loses none."""
    for name in names:
        with suppress(OSError):
            (folder.requests / name).unlink()
    with suppress(OSError):  # another request came meanwhile, or there is no folder
        folder.requests.rmdir()


def remove_fulfilled(folder: RunFolder) -> None:
    """Remove what an earlier start of the run has left and needs no answer any more; its folder is
    locked by this process.

    The earlier start has ended, and this one begins at a save. Samples are still wanted, unless
    some were generated since.
    """
    fulfilled = {"save", "stop"}
    with suppress(OSError):
        since = (folder.requests / "sample").stat().st_mtime_ns
        lists = (
            *folder.path.glob("samples/step-*.json"),
            *folder.path.glob("*/samples/step-*.json"),
        )
        if any(path.stat().st_mtime_ns >= since for path in lists):
            fulfilled.add("sample")
    remove_requests(folder, fulfilled)
