"""A content-addressed store of tensors, whose entries are verified and pruned, and remembered
content hashes of media files.

The name of an entry is a digest of everything that it depends on. So an entry is never stale: a
changed input gets another name. Files are safetensors, written atomically.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ditkit_core.data.media.clip import IMAGE_SUFFIXES, changes_since_first
from ditkit_core.data.media.files import refuse_shortage
from ditkit_core.data.media.sound import sound_changes_since_first
from ditkit_core.errors import UserError
from ditkit_core.io.console import NullProgress, warn
from ditkit_core.io.files import atomic_write, file_hash, json_part, read_json_object, write_text
from ditkit_core.io.locks import alone_with

_SETTLED_NANOSECONDS = 2_000_000_000
"""Files that changed more recently may change again without another modification time (FAT stores
even seconds)."""
_BLOCK_BYTES = 2**14
"""Bytes of a block that is sampled of a file at each start."""
_SOUND = " (sound)"
"""Behind the name of a file whose sound alone is meant."""
_SAVE_EVERY = 100
"""Number of new hashes after which they are saved."""

DIGEST = "ditkit_digest"
"""Key in a file's header under which the `digest` of its tensors is stored."""
_LAYOUT = "ditkit_layout"
"""Key of the digest of names, dtypes and shapes alone, which can be compared without reading the
tensors."""
_MEDIA_TENSOR = "latents"
"""The tensor that every entry of kind `media` has."""

_ahead = ContextVar("ahead", default=False)

Content = TypeVar("Content")
Read = Callable[[str, str], dict[str, Content] | None]

_DAY_SECONDS = 86400
_UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SETTLED_SECONDS = 3600
"""Entries that were used more recently than this are never pruned: another run may need them."""


def key(*parts: str) -> str:
    """Hex digest (blake2b, 128 bits) of an ordered list of texts."""
    # As JSON, not joined: ("ab", "c") and ("a", "bc") must not get the same key.
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hex digest (blake2b, 128 bits) of named CPU tensors, their dtypes and shapes."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _layout(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return key("layout", json.dumps(sorted(shapes.items())))


@contextmanager
def reading_ahead() -> Iterator[None]:
    """Inside the block, for a background thread, a damaged entry is an error: encoding it again
    would meet the training on its device."""
    before = _ahead.set(True)
    try:
        yield
    finally:
        _ahead.reset(before)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open the file of an entry.

    Raises:
        FileNotFoundError: If there is none, or another process has just removed it.
        SafetensorError: If it is truncated or not such a file.
    """
    try:
        with open(path, "rb"):  # safe_open reports every file that it may not read as missing
            pass
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise
    except (MemoryError, RuntimeError) as error:
        # torch raises a RuntimeError if there is no room to map a file
        if isinstance(error, RuntimeError) and "unable to mmap" not in str(error):
            raise
        refuse_shortage(path, MemoryError())
    except OSError as error:
        refuse_shortage(path, error)
        reason = f"cannot read {path}: {error.strerror or error}"
        raise UserError(
            f"{reason}; correct its permissions, or set encode.cache to another folder"
        ) from error


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def header_matches(file: Any, key: str) -> bool:
    """Whether the header of an entry belongs to this key, and describes the tensors that were
    stored."""
    stored = file.metadata() or {}
    # Earlier versions did not store the layout.
    return stored.get("ditkit_key") == key and stored.get(_LAYOUT) in (None, _layout(_shapes(file)))


def matches_digest(file: Any, tensors: Mapping[str, Tensor]) -> bool | None:
    """Whether the tensors of an entry are those that were stored; None if an early version stored
    no digest."""
    stored = file.metadata() or {}
    return stored[DIGEST] == digest(tensors) if DIGEST in stored else None


def remove(path: Path) -> None:
    """Remove a file of the cache, if it is still there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot remove {path}: {error.strerror}; correct its permissions"
        ) from error


class Cache:
    """Named tensors on disk, by kind (`media`, `text`) and key.

    A truncated, damaged or foreign file is removed when it is read, with a warning, and counts as
    absent: encoding it again is always correct.
    """

    def __init__(self, folder: Path) -> None:
        """Use a folder, which is created when the first entry is written."""
        self.folder = Path(folder)
        self._compared: set[Path] = set()
        self.damaged: set[Path] = set()
        """The files of entries that were damaged, and are removed."""

    def has(self, kind: str, key: str) -> bool:
        """Whether an entry exists and is complete, by its header.

        The modification time of an existing entry is set to now, because pruning by age looks at
        the last use.
        """
        there = self._read(kind, key, _shapes) is not None
        if there:
            with suppress(OSError):  # the cache may be read-only
                os.utime(self.path(kind, key))
        return there

    def shapes(self, kind: str, key: str) -> dict[str, tuple[int, ...]] | None:
        """The shapes of an entry's tensors, read from its header; None if it is absent."""
        return self._read(kind, key, _shapes)

    def get(self, kind: str, key: str) -> dict[str, Tensor] | None:
        """The tensors of an entry on the CPU, or None if it is absent. The first time, they are
        compared with the stored digest."""
        path = self.path(kind, key)

        def tensors(file: Any) -> dict[str, Tensor] | None:
            # Copied, because the tensors are views of the mapped file: it would be read only when
            # they are used.
            values = {name: file.get_tensor(name).clone() for name in sorted(file.keys())}
            if path not in self._compared and matches_digest(file, values) is False:
                return None
            self._compared.add(path)
            return values

        return self._read(kind, key, tensors)

    def read_encoded(
        self,
        read: Read[Content],
        kind: str,
        key: str,
        name: str,
        encode_again: Callable[[], object] = lambda: None,
    ) -> dict[str, Content]:
        """Read an entry that was encoded before, with `get` or `shapes`; `encode_again` stores it
        again if it was damaged."""
        content = read(kind, key)
        if content is None and self.path(kind, key) in self.damaged and not _ahead.get():
            encode_again()
            content = read(kind, key)
        if content is None:
            raise UserError(
                f"the cache {self.folder} no longer contains {name}; start again to encode it"
            )
        return content

    def put(
        self, kind: str, key: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        """Write an entry atomically; `metadata` is for people who inspect the file, and not read
        back."""
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with atomic_write(self.path(kind, key)) as temporary:
            try:
                layout = _layout({name: tuple(tensor.shape) for name, tensor in contiguous.items()})
                header = {"ditkit_key": key, DIGEST: digest(contiguous), _LAYOUT: layout}
                save_file(contiguous, temporary, {**metadata, **header})
            except SafetensorError as error:  # how safetensors reports a full disk
                raise OSError(str(error)) from error

    def entries(self) -> Iterator[Path]:
        """The files of all entries, sorted by kind and key."""
        for path in sorted(self.folder.glob("*/??/*.safetensors")):
            if path.stem.startswith(path.parent.name):
                yield path

    def path(self, kind: str, key: str) -> Path:
        """The file of an entry, whether it exists or not."""
        return self.folder / kind / key[:2] / f"{key}.safetensors"

    def _read(
        self, kind: str, key: str, take: Callable[[Any], dict[str, Content] | None]
    ) -> dict[str, Content] | None:
        path = self.path(kind, key)
        try:
            with opened(path) as file:
                sound = header_matches(file, key) and (
                    kind != "media" or _MEDIA_TENSOR in _shapes(file)
                )
                if sound and (content := take(file)) is not None:
                    return content
        except FileNotFoundError:
            return None
        except SafetensorError:
            pass
        warn(f"the cache entry {path} is damaged: it is removed, and encoded again")
        remove(path)
        self.damaged.add(path)
        return None


class _FileState(NamedTuple):
    """By what a file is recognised as unchanged, without reading all of it."""

    size: int
    modified: int
    """Time of the last change of its content in nanoseconds; programs may set it."""
    changed: int
    """Time of the last change of its content, name or times in nanoseconds, which no program can
    set; on Windows the time of its creation."""
    # No inode: file systems of networks and clouds number files anew at each mount, and all of a
    # dataset would be read again.

    @classmethod
    def of(cls, path: Path) -> "_FileState":
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _sample(path: Path, size: int) -> str:
    """Hex digest (blake2b, 64 bits) of a file's beginning, middle and end."""
    hasher = hashlib.blake2b(digest_size=8)
    with open(path, "rb") as file:
        # A small file is read as a whole; of a large one three blocks, because each costs a disk
        # the same time as a small file.
        for at in (0,) if size <= 3 * _BLOCK_BYTES else (0, size // 2, size - _BLOCK_BYTES):
            file.seek(at)
            hasher.update(file.read(3 * _BLOCK_BYTES if size <= 3 * _BLOCK_BYTES else _BLOCK_BYTES))
    return hasher.hexdigest()


class MediaHashes:
    """Content hashes of files, remembered so that a second run does not read the files again.

    A hash is used again if the file's size, both times (`_FileState`) and a sample of its content
    are what they were. On Linux and macOS no program can change a file without the time of its last
    change. Elsewhere (Windows, some file systems of networks) the sample finds other content,
    unless it differs between the sampled blocks only; `forget` has everything read.

    A context manager: new hashes are saved when it ends, and occasionally before. Of several
    processes one is inside at a time, so that files that all of them need are read once.
    """

    def __init__(self, folder: Path) -> None:
        """Load the hashes in `hashes.json` of this folder; an unreadable file counts as empty."""
        self._file = Path(folder) / "hashes.json"
        self._unsaved = 0
        self._inside = ExitStack()
        self._entries: dict[str, list[int | str]] = json_part(self._file)
        self._compared: dict[str, _FileState] = {}
        """Files whose samples were compared, and their states then: windows of a file ask for its
        hash again and again."""

    def of(self, path: Path, *, as_stored: bool = False) -> str:
        """The content hash of a file, or of a folder's files and their names.

        If the content is read otherwise than by earlier versions (`changes_since_first`), that is
        part of it: entries of other files stay valid. With `as_stored` an image's colours are not
        converted when it is read, as for a mask.
        """
        try:
            if path.is_dir():
                parts = (
                    (file.name, self.of(file, as_stored=as_stored)) for file in _files_in(path)
                )
                return key("folder", *chain.from_iterable(parts))
            state = _FileState.of(path)
            digest, changes = self._remembered(path, state) or self._hashed(path, state)
        except OSError as error:
            refuse_shortage(path, error)
            raise UserError(
                f"cannot read {path}: {error.strerror}; correct the path or its permissions"
            ) from error
        is_as_ever = not changes or (as_stored and path.suffix.lower() in IMAGE_SUFFIXES)
        return digest if is_as_ever else f"{digest} {changes}"

    def of_sound(self, path: Path) -> str:
        """As `of`, for a file whose sound may be read: `sound_changes_since_first` is part of it
        too."""
        content, name = self.of(path), str(path.resolve())
        match self._entries.get(f"{name}{_SOUND}"):
            case [str(before), str(changes)] if before == content:
                pass
            case _:
                changes = sound_changes_since_first(path)
                if name in self._entries:  # not a very recent file, see `_hashed`
                    self._entries[f"{name}{_SOUND}"] = [content, changes]
                    self._unsaved += 1
        return f"{content} {changes}" if changes else content

    def _remembered(self, path: Path, state: _FileState) -> tuple[str, str] | None:
        """The hash of a file and its `changes_since_first`; None if they are not known, or of other
        content."""
        name = str(path.resolve())
        match self._entries.get(name):
            case [int(size), int(modified), int(changed), str(sample), str(digest), str(changes)]:
                if state != (size, modified, changed):
                    return None
                if self._compared.get(name) != state and sample != _sample(path, size):
                    return None
                self._compared[name] = state
                return digest, changes
        return None

    def _hashed(self, path: Path, state: _FileState) -> tuple[str, str]:
        """Read a file, and remember its hash and its `changes_since_first`."""
        sample = _sample(path, state.size)
        digest = file_hash(path)
        changes = changes_since_first(path)
        # A file can change twice within the resolution of modification times. So a very recent file
        # is hashed, but not remembered.
        if time.time_ns() - state.modified > _SETTLED_NANOSECONDS:
            self._entries[str(path.resolve())] = [*state, sample, digest, changes]
            self._unsaved += 1
            if self._unsaved >= _SAVE_EVERY:
                self.save()
        return digest, changes

    def bytes_to_read(self, path: Path) -> int:
        """Number of bytes that `of` would read: 0 if the hash is remembered or the file does not
        exist."""
        try:
            if path.is_dir():
                return sum(map(self.bytes_to_read, _files_in(path)))
            state = _FileState.of(path)
            return 0 if self._remembered(path, state) else state.size
        except OSError:
            return 0

    def forget(self) -> None:
        """Forget all hashes, so that each file is read when it is next needed, also one that has
        changed unnoticed."""
        self._entries, self._unsaved = {}, self._unsaved + 1

    def save(self) -> None:
        """Write the hashes atomically if there are new ones; in a read-only cache they are not
        saved."""
        if self._unsaved:
            with suppress(UserError):
                write_text(self._file, json.dumps(self._entries, indent=0))
            self._unsaved = 0

    def __enter__(self) -> Self:
        self._inside.enter_context(alone_with(self._file))
        self._entries = json_part(self._file)
        return self

    def __exit__(self, *exception: object) -> None:
        with self._inside:
            self.save()


def _files_in(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")
    )


def verify(cache: Cache, advance: Callable[[float], None] = NullProgress.advance) -> int:
    """Compare every entry with its stored digest; damaged ones, which are counted, are removed, and
    encoded again when they are needed."""
    unread = Cache(cache.folder)  # compares each entry, whatever this process has compared already
    for path in unread.entries():
        unread.get(path.parent.parent.name, path.stem)
        advance(1.0)
    return len(unread.damaged)


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Number and size of the entries that were removed from a cache, and of the remaining ones."""

    removed: int
    removed_bytes: int
    remaining: int
    left_bytes: int


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which entries of a cache to remove. Exactly one field is set."""

    unused: bool = False
    """Entries that no run needs."""
    days: float = 0.0
    """Entries that were last used more than this many days ago."""
    bytes: int = 0
    """The least recently used entries, until the cache has at most this size."""


def parse_rule(text: str) -> Rule:
    """Parse a rule: `unused`, `30d`, `50GB`."""
    written = text.strip().upper()
    if written == "UNUSED":
        return Rule(unused=True)
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([A-Z]+)", written, re.ASCII)
    if match and float(match[1]) > 0 and match[2] in {"D", *_UNITS}:
        number, unit = float(match[1]), match[2]
        return Rule(days=number) if unit == "D" else Rule(bytes=round(number * _UNITS[unit]))
    raise UserError(
        f"--prune-cache {text!r} is not a rule; write unused, or days such as 30d, or a size such "
        f"as 50GB"
    )


def prune(
    cache: Cache, rule: Rule, keep: Collection[str] = (), *, now: float | None = None
) -> Pruned:
    """Remove entries by a rule. Entries used within the last hour always stay, because another run
    may be in progress.

    `now` is the time in seconds since the epoch; None reads the clock.
    """
    now = time.time() if now is None else now
    for leftover in cache.folder.glob("**/.*.tmp"):  # of a process that was killed while it wrote
        with suppress(FileNotFoundError):
            if now - leftover.stat().st_mtime > _SETTLED_SECONDS:
                remove(leftover)
    entries = []
    for path in cache.entries():
        with suppress(FileNotFoundError):  # removed by another process
            entries.append((path.stat().st_mtime, path.stat().st_size, path))
    total_bytes = sum(size for _, size, _ in entries)
    removed = removed_bytes = 0
    for used, size, path in sorted(entries):
        selected = rule.unused or now - used > rule.days * _DAY_SECONDS
        if rule.bytes:
            selected = total_bytes - removed_bytes > rule.bytes
        if selected and path.stem not in keep and now - used > _SETTLED_SECONDS:
            remove(path)
            removed, removed_bytes = removed + 1, removed_bytes + size
    return Pruned(
        removed=removed,
        removed_bytes=removed_bytes,
        remaining=len(entries) - removed,
        left_bytes=total_bytes - removed_bytes,
    )


def keys_in(records: Iterable[Path]) -> set[str]:
    """The cache keys that runs need, read from the files in which they list their samples."""
    keys: set[str] = set()
    for record in records:
        for parts in read_json_object(record, "remove that run, or prune by age or size").values():
            if isinstance(parts, list):
                keys |= {part.rpartition(" ")[2] for part in parts if isinstance(part, str)}
    return keys
