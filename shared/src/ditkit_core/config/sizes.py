"""Sizes of memory as a person writes them."""

import re

from ditkit_core.errors import UserError

GIB = 2**30

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)")


def parse_size(text: str, key: str) -> int:
    """Bytes of a size such as `64GiB`; GB are taken as GiB, as they are for cards.

    Raises:
        UserError: If it is none.
    """
    found = SIZE.fullmatch(text.strip().lower())
    if not found:
        raise UserError(f"{key} {text!r} is no size; write {key} 64GiB")
    return int(float(found[1]) * GIB)
