"""Tables as text, and on a terminal."""

import io

import pytest
from rich.console import Console

from ditkit_core.documents.tables import Table
from ditkit_core.io import console

FILES = Table(head=["file", "frames"], rows=[["[bold]a[/bold]", "9"], ["b", "?"]])


def test_columns_of_numbers_stand_right_and_words_left() -> None:
    assert FILES.lines() == [
        "file            frames",
        "[bold]a[/bold]       9",
        "b                    ?",
    ]
    assert Table(head=["GiB", "0"], rows=[["", "fits"]], num_left=1).lines() == [
        "GiB     0",
        "     fits",
    ]


def test_a_table_needs_no_titles() -> None:
    assert Table(rows=[["loss", "1.0, 0.5"], ["norm", "2"]]).lines() == [
        "loss  1.0, 0.5",
        "norm  2",
    ]


def test_names_that_look_like_markup_are_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(
        console, "CONSOLE", Console(file=drawn, force_terminal=True, color_system=None, width=80)
    )
    FILES.show()
    assert "[bold]a[/bold]" in drawn.getvalue() and "━" in drawn.getvalue()
    drawn.truncate(0)
    Table(rows=[["loss", "0.5"]]).show()
    assert "loss" in drawn.getvalue() and "━" not in drawn.getvalue()


def test_without_a_terminal_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    FILES.show()
    assert capsys.readouterr().out.splitlines() == FILES.lines()
