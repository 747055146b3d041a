"""Configuration as TOML: reading it strictly, and writing it so that it can be read back."""

import difflib
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from ditkit_core.config.schema import config_fields, config_sections, config_values, plain, renamed_keys
from ditkit_core.config.validation import BACKSLASH_REMEDY, unknown_key, value_from_file
from ditkit_core.errors import UserError


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file without checking its keys.

    Raises:
        UserError: If the file cannot be read or is not TOML in UTF-8; the message names file and line.
    """
    try:
        # utf-8-sig: some editors on Windows write a byte order mark before the text.
        text = Path(path).read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot read the run file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; a run file is TOML, saved as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"{path} is not TOML: {' '.join(str(error).split())}{_backslash_remedy(text, error)}"
        ) from error
    except (RecursionError, ValueError) as error:  # ValueError: Python's limit on the digits of an integer
        raise UserError(
            f"{path} is nested too deeply or has a number with too many digits; correct the run file"
        ) from error


def _backslash_remedy(text: str, error: tomllib.TOMLDecodeError) -> str:
    """What to do if the line at fault has a backslash in double quotes, as of a path of Windows; empty if it has none."""
    found = re.search(r"at line (\d+)", str(error))
    line = text.splitlines()[int(found[1]) - 1] if found else ""
    return f"; {BACKSLASH_REMEDY}" if re.search(r'"[^"]*\\', line) else ""


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted key, unchecked."""
    flat = {}
    for section, table in tables.items():
        if isinstance(table, dict):
            flat.update({f"{section}.{name}": value for name, value in table.items()})
        else:
            flat[section] = table
    return flat


def read_config_file(tree: type, path: Path, *, stored: bool = False) -> dict[str, Any]:
    """Read and check the values of a run file, by dotted key.

    Args:
        stored: Whether a run stored the file, perhaps with another version: unknown keys are ignored, and former names are accepted.

    Raises:
        UserError: If the file cannot be read, a key or section is unknown, or a value has the wrong type.
    """
    where, known = f"in {path}", config_fields(tree)
    if stored:
        values = {key: value for key, value in read_stored_file(tree, path).items() if key in known}
    else:
        values = flatten(tables := read_toml(path))
        _check_keys(tables, tree, where)
    return {key: value_from_file(known[key], value, where) for key, value in values.items()}


def read_stored_file(tree: type, path: Path) -> dict[str, Any]:
    """Read the values that a run stored, unchecked, by dotted key; renamed keys get their present names.

    Raises:
        UserError: If the file cannot be read or is not TOML in UTF-8.
    """
    values, renamed = flatten(read_toml(path)), renamed_keys(tree)
    # A file with both names was written by the present version, so the present name takes precedence.
    return {renamed.get(key, key): value for key, value in values.items() if renamed.get(key) not in values}


def _check_keys(tables: Mapping[str, Any], tree: type, where: str) -> None:
    """Raise UserError for the first unknown section or key."""
    sections, known = config_sections(tree), config_fields(tree)
    for section, table in tables.items():
        if section in sections and not isinstance(table, dict):
            raise UserError(f"{section} {where} is a section: write [{section}] and its keys below it")
        if section not in sections and isinstance(table, dict):
            raise _unknown_section(section, table, tree, where)
    for key in flatten(tables):
        if key not in known:
            raise unknown_key(key, known, where, renamed=renamed_keys(tree))


def _unknown_section(section: str, table: Mapping[str, Any], tree: type, where: str) -> UserError:
    """The error for an unknown section: it suggests a close section, or else a key close to the section's first key."""
    if close := difflib.get_close_matches(section, config_sections(tree), n=1):
        return UserError(f"unknown section [{section}] {where}; did you mean [{close[0]}]?")
    if not table:
        return UserError(f"unknown section [{section}] {where}; the sections are {', '.join(config_sections(tree))}")
    return unknown_key(f"{section}.{next(iter(table))}", config_fields(tree), where)


def to_toml(
    config: Any, *, shown: Callable[[type, Mapping[str, Any]], Mapping[str, Any]] = lambda _, values: values
) -> str:
    """A resolved configuration as TOML, with the description of each key as a comment; it reads back to the same configuration.

    Args:
        shown: From its class and its values by dotted key to the values that are written.
    """
    tree = type(config)
    values = shown(tree, config_values(config))
    # tomli_w cannot write comments, and people read in this file what each key means.
    lines = {section: [f"[{section}]"] for section in config_sections(tree)}
    for key, field in config_fields(tree).items():
        section, name = key.split(".")
        lines[section] += _comment(field.doc)
        # TOML has no null: an optional value that is not set becomes a comment.
        lines[section].append(f"# {name} =" if values[key] is None else f"{name} = {_toml_value(values[key])}")
    return "\n\n".join("\n".join(section) for section in lines.values()) + "\n"


@cache
def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")


def changes_to_toml(config: Any) -> str:
    """What differs from the defaults, as TOML without comments: the shortest run file of a configuration."""
    fields = config_fields(type(config))
    sections: dict[str, list[str]] = {}
    for key, value in config_values(config).items():
        if value != plain(fields[key].default):
            section, name = key.split(".")
            sections.setdefault(section, [f"[{section}]"]).append(f"{name} = {_toml_value(value)}")
    return "\n\n".join(map("\n".join, sections.values())) + "\n"


def _toml_value(value: Any) -> str:
    """A value on one line (tomli_w would write each item of an array on its own line)."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
