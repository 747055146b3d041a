"""Atomic writes, reading text and JSON, and checks on paths in datasets."""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ditkit_core.errors import UserError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file atomically: readers see the old file or the new one, even after a crash.

    Yields:
        A temporary path in the same folder. When the block ends, it is flushed to disk and renamed to `path`; after an error it is removed.

    Raises:
        UserError: If the file cannot be written (full disk, no permission); the message names the path.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        # Without fsync a power failure could leave the new name with none of its content.
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        ) from error
    finally:
        with suppress(OSError):  # a parent that is not a folder has been reported already
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def read_text(path: Path) -> str:
    """Read a UTF-8 text file; a byte order mark is removed.

    Raises:
        UserError: If the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its permissions or remove it") from error


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

    Raises:
        UserError: If the resolved path (links followed) is outside `folder`.
    """
    root = Path(folder).resolve()
    path = (root / relative).resolve()
    if not allow_outside and not path.is_relative_to(root):
        raise UserError(
            f"{relative!r} leaves the dataset folder {folder}; move the file inside or set data.allow_outside = true"
        )
    return path


def refuse_backslashes(path: str) -> None:
    """Refuse a path that does not exist and has backslashes, if this system is not Windows.

    Raises:
        UserError: If the path has backslashes; the message has the path with slashes.
    """
    if "\\" not in path or os.sep == "\\":
        return
    if re.match(r"[A-Za-z]:|\\\\", path):
        raise UserError(
            f"{path} is a Windows path; write the path on this machine, or move the file into the dataset folder"
        )
    slashes = path.replace("\\", "/")
    raise UserError(f"{path} is written with backslashes, as on Windows; write {slashes}")


def read_json_object(path: Path, remedy: str = "fetch it again") -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Args:
        path: The file.
        remedy: What the user should do if the file contains anything else.

    Returns:
        The object.

    Raises:
        UserError: If the file cannot be read, or does not contain a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its permissions") from error
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON; {remedy}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object; {remedy}")
    return found
