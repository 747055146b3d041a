"""`FILE@strength`: how an adapter file is named wherever one is used at a strength. Imports no
torch."""

from pathlib import Path

from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path

MAX_STRENGTH = 100
"""Largest magnitude of a strength in `base.merge`. Beyond it no adapter makes sense; it is a typing
error."""


def parse_merge(entry: str, key: str = "base.merge") -> tuple[Path, float]:
    """Parse `FILE@strength`, or `FILE` with a strength of 1, of a setting."""
    # A file whose own name has an @ counts as a file.
    file, at, strength = entry.rpartition("@")
    if not at or local_path(entry).is_file():
        return local_path(entry), 1.0
    try:
        value = float(strength)
    except ValueError as error:
        raise UserError(
            f"{key}: {entry!r} is not FILE@strength; write a number after the @"
        ) from error
    if not abs(value) <= MAX_STRENGTH:
        raise UserError(
            f"{key}: the strength of {entry!r} is not between -{MAX_STRENGTH} and {MAX_STRENGTH}"
        )
    return local_path(file), value
