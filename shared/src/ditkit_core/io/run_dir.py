"""The folder of a run: where its files lie, whose it is, and that one process at a time trains in it."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ditkit_core.config.field import setting
from ditkit_core.config.resume import ConfigChange, compare, refuse
from ditkit_core.config.schema import config_fields
from ditkit_core.config.toml import read_stored_file, to_toml
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text

CHECKS = ("check.json", "check.html")
"""What a check of a run writes into its folder."""
DRAWN = "drawn-"
"""Before the number of a drawing by hand, at the beginning of its files' names: those that training draws begin with their step."""


@contextmanager
def next_drawing(folder: Path) -> Iterator[str]:
    """What the names of the next drawing by hand begin with, such as `drawn-001`: no file in this folder has it, and until the block ends
    no other process gets it. Of a process that is killed a hidden file stays, whose number is passed over.

    Args:
        folder: Where to draw; made if it is not there.

    Raises:
        UserError: If nothing can be written there.
    """
    number = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            number = max([number, *_drawing_numbers(folder)]) + 1
            taken = folder / f".{DRAWN}{number:03d}"
            try:
                os.close(os.open(taken, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            if not any(folder.glob(f"{DRAWN}{number:03d}-*")):
                break
            taken.unlink()  # whoever had it has drawn since the folder was looked at
    except OSError as error:
        raise UserError(
            f"cannot write in {folder}: {error.strerror or error}; name another folder with --out"
        ) from error
    try:
        yield f"{DRAWN}{number:03d}"
    finally:
        with suppress(OSError):  # one that stays is passed over
            taken.unlink()


def _drawing_numbers(folder: Path) -> Iterator[int]:
    for path in folder.iterdir():
        name = path.name.removeprefix(".")
        if name.startswith(DRAWN) and (number := name.removeprefix(DRAWN).split("-")[0]).isdecimal():
            yield int(number)


@dataclass(frozen=True, kw_only=True)
class RunFolderConfig:
    """The `[run]` section: where the run lies."""

    folder: str = setting("runs/run", resume="free", holds="path")
    """Folder of the run: resolved config, saved states, exports, samples, metrics. An existing run in it is continued."""

    def __post_init__(self) -> None:
        if not self.folder.strip() or "\0" in self.folder:
            raise UserError("run.folder is empty; name a folder, such as runs/run")


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def state(self) -> Path:
        """Folder of the saved training states, one folder for each."""
        return self.path / "state"

    def save(self, step: int) -> Path:
        """The folder of the save of an optimizer step, whether it is there or not."""
        return self.state / f"step-{step:06d}"

    @property
    def exports(self) -> Path:
        """Folder of the exported adapters and models."""
        return self.path / "exports"

    @property
    def samples(self) -> Path:
        """Folder of the samples."""
        return self.path / "samples"

    @property
    def pending(self) -> Path:
        """Folder of the previews that are still to be drawn by another process."""
        return self.samples / "pending"

    @property
    def previews_log(self) -> Path:
        """What that process prints."""
        return self.path / "previews.log"

    @property
    def metrics(self) -> Path:
        """One JSON line a record."""
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The page to watch it by."""
        return self.path / "report.html"

    @property
    def about(self) -> Path:
        """Where and on what it was trained, for the report."""
        return self.path / "about.json"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def inputs(self) -> Path:
        """Folder of the demo's generated inputs."""
        return self.path / "inputs"

    @property
    def prior(self) -> Path:
        """Folder of the drawn class pictures, unless `prior.folder` names one."""
        return self.path / "prior"

    @property
    def audit(self) -> Path:
        """Folder of what an audit of precision found."""
        return self.path / "audit"

    @property
    def data_file(self) -> Path:
        """What the run trains on: the cache keys of its samples."""
        return self.path / "data.json"

    @property
    def _complete(self) -> Path:
        return self.path / "complete.json"

    def mark_complete(self, step: int) -> None:
        """Record that training, with all that follows it, has been completed at this optimizer step."""
        write_text(self._complete, json.dumps({"step": step}) + "\n")

    def completed_step(self) -> int | None:
        """The optimizer step at which the run was completed; None if it never was."""
        if not self._complete.exists():
            return None
        try:
            return int(json.loads(self._complete.read_text(encoding="utf-8"))["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._complete} is damaged; delete it, and the run is taken up from its last save"
            ) from error

    def store(self, config: Any) -> None:
        """Write the resolved configuration, from which the run is continued and exported."""
        write_text(self.config_file, to_toml(config))

    def forget(self) -> None:
        """Remove the configuration of a run that came to nothing, if nothing was written that belongs to it."""
        if self._others() == [self.config_file.name]:
            self.config_file.unlink()

    def _others(self) -> list[str]:
        """What is here beside what there is without a run: the demo's inputs, samples of a file, pictures of a class, an audit, a check."""
        without = {self.inputs.name, self.samples.name, self.prior.name, self.audit.name, *CHECKS}
        names = sorted(entry.name for entry in self.path.iterdir())
        return [name for name in names if not name.startswith(".") and name not in without]

    def check(self, config: Any) -> list[ConfigChange]:
        """Whether the folder may be trained in with this configuration; reads only.

        Until something was saved there is nothing to continue, so that a mistyped path can be mended in place.

        Returns:
            The stated changes, to be logged.

        Raises:
            UserError: If the folder is not a run's, or a change would make it another run.
        """
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise UserError(f"run.folder {self.path} is a file; name a folder")
        if not self.config_file.exists():
            if others := self._others():
                raise UserError(f"run.folder {self.path} holds {others[0]} and no run; name a new or an empty folder")
            return []
        stored = read_stored_file(type(config), self.config_file)
        if not stored.keys() & config_fields(type(config)).keys():
            raise UserError(f"{self.config_file} is not a run's configuration; choose another run.folder")
        if not any(self.state.glob("step-*")):
            return []
        changes = compare(stored, config)
        if changes.refused:
            raise refuse(changes.refused, self.path)
        return changes.stated


@contextmanager
def open_run(path: Path, config: Any) -> Iterator[tuple[RunFolder, list[ConfigChange]]]:
    """Take a run's folder for training, until the block ends; nothing is written before the configuration is accepted.

    Args:
        path: The folder, new, empty, or of a run that this configuration continues.
        config: The resolved configuration, which the caller stores once it is put to use; after a user's mistake that left
            nothing else behind, it is removed again.

    Yields:
        The folder, and the stated changes against the stored configuration, to be logged.

    Raises:
        UserError: As `RunFolder.check`; or if another process holds the folder, or it cannot be written.
    """
    folder = RunFolder(Path(path))
    folder.check(config)
    with _locked(folder.path):
        stated = folder.check(config)  # again: another process may have trained here since
        is_new = not folder.config_file.exists()
        try:
            yield folder, stated
        except UserError:
            if is_new:
                folder.forget()
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a folder against other processes.

    The operating system holds the lock, so that it goes with its process however that ends; a process id in a file would
    have to be judged stale, and in a container the same few ids come again.
    """
    owner = path / ".owner"
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock", timeout=0)
        lock.acquire()
    except Timeout as error:
        who = owner.read_text(encoding="utf-8").strip() if owner.exists() else "unknown"
        raise UserError(f"{path} is in use by another process ({who}); stop it or choose another run.folder") from error
    except OSError as error:
        raise UserError(f"cannot write in {path}: {error.strerror or error}; choose another run.folder") from error
    try:
        since = datetime.now().isoformat(" ", "seconds")
        write_text(owner, f"process {os.getpid()} on {socket.gethostname()} since {since}")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()
