"""Atomic writes, reading text and JSON, and checks on paths in datasets."""

import codecs
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ditkit_core.config.foreign_files import HEAD_BYTES, mark_of
from ditkit_core.errors import UserError

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle")
"""Suffixes of files that can run code when they are read."""

_MAX_JSON_BYTES = 2**28  # the largest vocabularies take 35 MB
UNFINISHED_SECONDS = 3600.0
"""Age from which a temporary file is certainly not being written any more."""
_TEMPORARY = re.compile(r"\..+\.(?:(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-)?[0-9a-f]{8}\.tmp")


def temporary_path(path: Path) -> Path:
    """A new hidden name in the same folder, under which a file or folder is written before it is
    renamed to `path`.

    It says which process writes it, and on which machine, and contains only the start of a long
    name, because a file name has at most 255 bytes.
    """
    start = os.fsdecode(os.fsencode(path.name)[:128])
    return path.with_name(f".{start}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


@cache
def _machine() -> str:
    """The scope in which a process id is unique: this machine since it started, or a container on
    it."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # on Linux alone; elsewhere an id may be used again after a restart
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=4).hexdigest()


def _is_left(path: Path) -> bool:
    """Whether the process that wrote a temporary file is gone."""
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    process = int(match["process"] or 0)
    if match["machine"] == _machine():
        import psutil  # here, because it takes longer than all of this module

        # This process writes nothing while it looks: an earlier one had the same id.
        return process == os.getpid() or not psutil.pid_exists(process)
    return time.time() - path.stat().st_mtime >= UNFINISHED_SECONDS


def remove_unfinished(paths: Iterable[Path]) -> None:
    """Remove what killed writes have left: temporary files, and temporary folders that were never
    renamed.

    A running process keeps what it writes. Where nobody can say whether it runs (another machine,
    names of earlier versions), a file stays for an hour.

    Args:
        paths: Any paths; those without a temporary name stay.
    """
    for path in list(paths):
        # removed with its folder, or open on Windows: the next call removes it
        with suppress(OSError):
            if _is_left(path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
    )


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file atomically: readers see the old file or the new one, even after a crash.

    Yields:
        A temporary path in the same folder. When the block ends, it is flushed to disk and renamed
        to `path`; after an error it is removed.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        # Without fsync a power failure could leave the new name with none of its content.
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with suppress(OSError):  # a parent that is not a folder has been reported already
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Write a folder atomically: it gets its name when it is complete, and replaces a folder of
    this name.

    Yields:
        A temporary path for the new folder; after an error it is removed.
    """
    temporary, replaced = temporary_path(path), temporary_path(path)
    try:
        yield temporary
        if path.exists():  # a folder cannot be renamed over another on Windows
            os.rename(path, replaced)
        os.rename(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        for left in (temporary, replaced):
            shutil.rmtree(left, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically. A byte order mark of the file that it replaces stays: without it
    spreadsheets read a table in another encoding."""
    has_mark = path.is_file() and head_of(path).startswith(codecs.BOM_UTF8)
    with atomic_write(path) as temporary:
        encoding = "utf-8-sig" if has_mark else "utf-8"
        temporary.write_text(text, encoding=encoding, newline="\n")


def read_text(path: Path) -> str:
    """Read a UTF-8 text file; a byte order mark is removed."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); correct its permissions or remove it"
        ) from error


def head_of(path: Path) -> bytes:
    """The first bytes of a file, by which it is recognised; empty if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(HEAD_BYTES)
    return b""


def file_hash(path: Path) -> str:
    """Hex digest (blake2b, 128 bits) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def json_hash(value: Any) -> str:
    """Hex digest (blake2b, 128 bits) of a JSON value, whatever the order of its keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def inside(folder: Path, relative: str, *, allow_outside: bool = False) -> Path:
    """Resolve a path in a dataset, and refuse one that is outside the dataset's folder.

    Downloaded metadata could otherwise name any file of this machine.

    Args:
        folder: The folder that the path must be in.
        relative: The path as written in the dataset.
        allow_outside: Whether the user allowed paths outside (`data.allow_outside`).

    Returns:
        The resolved path.
    """
    root = Path(folder).resolve()
    path = (root / relative).resolve()
    if not allow_outside and not path.is_relative_to(root):
        raise UserError(
            f"{relative!r} leaves the dataset folder {folder}; move the file inside or set "
            f"data.allow_outside = true"
        )
    return path


def refuse_backslashes(path: str) -> None:
    """Refuse a path that does not exist and has backslashes, if this system is not Windows."""
    if "\\" not in path or os.sep == "\\":
        return
    if re.match(r"[A-Za-z]:|\\\\", path):
        raise UserError(
            f"{path} is a Windows path; write the path on this machine, or move the file into the "
            f"dataset folder"
        )
    slashes = path.replace("\\", "/")
    raise UserError(f"{path} is written with backslashes, as on Windows; write {slashes}")


def local_path(path: str) -> Path:
    """A path as a user writes it, with `~` replaced; `~name` stays as it is if there is no such
    user."""
    with suppress(ValueError):  # of a character that no path can have
        # Path.expanduser raises RuntimeError if there is no such user
        path = os.path.expanduser(path)
    return Path(path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a file or folder, while it is looked at or read,
    into one line."""
    try:
        yield
    except OSError as error:
        remedy = (
            "check the path"
            if isinstance(error, FileNotFoundError)
            else "correct its permissions or check the disk"
        )
        raise UserError(
            f"{error.filename or path} cannot be read ({error.strerror or error}); {remedy}"
        ) from error


_FETCH_AGAIN = "fetch it again"


def parse_json_object(
    content: str | bytes, where: object, remedy: str = _FETCH_AGAIN
) -> dict[str, Any]:
    """Parse JSON of unknown origin that must be an object.

    Args:
        content: The JSON.
        where: The file, or the part of it, for messages.
        remedy: What the user should do if it is anything else.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_without_repeats)
    # RecursionError: the parser calls itself once per bracket.
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        head = content[:HEAD_BYTES]
        kind, _, fetch = mark_of(head.encode() if isinstance(head, str) else head).partition("; ")
        remedy = fetch if fetch and remedy == _FETCH_AGAIN else remedy
        raise UserError(
            f"{where} {kind or f'is not readable JSON ({reason})'}; {remedy}"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object; {remedy}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json.loads alone keeps the last of two equal keys, where another program may keep the first.
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"{next(key for key in entries if keys.count(key) > 1)[:80]!r} appears twice"
        )
    return entries


def read_json_object(path: Path, remedy: str = _FETCH_AGAIN, problem: str = "") -> dict[str, Any]:
    """Read a JSON file of unknown origin that must contain an object.

    Args:
        remedy: What the user should do if it is anything else.
        problem: What that means for the caller, between the path and the reason: `cannot be used:
            it`.

    Raises:
        UserError: If it is not a file that can be read, is larger than 256 MiB, or as
            `parse_json_object`.
    """
    with readable(path):
        about = path.stat()
        # A pipe or a device would be waited for, or never end.
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_JSON_BYTES:
            raise UserError(
                f"{path} is not a file of at most {_MAX_JSON_BYTES >> 20} MiB; {remedy}"
            )
        content = path.read_bytes()
    return parse_json_object(content, f"{path} {problem}".rstrip(), remedy)


def json_part(path: Path, *keys: str) -> dict[str, Any]:
    """An object in a file of a run's folder, behind these keys; empty where the file or the object
    is missing or damaged."""
    value: Any = {}
    with suppress(UserError):
        value = read_json_object(path)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def dicts_of(values: Any) -> list[dict[str, Any]]:
    """The objects of a list from JSON; anything else in it is skipped, as is anything but a
    list."""
    return (
        [entry for entry in values if isinstance(entry, dict)] if isinstance(values, list) else []
    )


def refuse_pickles(path: Path, safe_names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse a pickle, or a folder whose only weights are pickles.

    Args:
        safe_names: For known pickles, by name: the file to get instead.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    pickles = [file for file in files if file.suffix.lower() in PICKLES]
    if any(file.suffix == ".safetensors" for file in files):
        pickles = []
    if pickles:
        name = pickles[0].name
        instead = safe_names.get(name, "the same weights as .safetensors")
        raise UserError(
            f"{pickles[0]} is a pickle, and reading a pickle runs the code in it; get {instead} "
            f"instead of {name}"
        )


def flush(path: Path) -> None:
    """Have a file survive a power failure."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
