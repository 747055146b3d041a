"""What every error message about media and datasets has to be."""

from collections.abc import Callable

import pytest

from ditkit_core.errors import UserError

REMEDIES = ("re-encode", "remove", "replace", "copy it again", "convert", "correct", "write", "put", "save it again")


def assert_one_line(use: Callable[[], object], *names: str) -> str:
    with pytest.raises(UserError) as caught:
        use()
    message = str(caught.value)
    assert "\n" not in message
    assert all(name in message for name in names), message
    assert any(remedy in message for remedy in (*REMEDIES, "rename", "set data.", "ask for", "accepted")), message
    return message
