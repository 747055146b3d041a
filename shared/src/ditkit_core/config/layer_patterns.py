"""Values by layer pattern: entries such as `*.ffn.*=64`; the first one that fits a layer counts.
This module needs no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from ditkit_core.errors import UserError


def fits(layer: str, pattern: str) -> bool:
    """Whether a layer's name ends with a pattern, at a dot, or fits it as a glob; behind `^` it is
    the whole name."""
    if pattern.startswith("^"):
        return layer == pattern[1:]
    if any(character in pattern for character in "*?["):
        return fnmatchcase(layer, pattern)
    # At a dot only: `q` must not select `to_q` or `norm_q`.
    return layer == pattern or layer.endswith(f".{pattern}")


def parse_patterns(
    key: str, entries: Sequence[str], metavar: str, *, is_integer: bool = False
) -> dict[str, float]:
    """The values of `PATTERN=VALUE`, by pattern, in their order.

    Args:
        key: The configuration key, for messages.
        metavar: What a value is, for messages.
        is_integer: Whether values are whole numbers of at least 1; otherwise any number above 0.
    """
    by_pattern: dict[str, float] = {}
    for entry in entries:
        pattern, _, text = entry.rpartition("=")
        try:
            value = float(int(text)) if is_integer else float(text)
        except (ValueError, OverflowError):  # of a whole number above 1.8e308
            value = 0.0
        if not pattern or not 0 < value < math.inf:
            number = "a whole number of at least 1" if is_integer else "a number above 0"
            raise UserError(
                f"{key}: {entry!r} is not PATTERN={metavar}; write a layer pattern, = and {number}"
            )
        if pattern in by_pattern:
            raise UserError(f"{key}: the pattern {pattern!r} is given twice; leave one of them out")
        by_pattern[pattern] = value
    return by_pattern


def value_for(layer: str, values: Mapping[str, float]) -> float | None:
    """The value of the first pattern that fits a layer; None if none does."""
    return next((value for pattern, value in values.items() if fits(layer, pattern)), None)


def check_used(key: str, values: Mapping[str, float], layers: Iterable[str]) -> None:
    """Refuse patterns that decide nothing."""
    layers = list(layers)
    decided = {
        next((pattern for pattern in values if fits(layer, pattern)), None) for layer in layers
    }
    for pattern in values:
        if pattern in decided:
            continue
        if any(fits(layer, pattern) for layer in layers):
            raise UserError(
                f"{key}: patterns before {pattern!r} fit all of its layers, and the first that "
                f"fits counts; put it before them, or leave it out"
            )
        shown = ", ".join(layers[:3])
        raise UserError(
            f"{key}: {pattern!r} fits no trained layer; the names are like {shown}; write a name's "
            f"end (self_attn.q) or a glob (*.ffn.*)"
        )
