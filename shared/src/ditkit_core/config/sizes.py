"""Parsing memory sizes such as `64GiB`."""

import re

from ditkit_core.errors import UserError

GIB = 2**30

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)")


def parse_size(text: str, key: str) -> int:
    """The bytes of a size such as `64GiB`; GB are read as GiB, as in the names of GPUs (an 80 GB GPU has 80 GiB).

    Raises:
        UserError: If the text is not a size.
    """
    found = SIZE.fullmatch(text.strip().lower())
    if not found:
        raise UserError(f"{key} {text!r} is not a size; write {key} 64GiB")
    return int(float(found[1]) * GIB)
