"""Exceptions that are not bugs: mistakes that the user can fix, interruptions that the user asked
for, and what libraries raise."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

_shows_keys = False


@contextmanager
def keys_shown(shown: bool = True) -> Iterator[None]:
    """Inside the block messages name a setting by its key in a run file, as commands do; else by
    the argument that has it.

    Of the process, and not of a thread: commands work in several.
    """
    global _shows_keys
    before, _shows_keys = _shows_keys, shown
    try:
        yield
    finally:
        _shows_keys = before


def argument(key: str) -> str:
    """A setting in a message: `train.checkpointing` in a command, and `checkpointing` in any other
    program."""
    return key if _shows_keys else key.rpartition(".")[2]


def printable(text: str) -> str:
    """A text as one line that is safe to print: line breaks, control and private characters and
    lone surrogates are escaped.

    Names of files and columns come from downloaded datasets. They may contain escape sequences that
    change the terminal.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode() if _is_hostile(character) else character
        for character in text
    )


def _is_hostile(character: str) -> bool:
    # These marks reverse the order in which a line is displayed, so that a message could show
    # another file name.
    reorders = "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
    return reorders or unicodedata.category(character) in ("Cc", "Cs", "Co", "Zl", "Zp")


class UserError(Exception):
    """A mistake in the user's input: a file, a configuration key, a combination of settings.

    The message is one line that says what is wrong, where, and how to fix it. The command line
    prints it without a traceback and exits non-zero. Any other exception is a bug and keeps its
    traceback.
    """

    def __init__(self, message: str):
        """Store the message as one printable line, whatever file names it quotes."""
        super().__init__(printable(message))

    def at(self, where: str) -> Self:
        """The same error with the place that it concerns in front."""
        return type(self)(f"{where}: {self}")


class EnvironmentFault(UserError):
    """The machine lacks something. This is not the fault of a sample, so `data.on_bad = "skip"`
    does not skip it."""


class MissingDependency(EnvironmentFault):
    """A package is not installed."""


class Interrupted(Exception):
    """A signal stopped the run early, after everything was saved; the message says how to
    continue."""


@contextmanager
def given_to_library(problem: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises into one line: while it is given a foreign file's content, or
    a service fails behind it.

    Args:
        problem: What is wrong then, and where.
        remedy: What the user should do.

    Raises:
        UserError: If the library raises anything.
    """
    try:
        yield
    except UserError:
        raise
    # Every exception, as nowhere else: damaged content, or a network that fails, may fail anywhere
    # in the library. tokenizers raises plain `Exception`, and where its Rust code panics a
    # `BaseException` of a type that has no module to import it from.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{problem} ({reason}); {remedy}") from error
