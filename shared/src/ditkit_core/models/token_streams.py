"""What a model declares so that several ranks can share the tokens of each sample, and so that some
tokens can skip blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TokenStreams:
    """Which values between blocks run along tokens, and which attention is among all tokens of a
    sample.

    Everything else in a block works token by token. Where a block's work depends on a token's
    position among the others, the carry says it (`positions`).
    """

    names: tuple[str, ...] = ("tokens",)
    """The streams of tokens, in the order in which attention sees them."""

    fields: Callable[[Any], Mapping[str, tuple[str, ...]]]
    """From a carry to the fields that blocks read and that have tokens in their second dimension,
    each with the streams that it consists of, in their order. A field in another one is
    `other.field`. Masks of padding are not among them: every rank has all keys."""

    head: tuple[str, ...] = ("tokens",)
    """The fields among these that the head reads."""

    attention: tuple[str, ...] = ("self",)
    """Names of the calls of `attend` in blocks whose queries and keys are the tokens of all
    streams. The keys of other calls are on every rank (text). A call may be causal if its queries
    and keys are of one stream (`within`)."""

    within: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Calls of `attend` whose queries and keys are the tokens of some streams only: by the call's
    name, these streams."""

    queries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Calls of `attend` whose queries are the tokens of some streams only, while their keys are as
    in `attention` or `within`: by the call's name, these streams."""

    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By the ending of the name of a Linear layer in blocks, or a glob: the streams that its input
    consists of; none where it is the same on every rank (text). The input of any other layer
    consists of all streams. Masks of an adapter's dropout go by it."""

    masks: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"padding_mask": ()})
    """The fields with masks of padding, each with the streams that it is over, in their order; all
    of them where it names none. None where there is no padding. The first one is over all streams.
    """

    residual: tuple[str, ...] = ("tokens",)
    """The fields among `fields` that blocks advance. All others are the same behind every block."""

    routed: str = ""
    """The stream whose tokens may skip blocks (`train.token_routing`); empty for none."""

    positions: str = ""
    """Where blocks read groups of tokens, such as a frame's: the field that says which of a
    sample's routed tokens a carry has, [batch, tokens], None for all of them. Ranks cannot share
    the tokens of such a model."""


def masks_of(streams: TokenStreams, carry: Any) -> dict[str, tuple[str, ...]]:
    """The masks of padding in a carry, each with the streams that it is over, in their order."""
    return {
        path: names or streams.names
        for path, names in streams.masks.items()
        if path in carry._fields
    }


def field_at(carry: Any, path: str) -> Any:
    """A field of a carry; one in another field is `other.field`."""
    for name in path.split("."):
        carry = getattr(carry, name)
    return carry


def with_field(carry: Any, path: str, value: Any) -> Any:
    """The carry with another value of a field."""
    name, _, rest = path.partition(".")
    return carry._replace(
        **{name: with_field(getattr(carry, name), rest, value) if rest else value}
    )
