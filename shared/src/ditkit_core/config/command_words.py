"""Commands of the user's in a configuration: the words of one, or the address of a webhook."""

import os
import shlex
from collections.abc import Sequence

from ditkit_core.errors import UserError


def command_words(written: Sequence[str], key: str) -> list[str]:
    """The words of a command that is written as one text or as a list; an address is one word.

    Args:
        written: The value of the key; empty for no command.
    """
    try:
        words = (
            list(written)
            if len(written) != 1 or is_address(written[0])
            else shlex.split(written[0], posix=os.name != "nt")
        )
    except ValueError as error:
        raise UserError(f"{key} = {written[0]!r}: {error}; correct it, or write a list of words") from error
    if written and (not words or not words[0].strip() or any("\0" in word for word in words)):
        raise UserError(f"{key} names no program; write a command, or the address of a webhook")
    return words


def is_address(text: str) -> bool:
    """Whether a text is the address of a webhook."""
    return text.lower().startswith(("http://", "https://"))
