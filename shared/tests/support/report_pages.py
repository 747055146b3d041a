"""The page of a run in pieces, for the tests of the report."""

import json
from html.parser import HTMLParser
from pathlib import Path

from ditkit_core.diagnostics.report.page import write_report


class Page(HTMLParser):
    """A page in pieces."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.shown = ""
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("img", "meta"):
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag in ("h1", "h2", "summary"):
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"{tag} closes what it did not open"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif self._open and self._open[-1] != "style":
            self.shown += data
            if self._open[-1] in ("h1", "h2", "summary"):
                self.titles[-1] += data

    @property
    def numbers(self) -> list[dict]:
        return json.loads(self.scripts[0])["sections"]

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def read(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def metrics(folder: Path) -> dict[tuple[str, int], float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (name, row["step"]): value
        for row in rows
        for name, value in row.items()
        if not isinstance(value, str)
    }


def check_numbers(page: Page, folder: Path) -> None:
    """Every number of the page is the metrics file's, and every series of the file is on the
    page."""
    truth = metrics(folder)
    (section,) = page.numbers
    embedded = {
        (name, step): value
        for name, found in section["series"].items()
        for step, value in zip(found["steps"], found["values"], strict=True)
    }
    assert embedded == {key: value for key, value in truth.items() if key[0] != "step"}
    cells = page.all("data")
    assert len(cells) > 10
    for cell in cells:
        assert float(cell["value"]) == truth[cell["data-key"], int(cell["data-step"])]
