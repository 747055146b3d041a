"""Saved training state: folders that are complete or recognisably not, so that a run can be killed
at any moment.

A save is written to a hidden folder next to its final place, flushed, and renamed; `state.json`,
written last, lists size and digest of the other files. A reader takes the newest save whose files
match that list.
"""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import ditkit_core
from ditkit_core.errors import UserError
from ditkit_core.io.files import atomic_folder, file_hash, flush, json_hash, temporary_path
from ditkit_core.training.config import SaveConfig

if TYPE_CHECKING:
    from ditkit_core.distributed.shards import Shards

_FORMAT = {"format": "ditkit-state", "version": 1}
INDEX = "state.json"
GROUPS = ("trainable", "ema", "optimizer")
"""The groups of a save's tensors."""
_DIGEST = "blake2b"
"""Key in the index of the digest of everything else in it. Saves of earlier versions have none."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that a run needs to resume bitwise identically."""

    step: int
    """Optimizer steps done."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By group (`GROUPS`), each a file: tensors by name; an empty group has no file."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values other than tensors, for JSON."""
    held_out: float | None = None
    """Held-out loss at this step; None if it was not measured."""
    metrics: str = ""
    """Digest of metrics.jsonl up to this step; empty if it is not known."""


Written = Mapping[str, Mapping[str, Any]]
"""Size and digest of files, by name."""


def save_state(
    folder: Path,
    state: State,
    config: SaveConfig,
    *,
    write: Callable[[Path], Written] | None = None,
) -> Path:
    """Write a save, `folder/step-000020`, in place of one of the same step; then remove those not
    to be kept.

    `write` writes the tensors into a folder, if they are not to be written here as one file for
    each group.
    """
    folder = Path(folder)
    final = folder / f"step-{state.step:06d}"
    with _errors_name(final):
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder.glob(".step-*.tmp"))  # of a run that was killed while it saved
        # which may replace a save that is damaged or abandoned
        with atomic_folder(final) as temporary:
            temporary.mkdir()
            _write_index(temporary, state, (write or partial(_write_files, state))(temporary))
        # The rename has to survive a power failure, too.
        _flush_folder(folder)
        prune_saves(folder, state.step, config)
    return final


def save_sharded(
    folder: Path, state: State, config: SaveConfig, shards: "Shards"
) -> Callable[[], Path]:
    """Prepare a save; all ranks call it with their rows, which are copied to the host.

    Args:
        folder: As for `save_state`.
        state: What to save; it may change as soon as this returns.
        config: As for `save_state`.
        shards: The ranks' rows.

    Returns:
        What writes the save, in a thread of each rank. It is complete once the index has the
        digests of every rank's file. It raises a UserError on all ranks if one of them cannot
        write: earlier saves stay, and no partial files remain.
    """
    # imports parts of torch that take seconds
    from ditkit_core.distributed.sharded_checkpoint import write_part

    part, ranks, state = shards.part(state.tensors), shards.for_files, replace(state, tensors={})

    def write(temporary: Path) -> Written:
        ranks.broadcast_object(temporary.name)
        return write_part(temporary, part, ranks)

    def save() -> Path:
        if ranks.is_first:
            return save_state(folder, state, config, write=write)
        write_part(folder / ranks.broadcast_object(""), part, ranks)
        return folder / f"step-{state.step:06d}"

    return save


def _write_files(state: State, folder: Path) -> Written:
    files = {}
    for name, tensors in state.tensors.items():
        if tensors:
            path = folder / f"{name}.safetensors"
            save_file(
                {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path
            )
            flush(path)
            files[path.name] = {"bytes": path.stat().st_size, "blake2b": file_hash(path)}
    return files


def _write_index(folder: Path, state: State, files: Written) -> None:
    index = _FORMAT | {
        "step": state.step,
        "held_out": state.held_out,
        "metrics": state.metrics,
        "values": state.values,
        "versions": {"ditkit-core": ditkit_core.__version__, "torch": torch.__version__},
        "files": files,
    }
    text = json.dumps({**index, _DIGEST: json_hash(index)}, indent=1)
    (folder / INDEX).write_text(text, encoding="utf-8", newline="\n")
    flush(folder / INDEX)
    _flush_folder(folder)


def load_state(
    path: Path, shards: "Shards | None" = None, groups: Collection[str] = GROUPS
) -> State:
    """Read a save whose files `latest` or `check_save` verified; of its tensors, only some groups.

    The tensors are copies on the CPU, so that the files can be removed meanwhile (Windows). With
    `shards`, they are this rank's rows.
    """
    path = Path(path)
    with _permission_named(path):
        if (index := _index(path)) is None:
            raise UserError(f"{path}: {_NOT_A_SAVE}; choose another save")
    tensors: dict[str, dict[str, Tensor]] = {}
    if any(map(_is_shard, index["files"])):
        # imports parts of torch that take seconds
        from ditkit_core.distributed.sharded_checkpoint import read_sharded

        tensors = read_sharded(path, shards, groups)
    for name in index["files"] if not tensors else ():
        if name.removesuffix(".safetensors") not in groups:
            continue
        with safe_open(path / name, framework="pt") as file:
            group = tensors[name.removesuffix(".safetensors")] = {}
            for key in list(file.keys()):
                group[key] = (
                    file.get_tensor(key).clone() if shards is None else shards.read(key, file)
                )
    return State(
        step=index["step"],
        tensors=tensors,
        values=index["values"],
        held_out=index["held_out"],
        metrics=index.get("metrics", ""),
    )


class Best(NamedTuple):
    """The save with the lowest held-out loss."""

    path: Path
    step: int
    held_out: float
    """Held-out loss at its step."""
    values: Mapping[str, Any]
    """`State.values`."""


def best(folder: Path) -> Best | None:
    """The save with the lowest held-out loss, the earliest of equals, or None. Its tensors are not
    verified."""
    saves = _saves(Path(folder))
    measured = [path for path in sorted(saves, key=_order) if saves[path]["held_out"] is not None]
    if not measured:
        return None
    path = min(measured, key=lambda path: saves[path]["held_out"])
    return Best(path, saves[path]["step"], saves[path]["held_out"], saves[path]["values"])


def latest(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest intact save in a folder; None if there is no save. `warn` gets a line for each
    damaged one."""
    fault = None
    for path in sorted(Path(folder).glob("step-*"), key=_order, reverse=True):
        fault = _fault(path)
        if fault is None:
            return path
        warn(f"{path}: {fault}; looking for the save before it")
    if fault is not None:
        raise UserError(
            f"no save in {folder} can be used; restore one, or remove the folder to start from the "
            f"beginning"
        )
    return None


def _order(path: Path) -> tuple[int, str]:
    return len(path.name), path.name  # numeric order, also for steps of more than six digits


def check_save(path: Path) -> None:
    """Verify all files of a save that was chosen by its name."""
    if (fault := _fault(path)) is not None:
        raise UserError(f"{path}: {fault}; choose another save")


_NOT_A_SAVE = "not a complete save of ours (state.json is missing, damaged or of another version)"


def _fault(path: Path) -> str | None:
    """What is wrong with a save; None if it is intact."""
    with _permission_named(path):
        if (index := _index(path)) is None:
            return _NOT_A_SAVE
        for name, expected in index["files"].items():
            file = path / name
            if (
                not file.is_file()
                or file.stat().st_size != expected["bytes"]
                or file_hash(file) != expected["blake2b"]
            ):
                return f"{name} is missing or damaged"
    return None


@contextmanager
def _permission_named(path: Path) -> Iterator[None]:
    """A file that may not be read is not damaged: an older save in its place would silently lose
    steps."""
    try:
        yield
    except PermissionError as error:
        file = error.filename or path
        raise UserError(
            f"{file} cannot be read ({error.strerror}); correct its permissions"
        ) from error


def _saves(folder: Path) -> dict[Path, dict[str, Any]]:
    """The saves of ours that can be read, with their indices."""
    saves = {}
    for path in folder.glob("step-*"):
        with suppress(PermissionError):
            if (index := _index(path)) is not None:
                saves[path] = index
    return saves


def _index(path: Path) -> dict[str, Any] | None:
    """The content of a save's index; None if anything about it is not as `save_state` wrote it."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        digest = index.pop(_DIGEST, None)
        is_intact = _is_ours(index) and (digest is None or digest == json_hash(index))
        # A folder that was renamed would resume at another step than its name says.
        return index if is_intact and path.name == f"step-{index['step']:06d}" else None
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_ours(index: Mapping[str, Any]) -> bool:
    """Whether an index is well-formed. Indices of earlier versions have no digest, so changes in
    them cannot be detected."""
    values = index["values"]
    clips = values.get("held_out_before_clips", {}).values()
    numbers = [
        *(index["held_out"], values.get("held_out_before"), values.get("held_out_last")),
        *(values.get("held_out_interval") or ()),
        *values.get("sentinels", {}).values(),
        *itertools.chain.from_iterable(clips),
    ]
    return (
        index.items() >= _FORMAT.items()
        and isinstance(index["step"], int)
        and isinstance(values["optimizer"], dict)
        and all(number is None or isinstance(number, int | float) for number in numbers)
        and any(name == "trainable.safetensors" or _is_shard(name) for name in index["files"])
        and all(
            isinstance(file["bytes"], int) and isinstance(file["blake2b"], str)
            for file in index["files"].values()
        )
    )


def _is_shard(name: str) -> bool:
    return name.startswith("shard-")


def prune_saves(folder: Path, step: int, config: SaveConfig) -> None:
    """Keep the last and the best saves up to `step`. Later ones are removed: they are of a run that
    was resumed before them.

    Folders that are not saves of ours are left alone.
    """
    saves = _saves(folder)
    past = sorted((path for path, index in saves.items() if index["step"] <= step), key=_order)
    measured = [path for path in past if saves[path]["held_out"] is not None]
    best = sorted(measured, key=lambda path: saves[path]["held_out"])[: config.keep_best]
    for path in saves.keys() - {*past[-config.keep_last :], *best}:
        # Hidden first: if the run is killed while it removes a save, no half removed save remains
        # visible.
        hidden = temporary_path(path)
        with suppress(OSError):  # Windows keeps a folder that is open; the next save removes it
            os.rename(path, hidden)
            _remove([hidden])


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.exists():
            # Windows keeps a folder that is open; the next save removes it
            shutil.rmtree(folder, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    if os.name != "nt":  # Windows cannot open a folder as a file
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot write {path}: {reason}; free some space or choose another folder"
        ) from error
