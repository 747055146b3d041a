"""What a model declares so that several ranks can share the tokens of each sample, and so that some tokens can skip blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TokenStreams:
    """Which values between blocks run along tokens, and which attention is among all tokens of a sample.

    Everything else in a block works token by token. A block whose work depends on a token's place among the others cannot be divided.
    """

    names: tuple[str, ...] = ("tokens",)
    """The streams of tokens, in the order in which attention sees them."""

    fields: Callable[[Any], Mapping[str, tuple[str, ...]]]
    """From a carry to the fields that blocks read and that have tokens in their second dimension, each with the streams that it consists of,
    in their order. A field in another one is `other.field`. Masks of padding are not among them: every rank has all keys."""

    head: tuple[str, ...] = ("tokens",)
    """The fields among these that the head reads."""

    attention: tuple[str, ...] = ("self",)
    """Names of the calls of `attend` in blocks whose queries and keys are the tokens of all streams. The keys of other calls are on
    every rank (text)."""

    within: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Calls of `attend` whose queries and keys are the tokens of some streams only: by the call's name, these streams."""

    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the ending of the name of a Linear layer in blocks, or a glob: the streams that its input consists of; none where it is the same on
    every rank (text). The input of any other layer consists of all streams. Masks of an adapter's dropout go by it."""

    padding: str = "padding_mask"
    """The field with the mask of padding, over the tokens of all streams; None where there is none."""

    residual: tuple[str, ...] = ("tokens",)
    """The fields among `fields` that blocks advance. All others are the same behind every block."""

    routed: str = ""
    """The stream whose tokens may skip blocks (`train.token_routing`); empty for none."""


def field_at(carry: Any, path: str) -> Any:
    """A field of a carry; one in another field is `other.field`."""
    for name in path.split("."):
        carry = getattr(carry, name)
    return carry


def with_field(carry: Any, path: str, value: Any) -> Any:
    """The carry with another value of a field."""
    name, _, rest = path.partition(".")
    return carry._replace(**{name: with_field(getattr(carry, name), rest, value) if rest else value})
