"""Commands of the user's in a configuration: the words of one, or the address of a webhook."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

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
        raise UserError(
            f"{key} = {written[0]!r}: {error}; correct it, or write a list of words"
        ) from error
    if (
        len(written) == 1
        and words
        and not is_address(words[0])
        and (mark := _for_shell(written[0], words[0]))
    ):
        shell = '["cmd", "/c", "…"]' if os.name == "nt" else '["sh", "-c", "…"]'
        raise UserError(
            f"{key} = {written[0]!r}: no shell reads {mark}, it would be passed on as it is "
            f"written; name a script, or write {shell}"
        )
    if written and (not words or not words[0].strip() or any("\0" in word for word in words)):
        raise UserError(f"{key} names no program; write a command, or the address of a webhook")
    return words


_SHELLS = frozenset(
    {"sh", "bash", "dash", "ash", "zsh", "ksh", "fish", "cmd", "powershell", "pwsh"}
)
_QUOTED = re.compile(r"""\\.|'[^']*'|"((?:\\.|[^"\\])*)\"""", re.DOTALL)
_EXPANDED = r"`|\$\w*[({][^)}]*[)}]?|\$[A-Za-z_]\w*"
_OPERATORS = re.compile(rf"[;|<>]|&&|&(?=\s|$)|(?:(?<=\s)|^)~/|{_EXPANDED}")


def _for_shell(text: str, program: str) -> str:
    """The first thing in a command that a shell would read and we do not: an operator or a
    variable; empty if there is none.

    In double quotes a shell reads variables only, and leaves all of it to a shell that the command
    starts.
    """
    starts_shell = PurePath(program).stem in _SHELLS
    for quoted in _QUOTED.finditer(text):
        if not starts_shell and (match := re.search(_EXPANDED, quoted[1] or "")):
            return match[0]
    match = _OPERATORS.search(_QUOTED.sub("q", text))
    return match[0] if match else ""


def is_address(text: str) -> bool:
    """Whether a text is the address of a webhook."""
    return text.lower().startswith(("http://", "https://"))
