"""The exports of a run that are to be verified, found in its folder, and the results so far
(`verified.json`).

What is left follows from the two alone. So nothing is lost when a run is killed, and a file that
changed is verified again.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ditkit_core.adapters.files.export_names import ExportName
from ditkit_core.errors import UserError
from ditkit_core.io.files import file_hash, json_part, write_text
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.adapter_formats import NO_READER, VERIFIED

_WHOLE = "transformer_"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An export of a run."""

    folder: RunFolder
    """The run's."""
    path: Path
    """The adapter's file, or the folder of a whole transformer."""
    form: str
    step: int
    """The save with these weights."""

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole transformer."""
        return self.path.is_dir()

    @property
    def name(self) -> str:
        """The name under which its result is kept."""
        return self.path.relative_to(self.folder.exports).as_posix()

    @property
    def is_left(self) -> bool:
        """Whether it is there, and for an adapter the save that it is compared with."""
        return self.path.exists() and (self.is_whole or self.folder.save(self.step).exists())


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a verification."""

    line: str
    """The line that is printed: what agreed, or the difference."""
    agrees: bool
    num_bytes: int
    written_ns: int
    """Time of the last change of the export, which is verified again after another."""
    digest: str
    """Digest of the file, whose copies have the same result; empty for a whole transformer."""

    @classmethod
    def of(cls, export: Exported) -> Self:
        """The result of an export as it is now, with what was found still open."""
        num_bytes, written_ns = _state(export.path)
        digest = "" if export.is_whole else file_hash(export.path)
        return cls(line="", agrees=False, num_bytes=num_bytes, written_ns=written_ns, digest=digest)


def unverified(folder: RunFolder, skipped: Collection[str] = ()) -> list[Exported]:
    """The exports that have no result, the newest first: with a slow host, the export of the latest
    save matters most.

    Args:
        skipped: Names of exports to leave alone.
    """
    results, left = read_results(folder), []
    for export in _exports(folder):
        with suppress(OSError):  # it was removed with its save meanwhile
            state, result = _state(export.path), results.get(export.name)
            is_current = result is not None and (result.num_bytes, result.written_ns) == state
            if export.is_left and not is_current and export.name not in skipped:
                left.append((state[1], str(export.path), export))
    return [export for *_, export in sorted(left, key=lambda entry: entry[:2], reverse=True)]


def read_results(folder: RunFolder) -> dict[str, Result]:
    """The results by name; none from a file that is damaged, after which everything is verified
    again."""
    try:
        return {name: Result(**about) for name, about in json_part(folder.verified).items()}
    except TypeError:
        return {}


def current_results(folder: RunFolder) -> dict[str, Result]:
    """The results of the exports as they are: one stays in the file after its export was removed or
    replaced."""
    outdated = {export.name for export in unverified(folder)}
    return {
        name: result
        for name, result in read_results(folder).items()
        if name not in outdated and (folder.exports / name).exists()
    }


def write_result(export: Exported, result: Result) -> None:
    """Add a result, and forget the results of exports that are gone."""
    folder = export.folder
    results = {
        name: stored
        for name, stored in read_results(folder).items()
        if (folder.exports / name).exists()
    }
    values: Mapping[str, Any] = {name: asdict(stored) for name, stored in results.items()}
    write_text(
        folder.verified, json.dumps({**values, export.name: asdict(result)}, indent=1) + "\n"
    )


def is_finished(folder: RunFolder, name: str) -> bool:
    """Whether a result is of the finished model, and not of a save before."""
    parsed = ExportName.parse(name, (folder.name,))
    return "/" not in name if parsed is None else parsed.step is None


def _exports(folder: RunFolder) -> Iterator[Exported]:
    for file in folder.exports.glob("*.safetensors"):
        name = ExportName.parse(file.name, (folder.name,))
        if name is not None and not name.by_command and (step := _step(file)) is not None:
            yield Exported(folder=folder, path=file, form=name.form, step=step)
    for path in (*folder.exports.glob(f"{_WHOLE}*"), *folder.exports.glob(f"step-*/{_WHOLE}*")):
        if (step := _step(path)) is not None:
            yield Exported(folder=folder, path=path, form=path.name.removeprefix(_WHOLE), step=step)


def _step(path: Path) -> int | None:
    """The step in an export's header; None if it is incomplete, has no reader to verify it with, or
    is of an earlier version."""
    # Here: it imports torch, and who serves a run's page waits seconds for that.
    from ditkit_core.io.safetensors import SafetensorsSource

    try:
        header = SafetensorsSource.open(path).metadata
    except (UserError, OSError):
        return None
    step, about = header.get("ditkit.step", ""), header.get(VERIFIED, NO_READER)
    return int(step) if step.isdecimal() and not about.startswith(NO_READER) else None


def _state(path: Path) -> tuple[int, int]:
    """Bytes, and time of the last change."""
    files = [file.stat() for file in (path.iterdir() if path.is_dir() else [path])]
    return sum(file.st_size for file in files), max((file.st_mtime_ns for file in files), default=0)
