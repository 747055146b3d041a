"""Self-contained HTML pages with SVG and tables, and JSON.

All text that is not markup made here is escaped, so that no caption or file name can become markup. The content security policy of a page
forbids it to load anything, and names its style sheet and script by their digests, so that nothing else in it can run.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ditkit_core.io.tables import Table


class Html(str):
    """Text that is markup already."""


def element(tag: str, *children: str, **attributes: object) -> Html:
    """Build an element.

    Args:
        children: `Html` is inserted unchanged, any other text is escaped.
        attributes: Values by name, converted with `str`; `data_key` stands for `data-key` and `class_` for `class`; None omits one.
    """
    written_attributes = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape_html(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if not children and tag in _VOID:  # HTML forbids an end tag for these
        return Html(f"<{tag}{written_attributes}>")
    return Html(f"<{tag}{written_attributes}>{join_html(*children)}</{tag}>")


_VOID = frozenset({"img", "meta"})


def join_html(*parts: str) -> Html:
    """Concatenate parts; `Html` is inserted unchanged, any other text is escaped."""
    return Html("".join(part if isinstance(part, Html) else escape_html(part) for part in parts))


def escape_html(text: str) -> str:
    """Escape a text for HTML and SVG; what is not shown, or turns the order of a line around, becomes the replacement character."""
    return html.escape(_UNSHOWN.sub("\ufffd", text), quote=True)


_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Control characters, lone surrogates, and marks behind which a line reads backwards: a name could then look like another one."""
_TURNING_IN_JSON = re.compile(r"\\u(202[a-e]|206[6-9])")


def html_table(table: Table, *, row_titles: bool = False, classes: Sequence[str] = ()) -> Html:
    """Render a table in a box of its own, so that on a phone the table scrolls sideways and not the page.

    Args:
        table: The table; cells that are `Html` are inserted unchanged.
        row_titles: Whether the first cell of each row is its title.
        classes: CSS class of each row; empty if no row has one.
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


def html_page(title: str, *body: str, script: str = "", head: str = "", is_served: bool = False) -> str:
    """Build a page that needs no network and no other file, and is complete without its script.

    Args:
        script: JavaScript that runs after the body is loaded.
        head: More elements for the head.
        is_served: Whether images and videos may be loaded from the server that the page is from.
    """
    # Style and script are inline: a report is one file that can be sent by mail and opened offline.
    style = files("ditkit_core.diagnostics").joinpath("page.css").read_text(encoding="utf-8")
    media = "data: 'self'" if is_served else "data:"
    policy = (
        f"default-src 'none'; img-src {media}; media-src {media}; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script) if script else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        head,
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
    """Plain values as indented JSON."""
    return json.dumps(values, indent=1)


def json_script(values: Mapping[str, Any], id: str) -> Html:
    """Plain values as JSON for a page's script, in a script element."""
    text = _TURNING_IN_JSON.sub(r"\\ufffd", json.dumps(values, allow_nan=False))
    # Escaped, because a caption with `</script>` would end the element.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{id}">{text}</script>')
