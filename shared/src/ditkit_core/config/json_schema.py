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
    kind, arguments = (
        get_origin(hint),
        [argument for argument in get_args(hint) if argument is not NoneType],
    )
    if kind is Literal:
        return {"enum": arguments}
    if kind in (Union, UnionType):
        accepted = list(map(_accepted, arguments))
        return {"anyOf": accepted} if len(accepted) > 1 else accepted[0]
    if kind is tuple and Ellipsis in arguments:
        item = _accepted(arguments[0])
        return {
            "anyOf": [{"type": "array", "items": item}, item]
        }  # a list of one may be written as its item
    if kind is tuple:
        items = list(map(_accepted, arguments))
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    return {"type": _NAMES[hint]}
