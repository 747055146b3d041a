"""HTML pages of one file, with SVG and tables, and JSON.

Whatever is not markup made here is escaped, so that no caption or file name can become markup. A page forbids itself to load anything: its
policy names its style sheet and its script by their digests, so that nothing else in it could run either.
"""

import base64
import hashlib
import html
import json
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ditkit_core.io.tables import Table


class Html(str):
    """Text that is markup already."""


def element(tag: str, *children: str, **attributes: object) -> Html:
    """An element.

    Args:
        tag: Its name.
        children: `Html` goes in as it is, any other text escaped.
        attributes: By name, `data_key` for `data-key` and `class_` for `class`, as `str` shows it; None leaves one out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape_html(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if not children and tag in _VOID:
        return Html(f"<{tag}{given}>")
    return Html(f"<{tag}{given}>{join_html(*children)}</{tag}>")


_VOID = frozenset({"img", "meta"})


def join_html(*parts: str) -> Html:
    """Parts one after the other; `Html` as it is, any other text escaped."""
    return Html("".join(part if isinstance(part, Html) else escape_html(part) for part in parts))


def escape_html(text: str) -> str:
    """A text that HTML and SVG show as it is; what no file can hold or no one can see (control characters, halves of characters) shows
    as the replacement character."""
    shown = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)
    return html.escape(shown, quote=True)


def html_table(table: Table, *, row_titles: bool = False, classes: Sequence[str] = ()) -> Html:
    """A table, in a box of its own: on a telephone the table scrolls sideways and not the page.

    Args:
        table: Cells that are `Html` go in as they are.
        row_titles: Whether the first cell of each row is its title.
        classes: Of each row; empty if none has one.
    """
    if not table.rows:
        return element("p", "none")
    numbers = ["n" if is_right else None for is_right in table.is_right]
    head = [element("th", text, scope="col", class_=name) for text, name in zip(table.head, numbers, strict=False)]
    rows = []
    for row, name in zip(table.rows, classes or [""] * len(table.rows), strict=True):
        cells = [element("td", cell, dir="auto", class_=kind) for cell, kind in zip(row, numbers, strict=True)]
        if row_titles:
            cells[0] = element("th", row[0], scope="row")
        rows.append(element("tr", *cells, class_=name or None))
    parts = [element("thead", element("tr", *head))] if head else []
    return element("div", element("table", *parts, element("tbody", *rows)), class_="wide")


def html_page(title: str, *body: str, script: str = "") -> str:
    """A page that needs nothing but itself: no network, no other file, and no script to be complete.

    Args:
        title: Of the window.
        body: What is on it.
        script: Runs when the page is there.
    """
    style = files("ditkit_core.diagnostics").joinpath("page.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script) if script else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        Html(f"<style>{style}</style>"),
    )
    parts = [*body, Html(f"<script>{script}</script>")] if script else body
    return f'<!doctype html>\n<html lang="en">{head}{element("body", *parts)}</html>\n'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def json_text(values: Mapping[str, Any]) -> str:
    """Plain values as JSON that a person can read too."""
    return json.dumps(values, indent=1)


def json_script(values: Mapping[str, Any], id: str) -> Html:
    """Plain values for a page's script, in an element that nothing in them can end."""
    text = json.dumps(values, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{id}">{text}</script>')
