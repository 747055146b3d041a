"""Exceptions that are no fault of ours: what a person can mend, and what a person asked for."""

import unicodedata


def printable(text: str) -> str:
    """A text as one line that any terminal and file takes: line breaks, control characters and halves of characters escaped.

    Names of files and columns come from strangers: they may hold what would colour, erase or break what is printed.
    """
    if text.isprintable():
        return text
    return "".join(each.encode("unicode_escape").decode() if _is_hostile(each) else each for each in text)


def _is_hostile(character: str) -> bool:
    turns = "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"  # lets a line be read backwards
    return turns or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


class UserError(Exception):
    """A mistake in what was given to us: a file, a key, a combination.

    The message is one line that says what is wrong, where, and how to mend it. The command line prints it without a
    traceback and exits non-zero; anything else that is raised is our own fault and keeps its traceback.
    """

    def __init__(self, message: str):
        """Say it, in one line whatever names are quoted."""
        super().__init__(printable(message))


class MissingDependency(UserError):
    """Something that is not installed here: no sample is at fault, and none is left out for it."""


class Interrupted(Exception):
    """A signal ended the work early, with everything saved; the message says how to go on."""
