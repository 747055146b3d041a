"""What may change between two parts of one run.

Each key says by its `resume` rule whether it may change silently, may change and is logged, or would make it another
run. Continuing with whatever file is passed is how runs fork without anybody noticing.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ditkit_core.config.schema import config_fields, config_values
from ditkit_core.errors import UserError


class ConfigChange(NamedTuple):
    """One key whose value differs from the stored one."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.old)} -> {_shown(self.new)}"


class Changes(NamedTuple):
    """What differs between a stored configuration and a new one; free changes are left out."""

    stated: list[ConfigChange]
    """Applied and logged; also keys that this version no longer knows (their new value is None)."""
    refused: list[ConfigChange]
    """Would make it another run."""


def compare(stored: Mapping[str, Any], config: Any) -> Changes:
    """Compare a stored configuration with a new one by the resume rule of each key.

    Args:
        stored: Values of the stored file by dotted key. A key that it lacks (an older version wrote it) counts as the
            default, which is what that run was trained with.
        config: The new configuration, a tree of dataclasses.
    """
    fields, values = config_fields(type(config)), config_values(config)
    changes = Changes(stated=[], refused=[])
    default = type(config)()
    before = config_values(default) | dict(stored)
    for key, old in before.items():
        if key not in fields:
            changes.stated.append(ConfigChange(key, old, None))
        elif old != values[key] and fields[key].resume != "free":
            listed = changes.refused if fields[key].resume == "refused" else changes.stated
            listed.append(ConfigChange(key, old, values[key]))
    return changes


def refuse(refused: Iterable[ConfigChange], folder: Path) -> UserError:
    """The error for changes that would make it another run."""
    return UserError(
        f"{folder} holds another run, refused to continue it with {'; '.join(map(str, refused))}: put these back, or start "
        f"a new run from its weights with --run.folder NEW --init-from {folder}"
    )


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
