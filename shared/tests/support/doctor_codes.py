"""What the doctor found, as its JSON says it."""

from typing import Any

import pytest


def codes(found: dict[str, Any], severity: str = "error") -> list[str]:
    return [each["code"] for each in found["findings"] if each["severity"] == severity]


def errors(found: dict[str, Any]) -> str:
    return "\n".join(each["what"] for each in found["findings"] if each["severity"] == "error")


def error(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith("error: "), said
    return last
