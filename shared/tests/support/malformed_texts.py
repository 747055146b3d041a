"""Captions, metadata and control files that are wrong; each function writes one into a dataset
folder.

Captions are next to a sound image with the name that the function gets. Lines of metadata name that
image, and are returned, as they are written to metadata.jsonl, with what is called wrong.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from media_files import noisy_video, numbered_video, picture, sound_only, truncated


def caption(data: bytes | None) -> Callable[[Path, str], str]:
    """What writes an image with these bytes as its caption."""

    def write(folder: Path, name: str) -> str:
        picture(folder / f"{name}.png")
        if data is not None:
            (folder / f"{name}.txt").write_bytes(data)
        return name

    return write


def caption_folder(folder: Path, name: str) -> str:
    (folder / f"{name}.txt").mkdir()
    return picture(folder / f"{name}.png").name


def two_captions(folder: Path, name: str) -> str:
    for suffix in ("txt", "caption"):
        (folder / f"{name}.{suffix}").write_text(suffix)
    return picture(folder / f"{name}.png").name


def caption_outside(folder: Path, name: str) -> str:
    (folder.parent / "secret.txt").write_text("x")
    (folder / f"{name}.txt").symlink_to(folder.parent / "secret.txt")
    picture(folder / f"{name}.png")
    return f"{name}.txt"


def caption_in_a_circle(folder: Path, name: str) -> str:
    (folder / f"{name}.txt").symlink_to(folder / f"{name}.txt")
    picture(folder / f"{name}.png")
    return f"{name}.txt"


Line = Callable[[Path, str], str]
"""Writes files, and returns a line for metadata.jsonl."""


def raw(line: str) -> Line:
    """A line in which NAME is the image's name."""

    def write(folder: Path, name: str) -> str:
        return line.replace("NAME", picture(folder / f"{name}.png").name)

    return write


def row(**values: Any) -> Line:
    """A line of JSON about a sound image, `file_name` and `text` being there unless given."""
    return lambda folder, name: json.dumps(
        {"file_name": picture(folder / f"{name}.png").name, "text": "a caption"} | values
    )


def without(key: str, **values: Any) -> Line:
    """The same without one of the columns."""

    def write(folder: Path, name: str) -> str:
        found = json.loads(row(**values)(folder, name))
        del found[key]
        return json.dumps(found)

    return write


def named_outside(folder: Path, name: str) -> str:
    picture(folder.parent / f"{name}.png")
    return json.dumps({"file_name": f"../{name}.png", "text": "x"})


def named_absolutely(folder: Path, name: str) -> str:
    return json.dumps({"file_name": str(picture(folder.parent / f"{name}.png")), "text": "x"})


def named_twice(folder: Path, name: str) -> str:
    picture(folder / f"{name}.png")
    return "\n".join(
        json.dumps({"file_name": file, "text": "x"}) for file in (f"{name}.png", f"./{name}.png")
    )


def whole(file: str, data: str | bytes) -> Callable[[Path, str], str]:
    """What writes metadata of which nothing can be used."""

    def write(folder: Path, name: str) -> str:
        (folder / file).write_bytes(data if isinstance(data, bytes) else data.encode())
        return file

    return write


def two_files(folder: Path, name: str) -> str:
    for file in ("metadata.csv", "metadata.jsonl"):
        (folder / file).write_text("")
    return "metadata.csv"


def uneven_lists(folder: Path, name: str) -> str:
    for text in folder.glob("*.txt"):
        text.unlink()  # next to clips, which goes before lists
    (folder / "prompts.txt").write_text("one\ntwo")
    return whole("images.txt", "good0.png\n")(folder, name)


def long_field(folder: Path, name: str) -> str:
    assert csv.field_size_limit() < 200_000
    return whole("metadata.csv", "video,prompt\ngood0.png," + "x" * 200_000)(folder, name)


def controlled(make: Callable[[Path, str], Any], column: str = "control_video") -> Line:
    """A line about a sound video with what `make` gives for a column."""

    def write(folder: Path, name: str) -> str:
        numbered_video(folder / f"{name}.mp4")
        return json.dumps(
            {"file_name": f"{name}.mp4", "text": "x", column: make(folder, f"{name}-control")}
        )

    return write


def file(suffix: str, data: bytes) -> Callable[[Path, str], str]:
    """What writes a control of given bytes."""

    def write(folder: Path, name: str) -> str:
        (folder / f"{name}{suffix}").write_bytes(data)
        return f"{name}{suffix}"

    return write


def short_video(folder: Path, name: str) -> str:
    return numbered_video(folder / f"{name}.mp4", frames=6).name


def sound(folder: Path, name: str) -> str:
    return sound_only(folder / f"{name}.mp4").name


def damaged_video(folder: Path, name: str) -> str:
    path = noisy_video(folder / f"{name}.mp4")
    return truncated(path, path, 0.2).name


def directory(folder: Path, name: str) -> str:
    picture(folder / name / "a.png")
    picture(folder / name / "b.png")
    return name


def link_outside(folder: Path, name: str) -> str:
    target = numbered_video(folder.parent / f"{name}.mp4")
    (folder / f"{name}.mp4").symlink_to(target)
    return f"{name}.mp4"


def outside(folder: Path, name: str) -> str:
    return f"../{numbered_video(folder.parent / f'{name}.mp4').name}"
