"""`FILE@strength`: how an adapter file is named wherever one is used at a strength. Imports no
torch."""

from pathlib import Path

from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path
from ditkit_core.models.paths import hub_file, is_hub_file, nothing_fetched

MAX_STRENGTH = 100
"""Largest magnitude of a strength in `base.merge`. Beyond it no adapter makes sense; it is a typing
error."""


def parse_merge(entry: str, key: str = "base.merge") -> tuple[Path, float]:
    """Parse `FILE@strength`, or `FILE` with a strength of 1, of a setting. The hub id of an
    assistant is downloaded, if it is not in the local cache."""
    # A file whose own name has an @ counts as a file.
    file, at, strength = entry.rpartition("@")
    if not at or local_path(entry).is_file():
        return _file(entry, key), 1.0
    try:
        value = float(strength)
    except ValueError as error:
        raise UserError(
            f"{key}: {entry!r} is not FILE@strength; write a number after the @"
        ) from error
    check_strength(value, f"{key} = {entry!r}")
    return _file(file, key), value


def _file(name: str, key: str) -> Path:
    # Elsewhere owner/name/file is a path with a mistake in it, which must not wait for the hub.
    is_hub = key.startswith("base.assistant") and is_hub_file(name)
    return hub_file(name, key) if is_hub else local_path(name)


def is_to_be_fetched(entry: str) -> bool:
    """Whether an assistant has to be downloaded: a hub id, and not in the local cache."""
    try:
        with nothing_fetched():
            parse_merge(entry, "base.assistant")
    except UserError:
        return is_hub_file(entry) or is_hub_file(entry.rpartition("@")[0])
    return False


def check_strength(value: float, key: str) -> None:
    """Refuse a strength that is no sensible number."""
    if not abs(value) <= MAX_STRENGTH:
        raise UserError(
            f"{key}: the strength {value:g} is not between -{MAX_STRENGTH} and {MAX_STRENGTH}"
        )
