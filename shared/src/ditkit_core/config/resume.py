"""Comparing a stored configuration with a new one when a run is resumed.

The `resume` rule of each key says whether it may change silently, may change and is logged, or may
not change. Without these rules a run would continue with whatever file is passed, and nobody would
notice that it became another run.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ditkit_core.config.removed import REMOVED
from ditkit_core.config.schema import config_fields, config_values
from ditkit_core.errors import UserError


class ConfigChange(NamedTuple):
    """A key whose value differs from the stored one."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.old)} -> {_shown(self.new)}"


class Changes(NamedTuple):
    """The differences between a stored configuration and a new one, without free changes."""

    stated: list[ConfigChange]
    """Changes that are applied and logged, and keys that this version no longer knows (their new
    value is None)."""
    refused: list[ConfigChange]
    """Changes that are not allowed, because they would make another run."""


def compare(stored: Mapping[str, Any], config: Any) -> Changes:
    """Compare a stored configuration with a new one by the resume rule of each key.

    Args:
        stored: Values of the stored file by dotted key. If a key is missing (an older version wrote
            the file), the default counts, because that run was trained with it, or the value of the
            key that it was a part of.

    Returns:
        The changes by rule.
    """
    fields, values = config_fields(type(config)), config_values(config)
    changes = Changes(stated=[], refused=[])
    default = type(config)()
    before = config_values(default) | dict(stored)
    for key, old in before.items():
        if key not in fields:
            if key in REMOVED and old == REMOVED[key].default:
                continue
            changes.stated.append(ConfigChange(key, old, None))
        elif (
            key not in stored
            and (fields[key].asked_again or values[key] == stored.get(fields[key].part_of))
            or fields[key].is_set
            and sorted(old or ()) == sorted(values[key] or ())
        ):
            continue
        elif old != values[key] and fields[key].resume != "free":
            listed = changes.refused if fields[key].resume == "refused" else changes.stated
            listed.append(ConfigChange(key, old, values[key]))
    return changes


def refuse(refused: Iterable[ConfigChange], folder: Path) -> UserError:
    """The error for changes that would make another run."""
    changes = list(refused)
    remedy = f"start a new run from its weights with --run.folder NEW --init-from {shlex.quote(str(folder))}"
    # Its weights do not fit an adapter of another rank, scale or method.
    of_adapter = [change for change in changes if change.key.startswith("adapter.")]
    if of_adapter and not any("full" in (change.old, change.new) for change in of_adapter):
        adapters = sorted(folder.glob("exports/*.safetensors"))
        finished = folder / "exports" / f"{folder.name}.safetensors"
        file = str(finished if finished in adapters or not adapters else adapters[-1])
        remedy = f"build on its adapter in a new run with --run.folder NEW --base.merge {shlex.quote(file)}"
    return UserError(
        f"{folder} contains another run, refused to continue it with "
        f"{'; '.join(map(str, changes))}: undo these changes, or {remedy}"
    )


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
