"""A document that a terminal, a page and JSON show: whoever makes one says everything once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ditkit_core.documents.html import html_page
from ditkit_core.documents.tables import Table
from ditkit_core.io.console import say
from ditkit_core.io.files import write_text


@dataclass(frozen=True, kw_only=True)
class Text:
    """Lines, each a paragraph on a page."""

    kind: ClassVar = "text"
    title: str = ""
    lines: Sequence[str] = ()
    only: Literal["", "terminal", "page"] = ""
    """The only form that shows it; empty for all."""

    def show(self) -> None:
        """Print the lines."""
        for line in self.lines:
            say(line)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Pairs of bars on a logarithmic axis, for a page; all positions are in SVG units."""

    kind: ClassVar = "bars"
    only: ClassVar = "page"
    title: str
    description: str
    """Read by screen readers in place of the chart."""
    legend: tuple[str, str]
    """What the two bars of a pair are; the second may explain the lines, too."""
    left: int
    right: int
    """Ends of the longest bar."""
    ticks: Sequence[tuple[float, str]]
    """Position and label."""
    rows: Sequence[tuple[str, float, float, Sequence[float]]]
    """Label, lengths of both bars, and positions of dots."""
    marks: Sequence[tuple[int, float]]
    """Length of dashes, and position."""


@dataclass(frozen=True, kw_only=True)
class Medium:
    """An image or a video with its label."""

    label: str = ""
    prompt: str = ""
    """Its text, for who cannot see it."""
    notes: Sequence[str] = ()
    source: str = ""
    """Its content as a data URI, or the path that it is loaded from; empty if the page has no room
    for it."""
    link: str = ""
    """From the page to the file; empty if it cannot be opened."""
    is_video: bool = False
    is_embedded: bool = True
    """Whether the page has all of it."""
    preload: str = "auto"
    problem: str = ""
    """Why it cannot be shown."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Media side by side."""

    heading: str = ""
    tiles: Sequence[Medium]
    control: str = ""
    """Why the prompt is a control; empty if it is none."""


@dataclass(frozen=True, kw_only=True)
class Media:
    """Strips, for a page."""

    kind: ClassVar = "media"
    only: ClassVar = "page"
    title: str
    strips: Sequence[Strip]
    lines: Sequence[str] = ()
    """Shown below the strips."""


Section = Table | Text | Bars | Media


@dataclass(frozen=True, kw_only=True)
class Document:
    """What a command has to say."""

    title: str
    heading: str = ""
    """First line of the page; the title if empty."""
    sections: Sequence[Section]
    closing: Sequence[str] = ()
    """Last lines on a terminal; the page says them above, in its heading and tables."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs."""

    def show(self) -> None:
        """Print it: sections, with an empty line after each, and the closing lines."""
        for section in self.sections:
            if isinstance(section, Table | Text) and section.only != "page":
                if section.title:
                    say(section.title)
                section.show()
                say("")
        for line in self.closing:
            say(line)

    def page(self) -> str:
        """It as an HTML page."""
        sections = [section for section in self.sections if section.only != "terminal"]
        return html_page(
            "documents/document.html",
            title=self.title,
            heading=self.heading or self.title,
            sections=sections,
            anchors={
                name: f"row-{number}-{row}"
                for number, table in enumerate(sections)
                if isinstance(table, Table)
                for row, names in enumerate(table.names)
                for name in names
            },
        )

    def json(self) -> str:
        """Its values as JSON."""
        return json.dumps(self.values, indent=1)

    def write(self, json_file: Path) -> list[Path]:
        """Write it as JSON, and as a page next to that, each atomically; returns the files."""
        files = [json_file, json_file.with_suffix(".html")]
        write_text(files[0], self.json() + "\n")
        write_text(files[1], self.page())
        return files
