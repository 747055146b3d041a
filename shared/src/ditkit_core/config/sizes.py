"""Sizes of memory such as `64GiB`, and settings with a number for each device."""

import re
from collections.abc import Sequence
from typing import TypeVar

from ditkit_core.errors import UserError

Number = TypeVar("Number", int, float)

GIB = 2**30

SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(?:gib|gb|g)")


def parse_size(text: str, key: str) -> int:
    """The bytes of a size such as `64GiB`; GB are read as GiB, as in the names of GPUs (an 80 GB
    GPU has 80 GiB)."""
    match = SIZE.fullmatch(text.strip().lower())
    if not match:
        raise UserError(f"{key} {text!r} is not a size; write {key} 64GiB")
    return int(float(match[1]) * GIB)


def gib(num_bytes: int) -> str:
    """A size in GiB, with two decimals and without the unit."""
    return f"{num_bytes / GIB:.2f}"


def per_device(values: Sequence[Number], num_devices: int, key: str) -> tuple[Number, ...]:
    """One value per device: the given values, or the one given for all, or 0 if none is given.

    Args:
        values: The given values, in the order of the devices.

    Returns:
        `num_devices` values.
    """
    if len(values) not in (0, 1, num_devices):
        raise UserError(
            f"{key} = {list(values)} has {len(values)} numbers for {num_devices} devices; give one "
            f"for each, or one for all"
        )
    return tuple(values) if len(values) == num_devices else tuple(values or (0,)) * num_devices
