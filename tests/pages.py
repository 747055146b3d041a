"""The pages of the repository as its tests read them: fenced blocks, and code within sentences."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from workspace import text_files

PAGES = [file for file in text_files() if file.suffix == ".md"]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    """What follows the fence; empty if nothing does."""
    text: str
    line: int
    """Of the page, of the fence."""


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield Block(found[2], found[3], text.count("\n", 0, found.start()) + 1)


def prose(page: Path) -> str:
    """A page without its fenced blocks and comments."""
    return re.sub(
        r"<!--.*?-->", "", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.DOTALL
    )


def code_in(text: str) -> Iterator[str]:
    """What a text without fenced blocks has as code, each on one line."""
    for found in re.findall(r"`([^`]+)`", text):
        yield " ".join(found.split())
