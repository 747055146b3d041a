"""Text of a page that a program writes: the text between two markers."""

from ditkit_core.errors import UserError

Markers = tuple[str, str]
"""The line before the text, and the line after it."""


def between(text: str, markers: Markers, page: str) -> str:
    """The text between two markers.

    Args:
        text: Text of the page.
        markers: Each is there once.
        page: Name of the page, for messages.

    Raises:
        UserError: If a marker is not there once.
    """
    for marker in markers:
        if text.count(marker) != 1:
            raise UserError(
                f"{page} has to have the marker {marker!r} once, and has it {text.count(marker)} "
                f"times"
            )
    return text.split(markers[0])[1].split(markers[1])[0]


def replaced(text: str, markers: Markers, new: str, page: str) -> str:
    """The page's text with new text between two markers."""
    begin, end = markers
    return text.replace(f"{begin}{between(text, markers, page)}{end}", f"{begin}\n{new}\n{end}")
