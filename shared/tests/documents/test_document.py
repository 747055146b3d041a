"""A document says the same on a terminal, on a page and in JSON, and in each form what is for it
alone."""

import json
from pathlib import Path

import pytest

from ditkit_core.documents.document import Bars, Document, Media, Medium, Strip, Text
from ditkit_core.documents.tables import Table

NAME = "<b>a, & b"


def document() -> Document:
    return Document(
        title="Report <i>",
        heading="It works",
        sections=[
            Text(title="first", lines=["a line <b>"]),
            Table(title="sizes", head=["file", "MiB"], rows=[[NAME, "1"], ["c", "20"]]),
            Table(title="no rows", rows=[]),
            Text(title="for a terminal", only="terminal"),
            Table(
                title="for a page", head=["where"], rows=[[f"c, {NAME}"]], linked=0, only="page"
            ),
            Table(title="named", rows=[["1"], ["2"]], names=[[NAME, "x"], ["c"]], only="page"),
            Bars(
                title="a chart", description="as above", legend=("one", "two"), left=10, right=90,
                ticks=[(10, "1")], rows=[("<b>", 20, 30, [40])], marks=[(6, 50)],
            ),
            Media(title="shown", strips=[Strip(tiles=[Medium(label=NAME, problem="missing")])]),
        ],
        closing=["done"],
        values={"files": [NAME]},
    )  # fmt: skip


def test_a_terminal_shows_tables_and_texts_with_a_line_between(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document().show()
    assert capsys.readouterr().out.split("\n") == [
        "first",
        "a line <b>",
        "",
        "sizes",
        "file       MiB",
        "<b>a, & b    1",
        "c           20",
        "",
        "no rows",
        "",
        "for a terminal",
        "",
        "done",
        "",
    ]


def test_a_page_has_a_heading_for_each_section_and_escapes_all_of_it() -> None:
    page = document().page()
    headings = [part.split("</h2>")[0] for part in page.split("<h2>")[1:]]
    assert headings == ["first", "sizes", "no rows", "for a page", "named", "shown"]
    assert "<h1>It works</h1>" in page and "<title>Report &lt;i&gt;</title>" in page
    assert "<b>" not in page and page.count("<rect") == 2 and "missing" in page
    assert "done" not in page and "for a terminal" not in page


def test_cells_lead_to_the_rows_that_they_name() -> None:
    page = document().page()
    assert '<a href="#row-4-1">c</a>, &lt;b&gt;a, &amp; b' in page, "this name has a comma itself"
    assert '<tr id="row-4-1"><td dir="auto" class="n">2</td></tr>' in page


def test_both_files_are_written_together(tmp_path: Path) -> None:
    files = document().write(tmp_path / "new" / "report.json")
    assert files == [tmp_path / "new" / "report.json", tmp_path / "new" / "report.html"]
    assert json.loads(files[0].read_text(encoding="utf-8")) == {"files": [NAME]}
    assert files[1].read_text(encoding="utf-8") == document().page()
