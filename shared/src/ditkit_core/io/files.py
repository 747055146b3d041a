"""Files that are whole or absent, and paths that stay where they belong."""

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
    """Write a file so that a reader, or a crash, sees the old one or the new one and nothing between.

    Yields a temporary path in the same folder; when the block ends well it is flushed to disk and renamed over `path`,
    otherwise it is removed.

    Raises:
        UserError: If the file cannot be written (full disk, no permission), naming the path.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        ) from error
    finally:
        with suppress(OSError):  # a parent that is no folder has been reported already
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises:
        UserError: If it cannot be read, or is none.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it again as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its permissions or remove it") from error


def file_hash(path: Path) -> str:
    """Hex digest (blake2b, 128 bits) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def inside(folder: Path, relative: str, *, allow_outside: bool = False) -> Path:
    """Resolve a path that a dataset names, refusing one that leaves its folder.

    Args:
        folder: The folder that the path must stay in.
        relative: The path as written in the dataset.
        allow_outside: True when the person allowed it by name.

    Raises:
        UserError: If the resolved path (links followed) lies outside `folder`.
    """
    root = Path(folder).resolve()
    path = (root / relative).resolve()
    if not allow_outside and not path.is_relative_to(root):
        raise UserError(
            f"{relative!r} leaves the dataset folder {folder}; move the file inside or set data.allow_outside = true"
        )
    return path


def refuse_backslashes(path: str) -> None:
    """Say of a path that leads nowhere that it is written for Windows, where this is another system.

    Raises:
        UserError: If it has backslashes, with the path to write.
    """
    if "\\" not in path or os.sep == "\\":
        return
    if re.match(r"[A-Za-z]:|\\\\", path):
        raise UserError(
            f"{path} is a path of Windows; write where the file is on this machine, or move it into the dataset folder"
        )
    slashes = path.replace("\\", "/")
    raise UserError(f"{path} is written with backslashes, as on Windows; write {slashes}")


def read_json_object(path: Path, remedy: str = "fetch it again") -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
        path: The file.
        remedy: What to do about one that holds something else.

    Raises:
        UserError: If it cannot be read or is no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its permissions") from error
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON; {remedy}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object; {remedy}")
    return found
