"""The folders that several ranks share: the folder of a run, which the first locks for all, and
those that all must see."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ditkit_core.config.resume import ConfigChange
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text
from ditkit_core.io.run_dir import RunFolder, locked
from ditkit_core.io.run_requests import remove_fulfilled

_SEEN_SECONDS = 30.0
"""Time until a network disk shows on one machine what another has written."""


@contextmanager
def open_run(
    path: Path, config: Any, ranks: Ranks | None = None
) -> Iterator[tuple[RunFolder, list[ConfigChange]]]:
    """Lock a run's folder for training until the block ends; nothing is written before the
    configuration is accepted.

    The first of several ranks locks it for all.

    Args:
        path: The folder: new, empty, or of a run that this configuration continues.
        config: The resolved configuration. The caller stores it; if a UserError ends the block
            before anything else is written, the stored file is removed again. If it ends the block
            before the next save, the one that belongs to the last save is written back.
        ranks: The processes that train the run together; None for this one alone.

    Yields:
        The folder, and the stated changes against the stored configuration, which the caller logs.
    """
    folder, ranks = RunFolder(Path(path)), ranks or Ranks()
    if not ranks.is_first:
        owner, end = ranks.broadcast_object(""), time.monotonic() + _SEEN_SECONDS
        while folder.owner() != owner and time.monotonic() < end:
            time.sleep(0.2)
        if folder.owner() != owner:
            raise UserError(
                f"{path} is not the folder that rank 0 has locked ({owner}); set run.folder to one "
                f"that all machines share"
            )
        yield folder, []
        return
    folder.check(config)
    with locked(folder.path):
        # again: another process may have trained here before the lock was acquired
        stated = folder.check(config)
        before = (
            folder.config_file.read_text(encoding="utf-8") if folder.config_file.exists() else None
        )
        saves = folder.saves()
        folder.remove_unfinished()
        remove_fulfilled(folder)
        ranks.broadcast_object(folder.owner())
        try:
            yield folder, stated
        except UserError:
            if before is None:
                folder.forget()
            elif saves and saves == folder.saves():
                # What is refused only now (other data, another base) would else be the
                # configuration that `--run` continues with.
                write_text(folder.config_file, before)
            raise


def check_shared(folder: Path, key: str, ranks: Ranks) -> None:
    """Refuse a folder that is another one on the machine of another rank; all ranks call it at
    once.

    Args:
        folder: The folder. Where the first rank cannot write there, nothing is checked.
        key: What configures it.
        ranks: The processes that train the run together.
    """
    if ranks.size == 1:
        return
    mark = folder / ranks.on_first(lambda: _marked(folder))
    end = time.monotonic() + _SEEN_SECONDS
    while not mark.exists() and time.monotonic() < end:
        time.sleep(0.2)
    visible = ranks.all_gather_object(mark.exists())
    if ranks.is_first and mark != folder:
        mark.unlink(missing_ok=True)
    if not all(visible):
        raise UserError(
            f"rank {visible.index(False)} sees another folder {folder} than rank 0; set {key} to a "
            f"folder that all machines share"
        )


def _marked(folder: Path) -> str:
    """Create an empty file in a folder and return its name; return `.`, the folder itself, if
    nothing can be written there."""
    name = f".seen-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError:
        return "."
    return name
