"""Metadata of a run in files that people publish: every setting, but no folders of the machine."""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from ditkit_core.config.schema import config_fields
from ditkit_core.config.toml import flatten
from ditkit_core.models.paths import is_hub_id

# A column's name in front of a path, as in `camera=poses.csv`, is no part of the path.
_COLUMN = re.compile(r"([^/\\=]*=)?(.*)", re.DOTALL)
_BASE, _CONFIG = "ditkit.base", "ditkit.config"


def redact_paths(tree: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted key with each path reduced to its last part, and what is private to
    nothing; ids of a hub stay complete."""
    fields = config_fields(tree)

    def shown(key: str, value: Any) -> Any:
        holds = fields[key].holds if key in fields else "value"
        # Each entry of a list, such as the files of base.merge, is a path of its own.
        if isinstance(value, list):
            return [] if holds == "private" else [shown(key, entry) for entry in value]
        if holds == "private":
            return ""
        if holds == "value" or not isinstance(value, str):
            return value
        return redact_path(value) if holds == "part" else _last(value)

    return {key: shown(key, value) for key, value in values.items()}


def redact_path(value: str) -> str:
    """The last part of a path; an id of a hub stays complete."""
    return value if is_hub_id(value) else _last(value)


def published_header(tree: type, header: Mapping[str, str]) -> dict[str, str]:
    """The header of another file for a file that is made from it, redacted: an older version may
    have written complete paths."""
    redacted = dict(header)
    if _BASE in redacted:
        redacted[_BASE] = redact_path(redacted[_BASE])
    if _CONFIG in redacted:
        text = _published_config(tree, redacted[_CONFIG])
        if text is None:
            del redacted[_CONFIG]
        else:
            redacted[_CONFIG] = text
    return redacted


def _published_config(tree: type, text: str) -> str | None:
    """A header's configuration without paths; None if the text is not a configuration: another
    program wrote it."""
    with suppress(RecursionError, ValueError):
        tables = tomllib.loads(text)
        shown: dict[str, Any] = {}
        for key, value in redact_paths(tree, flatten(tables)).items():
            section, _, name = key.partition(".")
            table = shown.setdefault(section, {} if name else value)
            if name and isinstance(table, dict):
                table[name] = value
            elif name or table is not value:  # `a = 1` next to `"a.b" = 2`
                return None
        # Unchanged text stays as it was written, comments included.
        return text if shown == tables else tomli_w.dumps(shown)
    return None


def redact_description(content: bytes) -> bytes:
    """The bytes of a `config.json` in diffusers' layout, without the path from which diffusers
    loaded it."""
    with suppress(ValueError, RecursionError):
        description = json.loads(content)
        if isinstance(description, dict) and isinstance(
            path := description.get("_name_or_path"), str
        ):
            return (
                json.dumps({**description, "_name_or_path": redact_path(path)}, indent=2) + "\n"
            ).encode()
    return content


def _last(value: str) -> str:
    match = _COLUMN.fullmatch(value)
    assert match is not None, value
    column, path = match[1] or "", match[2]
    if path and _is_home(path):  # its last part is a person's name
        return f"{column}~"
    return column + re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _is_home(path: str) -> bool:
    """Whether a path is the home folder; False if there is none, as for a user without an entry in
    a container."""
    with suppress(ValueError):  # characters that no path can have
        # Not Path.expanduser, which raises if there is no home.
        return Path(os.path.expanduser(path)) == Path(os.path.expanduser("~"))
    return False
