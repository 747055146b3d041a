"""Self-contained HTML pages from templates.

All text that is not markup of a template is escaped, so that no caption or file name can become
markup. The content security policy of a page forbids it to load anything, and names its style sheet
and script by their digests, so that nothing else in it can run.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

_PACKAGE = Path(__file__).parents[1]
_UNSHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Control characters, lone surrogates, and marks behind which a line reads backwards: a name could
then look like another one."""
_TURNING_IN_JSON = re.compile(r"\\u(202[a-e]|206[6-9])")


def escape_html(text: object) -> Markup:
    """Escape a text for HTML and SVG; what is not shown, or turns the order of a line around,
    becomes the replacement character."""
    return escape(text if isinstance(text, Markup) else _UNSHOWN.sub("\ufffd", str(text)))


def markup(text: str, *values: object) -> Markup:
    """Markup with escaped values in place of its `{}`."""
    return Markup(text.format(*map(escape_html, values)))


@cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(_PACKAGE),
        autoescape=True,
        finalize=escape_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def macros(template: str) -> Any:
    """The macros of a template, as functions that return `Markup`."""
    return _templates().get_template(template).module


def html_page(
    template: str,
    *,
    title: str,
    script: str = "",
    style: str = "",
    is_served: bool = False,
    **values: object,
) -> str:
    """Build a page that needs no network and no other file, and is complete without its script.

    Args:
        template: A template that extends `page.html`.
        script: JavaScript that runs after the body is loaded.
        style: A style sheet after the one of all pages.
        is_served: Whether images and videos may be loaded from where the page is from: its server,
            or its folder.
    """
    # Style and script are inline: a report is one file that can be sent by mail and opened offline.
    style = page_text("documents/page.css") + style
    media = "data: 'self'" if is_served else "data:"
    policy = (
        f"default-src 'none'; img-src {media}; media-src {media}; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script) if script else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    inline = {"style": Markup(style), "script": Markup(script)}
    return (
        _templates().get_template(template).render(title=title, policy=policy, **inline, **values)
    )


def page_text(*names: str) -> str:
    """Scripts or style sheets of a page as one, by their paths in the package."""
    return "\n".join((_PACKAGE / name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def json_script(values: Mapping[str, Any], id: str) -> Markup:
    """Plain values as JSON for a page's script, in a script element."""
    text = _TURNING_IN_JSON.sub(r"\\ufffd", json.dumps(values, allow_nan=False))
    # Escaped, because a caption with `</script>` would end the element.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{id}">{text}</script>')
