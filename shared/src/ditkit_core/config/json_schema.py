"""The JSON Schema of run files, by which editors complete and check them."""

import json
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ditkit_core.config.schema import ConfigField, config_fields, config_sections, plain

_NAMES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema(tree: type, title: str, values: Mapping[str, Sequence[str]]) -> str:
    """The schema of run files, as JSON.

    Args:
        title: What is configured.
        values: Values of keys that only a model family knows, such as the presets of `model.preset`.
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
    arguments = [argument for argument in get_args(hint) if argument is not NoneType]
    if get_origin(hint) is Literal:
        return {"enum": arguments}
    if get_origin(hint) in (Union, UnionType):
        return (
            _accepted(arguments[0])
            if len(arguments) == 1
            else {"anyOf": [_accepted(argument) for argument in arguments]}
        )
    if get_origin(hint) is tuple and Ellipsis in arguments:
        item = _accepted(arguments[0])
        return {"anyOf": [{"type": "array", "items": item}, item]}  # a list of one may be written as its item
    if get_origin(hint) is tuple:
        return {
            "type": "array",
            "prefixItems": [_accepted(argument) for argument in arguments],
            "minItems": len(arguments),
            "items": False,
        }
    return {"type": _NAMES[hint]}
