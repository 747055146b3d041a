"""Configuration as TOML: reading it strictly, and writing it so that it can be read back."""

import re
import textwrap
import tomllib
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from ditkit_core.config.foreign_files import HEAD_BYTES, foreign_run_file, mark_of
from ditkit_core.config.nearest import nearest_word, path_remedy
from ditkit_core.config.schema import (
    config_fields,
    config_sections,
    config_values,
    plain,
    renamed_keys,
)
from ditkit_core.config.validation import BACKSLASH_REMEDY, unknown_key, value_from_file
from ditkit_core.errors import UserError


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file without checking its keys."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES)
        # utf-8-sig: some editors on Windows write a byte order mark before the text.
        text = content.decode("utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        remedy = f"; {path_remedy(path)}" if isinstance(error, FileNotFoundError) else ""
        raise UserError(
            f"cannot read the run file {path}: {error.strerror or error}{remedy}"
        ) from error
    except UnicodeDecodeError as error:
        mark = mark_of(content[:HEAD_BYTES]).partition(";")[0] or "is not UTF-8 text"
        raise UserError(f"{path} {mark}; a run file is TOML, saved as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(path, text, error) from error
    except (RecursionError, ValueError) as error:
        # ValueError: Python's limit on the digits of an integer
        raise UserError(
            f"{path} is nested too deeply or has a number with too many digits; correct the run "
            f"file"
        ) from error


_MOST_BYTES = 2**24
"""No run file is larger; a file of weights, given by mistake, may not fit into memory."""

_LINE_REMEDIES = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (r'"[^"]*\\', BACKSLASH_REMEDY),
        (r"[“”„‘’«»]", 'write straight quotes: "text"'),
        (r"=\s*(True|False)\b", "write true or false in lower case"),
        (r"=\s*(None|null|nil)\b", "leave a key out that has no value"),
        (r"=\s*-?(\.\d|\d+\.(\D|$))", "write digits on both sides of the point: 0.5"),
        (r"=\s*0\d", "write a number without zeros in front"),
        (r"^[^\[{]*,\s*$", "leave the comma at the end out"),
        (
            r"^\s*--[\w.-]+",
            (
                "in a run file a flag is written without dashes, in its section: [train] and below it "
                "steps = 5"
            ),
        ),
        (r"^[^=]*==", "write one ="),
        (r"^\s*[\w.\"'-]+\s*:", "write key = value; a colon is YAML"),
        (r"""=\s*[A-Za-z~./\\][^"']*$""", 'write a text in quotes: folder = "clips"'),
        (r"""^\s*[\w.-]+\s*$""", "write key = value"),
    )
)
"""What to do about a line that is not TOML, by what it looks like; the first that fits counts."""
_ERROR_REMEDIES = {
    "Cannot declare": "put all keys of a section below its name",
    "Unclosed array": "items are separated by commas, and the list ends with ]",
    "Unterminated string": "a text ends with the quotes that it begins with",
}
"""What to do by the beginning of tomllib's message, which comes before what the line looks like."""


def _not_toml(path: Path, text: str, error: tomllib.TOMLDecodeError) -> UserError:
    """The error for a text that is not TOML: what it is, or the line at fault and what to write
    there."""
    if mark := mark_of(text[:HEAD_BYTES].encode()) or foreign_run_file(text):
        return UserError(
            f"{path} {mark.partition(';')[0]}, and a run file is TOML: sections such as [train] "
            "and keys such as steps = 1000 below them; --help names the keys that matter"
        )
    lines = text.splitlines()
    if twice := _twice(lines):
        return UserError(f"{path} {twice}")
    match = re.search(r"at line (\d+)", str(error))
    number = int(match[1]) if match else len(lines)
    line = lines[number - 1].strip() if number <= len(lines) else ""
    # Its messages have the names of sections as tuples of Python.
    reason = re.sub(r"\('([^']*)',\)", r"[\1]", " ".join(str(error).split()))
    remedy = next(
        (remedy for start, remedy in _ERROR_REMEDIES.items() if reason.startswith(start)), ""
    )
    remedy = remedy or next(
        (remedy for pattern, remedy in _LINE_REMEDIES if pattern.search(line)), ""
    )
    at = f", which is {line[:80]!r}" if line else ""
    return UserError(f"{path} is not TOML: {reason}{at}{remedy and '; '}{remedy}")


def _twice(lines: list[str]) -> str:
    """A section or key that is there twice, as the end of a sentence; empty if there is none."""
    first: dict[str, int] = {}
    section = ""
    for number, line in enumerate(lines, 1):
        match = re.match(r"\s*(?:\[\s*(?P<section>[\w.-]+)\s*\]|(?P<key>[\w-]+)\s*=)", line)
        if match is None:
            continue
        section = match["section"] or section
        name = f"[{section}]" if match["section"] else f"{section}.{match['key']}".lstrip(".")
        if name in first:
            remedy = (
                "put all keys below the first one"
                if match["section"]
                else "leave one of the lines out"
            )
            kind = "section" if match["section"] else "key"
            return f"has the {kind} {name} twice, in lines {first[name]} and {number}; {remedy}"
        first[name] = number
    return ""


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
        stored: Whether a run stored the file, perhaps with another version: unknown keys are
            ignored, and former names are accepted.
    """
    where, fields_by_key = f"in {path}", config_fields(tree)
    if stored:
        values = {
            key: value
            for key, value in read_stored_file(tree, path).items()
            if key in fields_by_key
        }
    else:
        values = flatten(tables := read_toml(path))
        _check_keys(tables, tree, where)
    return {key: value_from_file(fields_by_key[key], value, where) for key, value in values.items()}


def read_stored_file(tree: type, path: Path) -> dict[str, Any]:
    """Read the values that a run stored, unchecked, by dotted key; renamed keys get their present
    names."""
    values, renamed = flatten(read_toml(path)), renamed_keys(tree)
    # A file with both names was written by the present version, so the present name takes
    # precedence.
    return {
        renamed.get(key, key): value
        for key, value in values.items()
        if renamed.get(key) not in values
    }


def _check_keys(tables: Mapping[str, Any], tree: type, where: str) -> None:
    """Raise UserError for the first unknown section or key."""
    sections, fields_by_key = config_sections(tree), config_fields(tree)
    for section, table in tables.items():
        if section in sections and not isinstance(table, dict):
            raise UserError(
                f"{section} {where} is a section: write [{section}] and its keys below it"
            )
        if section not in sections and isinstance(table, dict):
            raise _unknown_section(section, table, tree, where)
    for key in flatten(tables):
        if key not in fields_by_key:
            raise unknown_key(key, fields_by_key, where, renamed=renamed_keys(tree))


def _unknown_section(section: str, table: Mapping[str, Any], tree: type, where: str) -> UserError:
    """The error for an unknown section: it suggests a close section, or else a key close to the
    section's first key."""
    if near := nearest_word(section, config_sections(tree), 0.6):
        return UserError(f"unknown section [{section}] {where}; did you mean [{near}]?")
    if not table:
        return UserError(
            f"unknown section [{section}] {where}; the sections are "
            f"{', '.join(config_sections(tree))}"
        )
    return unknown_key(f"{section}.{next(iter(table))}", config_fields(tree), where)


def to_toml(
    config: Any,
    *,
    shown: Callable[[type, Mapping[str, Any]], Mapping[str, Any]] = lambda _, values: values,
) -> str:
    """A resolved configuration as TOML, with the description of each key as a comment; it reads
    back to the same configuration.

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
        lines[section].append(
            f"# {name} =" if values[key] is None else f"{name} = {_toml_value(values[key])}"
        )
    return "\n\n".join("\n".join(section) for section in lines.values()) + "\n"


@cache
def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")


def changes_to_toml(config: Any, also: Collection[str] = ()) -> str:
    """What differs from the defaults, and the keys of `also`, as TOML without comments: the
    shortest run file of a configuration."""
    fields = config_fields(type(config))
    sections: dict[str, list[str]] = {}
    for key, value in config_values(config).items():
        if value is not None and (key in also or value != plain(fields[key].default)):
            section, name = key.split(".")
            sections.setdefault(section, [f"[{section}]"]).append(f"{name} = {_toml_value(value)}")
    return "\n\n".join(map("\n".join, sections.values())) + "\n"


def _toml_value(value: Any) -> str:
    """A value on one line (tomli_w would write each item of an array on its own line)."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
