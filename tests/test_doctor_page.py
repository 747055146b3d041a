"""docs/doctor.md shows what `--check` prints of the demo today."""

import re

import pytest

from ditkit_core.commands.cli import start
from pages import blocks
from test_docs_commands import FAMILIES
from workspace import ROOT


def shape(text: str) -> list[list[str]]:
    """The words of each line but findings, with one sign for every number, which may change."""
    lines = [re.sub(r"\(\d+ \w+\)|\d[\d.,]*", "#", line) for line in text.splitlines()]
    kept = [line for line in lines if line and not re.match(r"(?:warning|note|written):|\$ ", line)]
    return [re.findall(r"[^\s;#]+|#", line.replace("trained #;", "trained;")) for line in kept]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_shows_what_the_check_of_the_demo_prints(tmp_path, capsys):
    assert (
        start(
            FAMILIES["wan"], "train", ["--demo", "--check", "--run.folder", str(tmp_path / "run")]
        )
        == 0
    )
    printed = capsys.readouterr().out
    printed = printed[printed.index("wan: ") :]  # progress is before it
    (example,) = (
        block.text for block in blocks(ROOT / "docs" / "doctor.md") if block.language == "console"
    )
    assert shape(example) == shape(printed)


def test_a_column_that_the_check_lacks_is_found():
    assert shape("dataset  frames\ndata  9\n") != shape("frames\n9\n")
    assert shape("can be trained (7 warnings); checked in 3 s") == shape(
        "can be trained; checked in 71 s"
    )
