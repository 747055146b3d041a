"""Two text files of a dataset, one of media and one of captions: line i of one belongs to line i of the other."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ditkit_core.data.media.clip import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from ditkit_core.data.media.image_sequence import numbered
from ditkit_core.errors import UserError

MEDIA_LISTS = ("videos.txt", "video.txt", "images.txt", "image.txt")
CAPTION_LISTS = ("prompts.txt", "prompt.txt", "captions.txt", "caption.txt")


class Pair(NamedTuple):
    """What two files say in the same line."""

    line: int
    """Counted from 1."""
    media: str
    caption: str
    """Without spaces around it, as the other; one of the two may be empty."""


def lists_in(folder: Path, accepted: Collection[str], *, image_folders: bool = False) -> list[str]:
    """Names of the lists that a folder has: a text beside a clip or picture of the same name is the caption of that.

    Args:
        folder: Where to look; one that cannot be read has none.
        accepted: `MEDIA_LISTS` or `CAPTION_LISTS`.
        image_folders: Whether a folder of numbered images is a clip.
    """
    names = _names(folder)
    media = {Path(name).stem for name in names if Path(name).suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES}
    lists = [name for name in names if name in accepted and Path(name).stem not in media]
    return [name for name in lists if not (image_folders and numbered(_names(folder / Path(name).stem)))]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def captions_of(media: Path, *, image_folders: bool = False) -> Path:
    """The list of captions beside a list of media.

    Args:
        media: The list of media.
        image_folders: Whether a folder of numbered images is a clip.

    Raises:
        UserError: If there is none, or several.
    """
    found = lists_in(media.parent, CAPTION_LISTS, image_folders=image_folders)
    if not found:
        raise UserError(
            f"{media} lists clips, and no list of their captions is beside it; write one to "
            f"{media.parent / CAPTION_LISTS[0]}, line by line"
        )
    if len(found) > 1:
        both = "both " if len(found) == 2 else ""
        raise UserError(
            f"{media.parent} has {both}{' and '.join(found)} for {media.name}; remove or rename all but one"
        )
    return media.parent / found[0]


def pairs(media: Path, media_text: str, captions: Path, captions_text: str) -> list[Pair]:
    """The lines of both files, without those that are empty in both, and without empty ones at the end.

    Args:
        media: The list of media, for messages.
        media_text: What it says.
        captions: The list of captions, for messages.
        captions_text: What it says.

    Raises:
        UserError: If they have different numbers of lines: which belongs to which cannot be told.
    """
    clips, texts = _lines(media_text), _lines(captions_text)
    if len(clips) != len(texts):
        empty = next(
            ((path, lines.index("") + 1) for path, lines in ((captions, texts), (media, clips)) if "" in lines), None
        )
        remedy = "write each caption in one line, and one for each file"
        if empty is not None:
            remedy = f"line {empty[1]} of {empty[0].name} is empty: remove it, or fill it in"
        raise UserError(
            f"{media} has {len(clips)} lines and {captions} {len(texts)}, and line i of one belongs to line i of the other; {remedy}"
        )
    return [Pair(*each) for each in zip(range(1, len(clips) + 1), clips, texts, strict=True) if each[1] or each[2]]


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in re.split(r"\r\n|\r|\n", text)]
    while lines and not lines[-1]:
        lines.pop()
    return lines
