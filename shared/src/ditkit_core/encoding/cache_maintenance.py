"""Cache maintenance: verifying entries against their digests, and pruning entries that are no
longer needed."""

import re
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.encoding.cache import Cache, remove
from ditkit_core.errors import UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.io.files import read_json_object

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
