"""The check of a carry: every field has its annotated type, also in a NamedTuple inside of it."""

import typing
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any

import jaxtyping
from torch import Tensor
from torch.utils._pytree import tree_leaves


def check_carry(carry: Any) -> None:
    """Check a carry against its own annotations; dimensions of one name must agree over all fields.

    Type-check import hooks look at function arguments and do not see the fields of a NamedTuple.

    Raises:
        AssertionError: If a field differs; the message names it.
    """
    assert isinstance(carry, tuple), "a carry is a NamedTuple"
    fields = list(_fields(carry))
    # No call of ours inside: a type-check hook opens a scope of its own for dimensions in every
    # function.
    with jaxtyping.jaxtyped("context"):
        for name, value, options in fields:
            shown = tuple(value.shape) if isinstance(value, Tensor) else value
            assert isinstance(value, options), f"carry.{name} is {shown}, annotated {options}"
            # Only tensors in fields of their own are found by the engine, which moves, detaches and
            # stores them.
            is_seen = isinstance(value, Tensor) or _is_named(value)
            hidden = not is_seen and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
            assert not hidden, (
                f"carry.{name} has tensors inside a {type(value).__name__}: give each a field of "
                f"its own"
            )


def _fields(carry: Any, inside: str = "") -> Iterator[tuple[str, Any, tuple[type, ...]]]:
    """Name, value and allowed types of every field; the fields of a NamedTuple follow it."""
    for name, hint in typing.get_type_hints(type(carry), include_extras=True).items():
        value = getattr(carry, name)
        yield f"{inside}{name}", value, tuple(_options(hint))
        if _is_named(value):
            yield from _fields(value, f"{inside}{name}.")


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and type(value) is not tuple


def _options(hint: Any) -> list[type]:
    """The types that an annotation allows, as `isinstance` takes them."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return [option for part in typing.get_args(hint) for option in _options(part)]
    return [NoneType if hint is None else typing.get_origin(hint) or hint]
