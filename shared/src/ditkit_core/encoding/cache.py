"""A content-addressed store of tensors, and the memory of which file has which content.

An entry's name is a digest of everything that it depends on, so nothing is ever stale: what changes gets another name,
and what is there is right. Files are safetensors, written atomically.
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
_SAVE_EVERY = 100

DIGEST = "ditkit_digest"
"""Under which a file's header says what `digest` made of its tensors."""

Taken = TypeVar("Taken")
Read = Callable[[str, str], dict[str, Taken] | None]


def key(*parts: str) -> str:
    """Hex digest (blake2b, 128 bits) of an ordered list of texts."""
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
        """Use a folder, which is created with the first entry."""
        self.folder = Path(folder)

    def has(self, kind: str, key: str) -> bool:
        """Whether an entry is there and whole; a torn or foreign file is removed and counts as absent.

        One that is there is marked as needed now, which pruning by age goes by.
        """
        there = self._read(kind, key, lambda file: {}) is not None
        if there:
            with suppress(OSError):  # a cache that may only be read
                os.utime(self._path(kind, key))
        return there

    def shapes(self, kind: str, key: str) -> dict[str, tuple[int, ...]] | None:
        """The shapes of an entry's tensors, from its header alone; None as for `get`."""
        return self._read(
            kind, key, lambda file: {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        )

    def get(self, kind: str, key: str) -> dict[str, Tensor] | None:
        """The tensors of an entry on the CPU, or None if it is absent; a torn or foreign file is removed."""

        def tensors(file: Any) -> dict[str, Tensor]:
            names = file.keys()
            # Copies: the tensors lie in the mapped file, which would be read only when they are used.
            return {name: file.get_tensor(name).clone() for name in names}

        return self._read(kind, key, tensors)

    def found(self, read: Read[Taken], kind: str, key: str, name: str) -> dict[str, Taken]:
        """What `get` or `shapes` reads of an entry that was encoded before.

        Raises:
            UserError: If it has gone since, which names what it was.
        """
        taken = read(kind, key)
        if taken is None:
            raise UserError(f"the cache {self.folder} has lost {name}; start again to encode it")
        return taken

    def put(self, kind: str, key: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write an entry atomically.

        Args:
            kind: `media` or `text`.
            key: What `key` made of everything the entry depends on.
            tensors: By name; moved to the CPU.
            metadata: Texts for a person who looks into the file; not read back.

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
        """The files of all entries, in order of kind and key."""
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
        # Removed, not repaired: whoever needs the entry encodes it again, which is always right.
        path.unlink(missing_ok=True)
        return None


class MediaHashes:
    """Content hashes of files, remembered by path, size and modification time so that a second start reads nothing.

    A context manager: what was learned is saved at its end, and now and then before.
    """

    def __init__(self, folder: Path) -> None:
        """Remember in `hashes.json` of this folder; an unreadable memory is an empty one."""
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
        # Within the clock's grain a file can change again and keep its time: such a hash is used, not remembered.
        if time.time_ns() - stat.st_mtime_ns > _SETTLED_NANOSECONDS:
            self._known[name] = [*state, digest]
            self._unsaved += 1
            if self._unsaved >= _SAVE_EVERY:
                self.save()
        return digest

    def bytes_to_read(self, path: Path) -> int:
        """How much `of` would have to read of a file: nothing if it is remembered, or is not there."""
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
        """Write the memory, atomically, if there is anything new in it; in a cache that may only be read it is not kept."""
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
