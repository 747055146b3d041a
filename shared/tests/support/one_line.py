"""What every error message about media and datasets has to be."""

from collections.abc import Callable

import pytest

from ditkit_core.errors import UserError, printable

REMEDIES = (
    "re-encode",
    "remove",
    "replace",
    "copy it again",
    "convert",
    "correct",
    "write",
    "put",
    "save it",
)
REMEDIES = (
    *REMEDIES,
    "rename",
    "set data.",
    "request",
    "accepted",
    "make it",
    "move",
    "shorten",
    "unpack",
    "did you mean",
    "name the right",
    "name a",
    "give ",
    "list it once",
)


def check_line(message: str, *names: str) -> None:
    """Hold a message to one line that names what it is about, and says how to fix it."""
    assert printable(message) == message, repr(message)
    assert all(name in message for name in names), message
    assert any(remedy in message for remedy in REMEDIES), message


def assert_one_line(use: Callable[[], object], *names: str) -> str:
    with pytest.raises(UserError) as caught:
        use()
    message = str(caught.value)
    check_line(message, *names)
    return message
