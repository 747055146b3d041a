"""The schema of a configuration: every key with its type, default, resume rule and description,
read from the dataclasses.

A tree is a frozen dataclass whose fields are sections. A section is a frozen dataclass whose fields
are declared with `setting` and followed by a docstring. Reading, checking, printing and comparing
use only this schema, so a new key is one line in the module that uses it. Editors complete and
check run files by its JSON form.
"""

import ast
import functools
import inspect
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Generic, Literal, Union, get_args, get_origin, get_type_hints

from ditkit_core.config.field import Holds, Resume

_JSON_NAMES = {int: "integer", float: "number", bool: "boolean", str: "string"}


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One key of the configuration."""

    key: str
    """Dotted name: `adapter.rank`."""
    type: Any
    """Type annotation of the value."""
    default: Any
    """None if it is not set, or depends on the run file."""
    resume: Resume
    holds: Holds
    """Kind of text."""
    formerly: tuple[str, ...]
    """Former dotted names."""
    part_of: str
    """Dotted name of the key whose value was for this one too, before it was one of its own; empty
    for none."""
    asked_again: tuple[Any, ...]
    """Stored values in whose place a command that continues from them takes the default."""
    is_set: bool
    """Whether the order of a list means nothing."""
    doc: str
    """The docstring under the field, on one line; empty when there is none."""

    @property
    def is_path(self) -> bool:
        """Whether it holds a path, which not every text can be."""
        return self.holds in ("path", "part")


def config_fields(tree: type) -> Mapping[str, ConfigField]:
    """The keys of a tree, in order of declaration."""
    return _config_fields(tree)


@functools.cache
def _config_fields(tree: type) -> Mapping[str, ConfigField]:
    described = {}
    for section, section_type in config_sections(tree).items():
        hints, docs = get_type_hints(section_type), field_docs(section_type)
        for field in section_fields(section_type):
            assert field.default is None or type(None) not in getattr(
                hints[field.name], "__args__", ()
            ), (
                f"{section}.{field.name}: TOML cannot write None, so an optional value must "
                f"default to it"
            )
            key = f"{section}.{field.name}"
            described[key] = ConfigField(
                key=key,
                type=field.metadata["written"] or hints[field.name],
                default=None if field.metadata["varies"] else field.default,
                resume=field.metadata["resume"],
                holds=field.metadata["holds"],
                formerly=tuple(f"{section}.{name}" for name in field.metadata["formerly"]),
                part_of=f"{section}.{parent}" if (parent := field.metadata["part_of"]) else "",
                asked_again=field.metadata["asked_again"],
                is_set=field.metadata["is_set"],
                doc=docs.get(field.name, ""),
            )
    return MappingProxyType(described)


def renamed_keys(tree: type) -> Mapping[str, str]:
    """The present name of each renamed key, by its former name."""
    return {former: key for key, field in config_fields(tree).items() for former in field.formerly}


def config_sections(tree: type) -> Mapping[str, type]:
    """The sections of a tree by name, in order of declaration."""
    hints = get_type_hints(tree)
    return {field.name: hints[field.name] for field in fields(tree)}


@functools.cache
def section_fields(section: type) -> Sequence[Field[Any]]:
    """The fields of a section in the order of a run file: those that it inherits stand where
    `after` says."""
    declared = inspect.get_annotations(section)
    ordered = [field for field in fields(section) if field.name in declared]
    before = ""
    for field in fields(section):
        if field.name not in declared:
            before = field.metadata["after"] or before
            ordered.insert(1 + [other.name for other in ordered].index(before), field)
            before = field.name
    return ordered


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The docstring under each field of a class and of its bases, on one line each; empty if the
    source is not available."""
    # Python discards a string below a field, so the source is parsed: the text then has one place
    # for --help, TOML and readers.
    docs = {
        name: doc
        for base in cls.__bases__
        if base not in (object, Generic)
        for name, doc in field_docs(base).items()
    }
    body = _class_bodies(cls.__module__).get(cls.__qualname__, [])
    for statement, below in itertools.pairwise(body):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(doc))
            ):
                docs[name] = " ".join(doc.split())
    return docs


@functools.cache
def _class_bodies(module: str) -> Mapping[str, list[ast.stmt]]:
    """The statements of each class of a module, by qualified name; none if its source is not
    available."""
    # Each command reads all sections: `inspect.getsource` reads and parses the file for every class.
    try:
        source = inspect.getsource(sys.modules.get(module))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return {}
    bodies: dict[str, list[ast.stmt]] = {}

    def collect(statements: Sequence[Any], prefix: str) -> None:
        for statement in statements:
            match statement:
                case ast.ClassDef(name=name, body=body):
                    bodies[prefix + name] = body
                    collect(body, f"{prefix}{name}.")
                case ast.FunctionDef(name=name, body=body):
                    collect(body, f"{prefix}{name}.<locals>.")

    collect(ast.parse(source).body, "")
    return bodies


def plain(value: Any) -> Any:
    """A value as TOML would return it: tuples become lists."""
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def config_values(config: Any) -> dict[str, Any]:
    """The values of a configuration by dotted key, as TOML would return them; None is kept."""
    sections = ((field.name, getattr(config, field.name)) for field in fields(config))
    return {
        f"{section}.{field.name}": plain(getattr(values, field.name))
        for section, values in sections
        for field in section_fields(values.__class__)
    }


def json_schema(tree: type, title: str, values: Mapping[str, Sequence[str]]) -> str:
    """The schema of run files, as JSON.

    Args:
        title: What is configured.
        values: Values of keys that only a model family knows, such as the presets of
            `model.preset`.
    """
    fields = config_fields(tree)
    sections = {
        section: {
            "type": "object",
            "description": " ".join((kind.__doc__ or "").split()),
            "properties": {
                key.partition(".")[2]: _described(field, values.get(key, ()))
                for key, field in fields.items()
                if key.startswith(f"{section}.")
            },
            "additionalProperties": False,
        }
        for section, kind in config_sections(tree).items()
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _described(field: ConfigField, values: Sequence[str]) -> dict[str, Any]:
    accepted = _accepted(field.type) | ({"enum": ["", *values]} if values else {})
    default = {} if field.default is None else {"default": plain(field.default)}
    return {**accepted, **default, "description": field.doc}


def _accepted(hint: Any) -> dict[str, Any]:
    """What a type accepts."""
    kind = get_origin(hint)
    arguments = [argument for argument in get_args(hint) if argument is not NoneType]
    if kind is Literal:
        return {"enum": arguments}
    if kind in (Union, UnionType):
        accepted = list(map(_accepted, arguments))
        return {"anyOf": accepted} if len(accepted) > 1 else accepted[0]
    if kind is tuple and Ellipsis in arguments:
        item = _accepted(arguments[0])
        # a list of one may be written as its item
        return {"anyOf": [{"type": "array", "items": item}, item]}
    if kind is tuple:
        items = list(map(_accepted, arguments))
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    return {"type": _JSON_NAMES[hint]}
