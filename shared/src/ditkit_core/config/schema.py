"""What a tree of configuration dataclasses contains: every key with its type, default, resume rule and meaning.

A tree is a frozen dataclass whose fields are sections; a section is a frozen dataclass whose fields are values declared
with `setting` and followed by a docstring. Reading, checking, printing and comparing are written over this description
alone, so a new key is one line in the module that consumes it.
"""

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from ditkit_core.config.field import Holds, Resume


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One key of the configuration."""

    key: str
    """Dotted name: `adapter.rank`."""
    type: Any
    """Type annotation of the value."""
    default: Any
    resume: Resume
    holds: Holds
    formerly: tuple[str, ...]
    """Dotted names that it had."""
    doc: str
    """The docstring under the field, on one line; empty when there is none."""


def config_fields(tree: type) -> Mapping[str, ConfigField]:
    """Every key of a tree, in order of declaration."""
    described = {}
    for section, section_type in config_sections(tree).items():
        hints, docs = get_type_hints(section_type), field_docs(section_type)
        for field in fields(section_type):
            assert field.default is None or type(None) not in getattr(hints[field.name], "__args__", ()), (
                f"{section}.{field.name}: TOML cannot write None, so an optional value must default to it"
            )
            key = f"{section}.{field.name}"
            described[key] = ConfigField(
                key=key,
                type=hints[field.name],
                default=field.default,
                resume=field.metadata["resume"],
                holds=field.metadata["holds"],
                formerly=tuple(f"{section}.{name}" for name in field.metadata["formerly"]),
                doc=docs.get(field.name, ""),
            )
    return described


def renamed_keys(tree: type) -> Mapping[str, str]:
    """By the former name of each key that was renamed its present one."""
    return {former: key for key, field in config_fields(tree).items() for former in field.formerly}


def config_sections(tree: type) -> Mapping[str, type]:
    """Section names of a tree and their dataclasses, in order of declaration."""
    hints = get_type_hints(tree)
    return {field.name: hints[field.name] for field in fields(tree)}


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The docstring under each field of a class, each on one line; empty where the source is not available."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:
        return {}
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, below in itertools.pairwise(body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs


def plain(value: Any) -> Any:
    """A value as TOML would give it back: tuples become lists."""
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def config_values(config: Any) -> dict[str, Any]:
    """The values of a configuration by dotted key, as TOML would give them back; None is kept."""
    sections = ((field.name, getattr(config, field.name)) for field in fields(config))
    return {
        f"{section}.{field.name}": plain(getattr(values, field.name))
        for section, values in sections
        for field in fields(values)
    }
