"""HTML and SVG as values: whatever is not markup made here is escaped, so that no caption or file name can become markup."""

import html
import unicodedata


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
        f' {name.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if not children and tag in _VOID:
        return Html(f"<{tag}{given}>")
    return Html(f"<{tag}{given}>{joined(*children)}</{tag}>")


_VOID = frozenset({"img", "meta"})


def joined(*parts: str) -> Html:
    """Parts one after the other; `Html` as it is, any other text escaped."""
    return Html("".join(part if isinstance(part, Html) else escaped(part) for part in parts))


def escaped(text: str) -> str:
    """A text that HTML and SVG show as it is; what no file can hold or no one can see (control characters, halves of characters) shows
    as the replacement character."""
    shown = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c for c in text)
    return html.escape(shown, quote=True)
