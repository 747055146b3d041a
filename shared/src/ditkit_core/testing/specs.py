"""Specs that differ from another in single fields, for tests."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from ditkit_core.models.spec import ModelSpec


def altered(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with other values of its own fields, or of fields of its groups, each by the field's
    bare name.

    Names are looked up in the spec first, then in its groups; no two groups share one.
    """
    for name, value in changes.items():
        names = {field.name for field in fields(spec)}
        if name in names and not is_dataclass(getattr(spec, name)):
            spec = replace(spec, **{name: value})
            continue
        (group,) = (
            field_name
            for field_name in names
            if is_dataclass(getattr(spec, field_name))
            and name in {field.name for field in fields(getattr(spec, field_name))}
        )
        spec = replace(spec, **{group: replace(getattr(spec, group), **{name: value})})
    return spec
