"""A content-addressed store of tensors, and remembered content hashes of media files.

The name of an entry is a digest of everything that it depends on. So an entry is never stale: a changed input gets another name. Files are
safetensors, written atomically.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.files import atomic_write, file_hash, write_text

_SETTLED_NANOSECONDS = 2_000_000_000
"""Files that changed more recently may change again without another modification time (FAT stores even seconds)."""
_SAVE_EVERY = 100
"""Number of new hashes after which they are saved."""

DIGEST = "ditkit_digest"
"""Key in a file's header under which the `digest` of its tensors is stored."""

Taken = TypeVar("Taken")
Read = Callable[[str, str], dict[str, Taken] | None]


def key(*parts: str) -> str:
    """Hex digest (blake2b, 128 bits) of an ordered list of texts."""
    # As JSON, not joined: ("ab", "c") and ("a", "bc") must not get the same key.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hex digest (blake2b, 128 bits) of named CPU tensors, their dtypes and shapes."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Cache:
    """Named tensors on disk, by kind (`media`, `text`) and key."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which is created when the first entry is written."""
        self.folder = Path(folder)

    def has(self, kind: str, key: str) -> bool:
        """Whether an entry exists and is complete; a truncated or foreign file is removed and counts as absent.

        The modification time of an existing entry is set to now, because pruning by age looks at the last use.
        """
        there = self._read(kind, key, lambda file: {}) is not None
        if there:
            with suppress(OSError):  # the cache may be read-only
                os.utime(self._path(kind, key))
        return there

    def shapes(self, kind: str, key: str) -> dict[str, tuple[int, ...]] | None:
        """The shapes of an entry's tensors, read from its header; None if it is absent."""
        return self._read(
            kind, key, lambda file: {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        )

    def get(self, kind: str, key: str) -> dict[str, Tensor] | None:
        """The tensors of an entry on the CPU, or None if it is absent; a truncated or foreign file is removed."""

        def tensors(file: Any) -> dict[str, Tensor]:
            names = file.keys()
            # Copied, because the tensors are views of the mapped file: it would be read only when they are used.
            return {name: file.get_tensor(name).clone() for name in names}

        return self._read(kind, key, tensors)

    def found(self, read: Read[Taken], kind: str, key: str, name: str) -> dict[str, Taken]:
        """Read an entry that was encoded before, with `get` or `shapes`.

        Raises:
            UserError: If the entry was removed since; the message contains `name`.
        """
        taken = read(kind, key)
        if taken is None:
            raise UserError(f"the cache {self.folder} no longer contains {name}; start again to encode it")
        return taken

    def put(self, kind: str, key: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write an entry atomically.

        Args:
            kind: `media` or `text`.
            key: The result of `key` for everything that the entry depends on.
            tensors: Tensors by name; copied to the CPU.
            metadata: Information for people who inspect the file; not read back.

        Raises:
            UserError: If the entry cannot be written.
        """
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with atomic_write(self._path(kind, key)) as temporary:
            try:
                save_file(contiguous, temporary, {**metadata, "ditkit_key": key, DIGEST: digest(contiguous)})
            except SafetensorError as error:  # how safetensors reports a full disk
                raise OSError(str(error)) from error

    def entries(self) -> Iterator[Path]:
        """The files of all entries, sorted by kind and key."""
        for path in sorted(self.folder.glob("*/??/*.safetensors")):
            if path.stem.startswith(path.parent.name):
                yield path

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / key[:2] / f"{key}.safetensors"

    def _read(self, kind: str, key: str, take: Callable[[Any], dict[str, Taken]]) -> dict[str, Taken] | None:
        path = self._path(kind, key)
        if not path.is_file():
            return None
        try:
            # Opening checks the file's length against its header.
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("ditkit_key") == key:
                    return take(file)
        except SafetensorError:
            pass
        # Removed and not repaired: if the entry is needed, encoding it again is always correct.
        path.unlink(missing_ok=True)
        return None


class MediaHashes:
    """Content hashes of files, remembered by path, size and modification time, so that a second run does not read the files again.

    A context manager: new hashes are saved when it ends, and occasionally before.
    """

    def __init__(self, folder: Path) -> None:
        """Load the hashes in `hashes.json` of this folder; an unreadable file counts as empty."""
        self._file = Path(folder) / "hashes.json"
        self._unsaved = 0
        self._known: dict[str, list[int | str]] = {}
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            pass

    def of(self, path: Path) -> str:
        """The content hash of a file, or of a folder's files and their names.

        Raises:
            UserError: If the file cannot be read.
        """
        if path.is_dir():
            return key("folder", *(text for file in _files_in(path) for text in (file.name, self.of(file))))
        name = str(Path(path).resolve())
        try:
            stat = Path(path).stat()
            state: list[int | str] = [stat.st_size, stat.st_mtime_ns]
            match self._known.get(name):
                case [size, modified, str(digest)] if [size, modified] == state:
                    return digest
            digest = file_hash(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; correct the path or its permissions") from error
        # A file can change twice within the resolution of modification times. So a very recent file is hashed, but not remembered.
        if time.time_ns() - stat.st_mtime_ns > _SETTLED_NANOSECONDS:
            self._known[name] = [*state, digest]
            self._unsaved += 1
            if self._unsaved >= _SAVE_EVERY:
                self.save()
        return digest

    def bytes_to_read(self, path: Path) -> int:
        """Number of bytes that `of` would read: 0 if the hash is remembered or the file does not exist."""
        if path.is_dir():
            return sum(map(self.bytes_to_read, _files_in(path)))
        try:
            stat = Path(path).stat()
        except OSError:
            return 0
        match self._known.get(str(Path(path).resolve())):
            case [size, modified, str()] if [size, modified] == [stat.st_size, stat.st_mtime_ns]:
                return 0
        return stat.st_size

    def save(self) -> None:
        """Write the hashes atomically if there are new ones; in a read-only cache they are not saved."""
        if self._unsaved:
            with suppress(UserError):
                write_text(self._file, json.dumps(self._known, indent=0))
            self._unsaved = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.save()


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
