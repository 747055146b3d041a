"""A catalogue of everything that can be wrong with a dataset, made by the tests: what it is called,
how it is written, what becomes of it.

The toy family of these tests takes five frames at 8 per second; `COLUMNS` are what goes with its
clips.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import malformed_media as media
import malformed_texts as texts
import torch
from media_files import picture
from torch import Tensor

from ditkit_core.data.media.clip import read_clip
from ditkit_core.io.console import NullProgress
from ditkit_core.models.conditions import ClipInputs, Column
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.specs import altered

Kind = Literal["media", "caption", "metadata", "control"]
Outcome = Literal["excluded", "accepted", "refused"]
"""Left out alone; used, though it looks odd; or nothing of the dataset can be used, as its list
cannot be read."""

COLUMNS = (
    Column(name="control_video", kind="video"),
    Column(name="start_image", kind="image"),
    Column(name="music", kind="audio"),
    Column(name="poses", kind="table"),
    Column(name="direction", kind="text"),
)


class Given:
    """`given`: the brightness of the images that go with a clip, each read as it is cut."""

    kind, optional, items_at_once, identity = "given", True, 1, "given"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        return tuple(
            column for column in ("control_video", "start_image") if column in controls.files
        )

    def check(self, controls: ClipInputs) -> None:
        self.encode([controls])

    def load(self) -> None:
        pass

    def unload(self) -> None:
        pass

    def encode(
        self, items: Sequence[ClipInputs], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        (item,) = items
        if not self.uses(item):
            return [{}]
        size = {"height": item.height, "width": item.width}
        means = []
        for column in self.uses(item):
            cut = {
                "frames": item.frames,
                "fps": item.fps or 1.0,
                "start_seconds": item.start_seconds,
            }
            cut = cut if column == "control_video" else {"frames": 1, "fps": 1.0}
            means.append(read_clip(Path(item.files[column]), **cut, **size).mean())  # type: ignore[arg-type]
        advance(1.0)
        return [{"given": torch.stack(means)}]


def controlled(spec: ModelSpec) -> ModelSpec:
    """A family that is given what goes with a clip."""
    return altered(spec, columns=lambda arch: COLUMNS, conditioners=lambda *given: [Given()])


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """One thing that is wrong."""

    name: str
    kind: Kind
    write: Callable[[Path, str], str]
    """Writes it into a dataset folder under a name; returns the file's name, or what metadata.jsonl
    says of it."""
    outcome: Outcome = "excluded"
    says: str = ""
    """What its line must have in it."""

    @property
    def listed(self) -> bool:
        """Whether it is a line of metadata.jsonl."""
        return self.outcome != "refused" and self.kind in ("metadata", "control")

    def put(self, folder: Path, name: str = "bad") -> str:
        """Write it, with a caption where a file needs one; returns what names it in a message."""
        found = self.write(folder, name)
        if self.kind == "media":
            (folder / found).with_suffix(".txt").write_text("a caption")
        return found


def good(folder: Path, count: int = 2) -> list[str]:
    """Sound images with captions; returns their lines for metadata.jsonl, of which they need none
    without one."""
    lines = []
    for i, colour in enumerate(("teal", "gold", "navy", "red", "white")[:count]):
        path = picture(folder / f"good{i}.png", (16, 16), colour)
        path.with_suffix(".txt").write_text(f"picture {i}")
        lines.append(json.dumps({"file_name": path.name, "text": f"picture {i}"}))
    return lines


_HTML = b"<!doctype html><html><body><h1>404 Not Found</h1></body></html>"
_SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
_PLAYLIST = b"#EXTM3U\n#EXTINF:10,\nhttp://example.com/other.ts\n#EXT-X-ENDLIST\n"
_NOISE = bytes(range(256)) * 20
_BAD_MEDIA = {
    "empty video": media.of_bytes(".mp4", b""),
    "empty picture": media.of_bytes(".png", b""),
    "header of a video": media.header_only,
    "video without its index": media.without_index,
    "video cut in the middle": media.cut_in_the_middle,
    "bytes called mp4": media.of_bytes(".mp4", _NOISE),
    "bytes called jpg": media.of_bytes(".jpg", _NOISE),
    "text called mp4": media.of_bytes(".mp4", b"these are no pixels\n" * 50),
    "text called png": media.of_bytes(".png", b"these are no pixels\n" * 50),
    "zip called mp4": media.of_bytes(".mp4", b"PK\3\4" + bytes(200)),
    "png called mp4": media.png_called_mp4,
    "mp4 called png": media.mp4_called_png,
    "script called mp4": media.script_called_mp4,
    "playlist called mp4": media.of_bytes(".mp4", _PLAYLIST),
    "playlist called ts": media.of_bytes(".ts", _PLAYLIST),
    "svg called png": media.of_bytes(".png", _SVG),
    "svg called mp4": media.of_bytes(".mp4", _SVG),
    "page called mp4": media.of_bytes(".mp4", _HTML),
    "page called jpg": media.of_bytes(".jpg", _HTML),
    "page called webp": media.of_bytes(".webp", _HTML),
    "png of 100000 x 100000": media.of_bytes(".png", media.png(100_000, 100_000)),
    "png of 12000 x 12000": media.of_bytes(".png", media.png(12_000, 12_000)),
    "png of 0 x 0": media.of_bytes(".png", media.png(0, 0)),
    "gif of 65535 x 65535": media.of_bytes(".gif", media.gif(65535, 65535)),
    "gif of 16000 x 16000": media.of_bytes(".gif", media.gif(16_000, 16_000)),
    "video of 16384 x 16384": media.huge_video,
    "png with a bomb of text": media.text_bomb,
    "frames of days": media.endless_frames,
    "frames of no duration": media.frames_of_no_duration,
    "clock of billions a second": media.timescale(0x7FFFFFFF),
    "times that go backwards": media.backwards,
    "one frame": media.one_frame,
    "sound alone in mp4": media.sound(".mp4"),
    "sound alone in mkv": media.sound(".mkv"),
    "first frame damaged": media.without_first_packet_data,
    "frame damaged inside": media.damaged_inside,
    "no keyframe at the start": media.without_first_keyframe,
    "unknown codec": media.unknown_codec,
    "transparency beside a codec that has none": media.tagged_transparent,
    "animated png": media.animated_png,
    "tif of 32 bits": media.deep_tif,
    "png cut": media.still(".png", 0.5),
    "jpg cut": media.still(".jpg", 0.5),
    "webp cut": media.still(".webp", 0.5, lossless=True),
    "tif cut": media.still(".tif", 0.5),
    "bmp cut": media.still(".bmp", 0.5),
    "png with a wrong checksum": media.wrong_checksum,
    "folder called mp4": media.folder_called_mp4,
    "link out of the folder": media.link(media.outside),
    "link in a circle": media.link(lambda path: path),
    "link to nothing": media.link(lambda path: path.with_name("gone.mp4")),
    "pipe": media.pipe,
    "line break in the name": media.named("\nsecond line"),
    "escape codes in the name": media.named("\x1b[31mred"),
    "half of a character in the name": media.named("\udcff"),
}
_HARMLESS_MEDIA = {
    "1 x 1": media.sized(1, 1),
    "10000 wide": media.sized(16, 10_000),
    "10000 high": media.sized(10_000, 16),
    "transparent png": media.transparent_png,
    "palette with transparency": media.palette_png,
    "transparent mov": media.transparent_mov,
    "hdr video": media.hdr_video,
    "video with a long tag": media.tagged("x", 1 << 20),
    "video with a tag in latin-1": media.tagged_in_latin_1,
    "png with a long comment": media.commented_png,
    "picture of a phone": media.phone_picture,
    "picture turned": media.turned_picture,
    "gif": media.moving_gif,
    "times below zero": media.negative_times,
    "clip 10000 wide": media.clip(".mp4", (16, 10_000), "libx264", "yuv420p", preset="ultrafast"),
    "clip of 1 x 1": media.clip(".mp4", (1, 1), "libx264", "yuv444p", qp="0"),
}


def _media() -> Iterator[Malformed]:
    for name, write in _BAD_MEDIA.items():
        yield Malformed(name=name, kind="media", write=write)
    for name, write in _HARMLESS_MEDIA.items():
        yield Malformed(name=name, kind="media", write=write, outcome="accepted")


def _captions() -> Iterator[Malformed]:
    c = texts.caption
    bad = {
        "caption missing": (c(None), "no caption"),
        "caption empty": (c(b""), "is empty"),
        "caption of blanks": (c(b" \n\t \r\n"), "is empty"),
        "caption of a mark alone": (c(b"\xef\xbb\xbf"), "is empty"),
        "caption in latin-1": (c("café".encode("latin-1")), "not UTF-8"),
        "caption in UTF-16": (c("a dog".encode("utf-16")), "not UTF-8"),
        "caption in UTF-16 without a mark": (c("a dog".encode("utf-16-le")), "null bytes"),
        "caption of bytes": (c(bytes(range(256))), "not UTF-8"),
        "caption of a megabyte": (c(b"very " * 200_000), "characters"),
        "caption with a null byte": (c(b"a\0dog"), "null bytes"),
        "caption with half of a character": (c(b"a \xed\xa0\xbd dog"), "not UTF-8"),
        "caption that is a folder": (texts.caption_folder, "no caption"),
        "caption outside": (texts.caption_outside, "leaves the dataset folder"),
        "caption in a circle": (texts.caption_in_a_circle, "symbolic links"),
    }
    for name, (write, says) in bad.items():
        yield Malformed(name=name, kind="caption", write=write, says=says)
    harmless = {
        "caption with a mark": c(b"\xef\xbb\xbfa dog"),
        "caption with blank lines": c(b"\r\n\r\na dog\r\n"),
        "two captions that differ": texts.two_captions,
        "caption of pictographs": c("a 🐕‍🦺 — собака".encode()),
    }
    for name, write in harmless.items():
        yield Malformed(name=name, kind="caption", write=write, outcome="accepted")


_HEAD = '{"file_name": "NAME", "text": "x", '
_GOOD0 = '"file_name": "good0.png", "text": "x"'
_BAD_METADATA = {
    "json cut": (texts.raw('{"file_name": "NAME", '), "not valid JSON"),
    "json of single quotes": (texts.raw("{'file_name': 'NAME', 'text': 'x'}"), "not valid JSON"),
    "two objects in a line": (texts.raw('{"file_name": "NAME"} {"text": "x"}'), "not valid JSON"),
    "list in place of an object": (texts.raw('["NAME", "x"]'), "not a JSON object"),
    "number in place of an object": (texts.raw("17"), "not a JSON object"),
    "key twice": (texts.raw(_HEAD + '"text": "y"}'), "'text' twice"),
    "nested deeply": (texts.raw("[" * 100_000), "nested too deeply"),
    "number of 5000 digits": (texts.raw(_HEAD + '"id": ' + "1" * 5000 + "}"), "too many digits"),
    "caption not a number": (
        texts.raw('{"file_name": "NAME", "text": NaN}'),
        "empty or not a text",
    ),
    "caption a number": (texts.row(text=3), "empty or not a text"),
    "caption null": (texts.row(text=None), "empty or not a text"),
    "caption an object": (texts.row(text={"en": "a dog"}), "empty or not a text"),
    "captions none": (texts.row(text=[]), "empty or not a text"),
    "captions with a number": (texts.row(text=["one", 2]), "empty or not a text"),
    "caption with half of a character in json": (
        texts.row(text="a dog \ud83d"),
        "half of a character",
    ),
    "caption with a null byte in json": (texts.row(text="a\0dog"), "null bytes"),
    "caption of a megabyte in json": (texts.row(text="x" * 2**20), "characters"),
    "no caption column": (texts.without("text"), "no caption column"),
    "caption column misspelt": (texts.without("text", captoin="x"), "no caption column"),
    "two caption columns": (texts.row(caption="y"), "2 caption columns"),
    "two media columns": (texts.row(video="good0.png"), "2 media columns"),
    "no media column": (texts.without("file_name"), "no media column"),
    "media null": (texts.row(file_name=None), "empty or not a text"),
    "media a list": (texts.row(file_name=["a.png"]), "empty or not a text"),
    "media a truth": (texts.row(file_name=True), "empty or not a text"),
    "media gone": (texts.row(file_name="gone.png"), "does not exist"),
    "media of no kind": (
        texts.row(file_name="notes.docx"),
        "does not have the extension of a media file",
    ),
    "media of an address": (texts.row(file_name="https://example.com/a.png"), "does not exist"),
    "media outside": (texts.named_outside, "leaves the dataset folder"),
    "media absolute": (texts.named_absolutely, "leaves the dataset folder"),
    "media the folder itself": (texts.row(file_name="."), "extension"),
    "media with a null byte": (texts.row(file_name="a\0.png"), "no file name can have"),
    "media with half of a character": (texts.row(file_name="\ud800.png"), "no file name can have"),
    "media with a line break": (texts.row(file_name="a\nb.png"), "line breaks"),
    "media of a long name": (texts.row(file_name="a" * 5000 + ".png"), "File name too long"),
    "media named twice": (texts.named_twice, "is listed 2 times"),
    "references misspelt": (texts.row(referencs="good0.png"), "rename it to 'references'"),
}
_HARMLESS_METADATA = {
    "other columns": texts.row(id=float("nan"), score=1e400, extra={"deep": [[[]]]}),
    "blank lines between": lambda folder, name: "\n \r\n" + texts.row()(folder, name) + "\r\n",
    "caption in a list": texts.row(text=["one"]),
}
_REFUSED_METADATA: dict[str, tuple[str, str | bytes]] = {
    "csv with an open quote": ("metadata.csv", 'video,prompt\ngood0.png,"a dog\n'),
    "csv with a stray quote": ("metadata.csv", 'video,prompt\ngood0.png,"a "good" dog"\n'),
    "csv without a header": ("metadata.csv", "good0.png,a dog\n"),
    "csv in latin-1": ("metadata.csv", "video,prompt\ngood0.png,café\n".encode("latin-1")),
    "csv in UTF-16": ("metadata.csv", "video,prompt\ngood0.png,x\n".encode("utf-16")),
    "csv empty": ("metadata.csv", ""),
    "csv with a column twice": ("metadata.csv", "video,prompt,prompt\ngood0.png,x,y\n"),
    "csv with two caption columns": ("metadata.csv", "video,prompt,caption\ngood0.png,x,y\n"),
    "csv with a null byte": ("metadata.csv", b"video,pro\0mpt\ngood0.png,x\n"),
    "json an object": ("metadata.json", f"{{{_GOOD0}}}"),
    "json list cut": ("metadata.json", f"[{{{_GOOD0}}}, "),
    "json list nested deeply": ("metadata.json", "[" * 100_000),
    "json list with a key twice": ("metadata.json", f'[{{{_GOOD0}, "text": "y"}}]'),
    "json list empty": ("metadata.json", "[]"),
    "json lines empty": ("metadata.jsonl", ""),
    "json lines in UTF-16": ("metadata.jsonl", f"{{{_GOOD0}}}".encode("utf-16")),
}


def _metadata() -> Iterator[Malformed]:
    for name, (write, says) in _BAD_METADATA.items():
        yield Malformed(name=name, kind="metadata", write=write, says=says)
    for name, write in _HARMLESS_METADATA.items():
        yield Malformed(name=name, kind="metadata", write=write, outcome="accepted")
    for name, (file, data) in _REFUSED_METADATA.items():
        yield Malformed(
            name=name, kind="metadata", write=texts.whole(file, data), outcome="refused"
        )
    yield Malformed(
        name="csv with a long field", kind="metadata", write=texts.long_field, outcome="refused"
    )
    yield Malformed(
        name="lists of different lengths",
        kind="metadata",
        write=texts.uneven_lists,
        outcome="refused",
    )
    yield Malformed(name="two lists", kind="metadata", write=texts.two_files, outcome="refused")


def _controls() -> Iterator[Malformed]:
    c, t = texts.controlled, texts
    bad = {
        "control missing": (c(lambda *_: "gone.mp4"), "does not exist"),
        "control of the wrong kind": (
            c(t.file(".wav", b"RIFF")),
            "not of kind video by its extension",
        ),
        "control shorter than the clip": (c(t.short_video), "make it as long as the clip"),
        "control empty": (c(t.file(".mp4", b"")), "is empty"),
        "control cut": (c(t.damaged_video), "truncated or damaged"),
        "control without pictures": (c(t.sound), "no video stream"),
        "control a folder": (c(t.directory), "does not contain only numbered images"),
        "control outside": (c(t.outside), "leaves the dataset folder"),
        "control behind a link": (c(t.link_outside), "leaves the dataset folder"),
        "control a number": (c(lambda *_: 3), "not the path of a single file"),
        "control several": (c(lambda *_: ["a.mp4", "b.mp4"]), "not the path of a single file"),
        "control with a null byte": (c(lambda *_: "a\0.mp4"), "no file name can have"),
        "start a video": (c(t.short_video, "start_image"), "not of kind image by its extension"),
        "start torn": (c(media.still(".png", 0.5), "start_image"), "cannot be read as an image"),
        "music empty": (c(t.file(".wav", b""), "music"), "is empty"),
        "music a folder": (c(t.directory, "music"), "not of kind audio by its extension"),
        "poses a folder": (c(t.directory, "poses"), "is a folder"),
        "direction an object": (c(lambda *_: {"to": 1}, "direction"), "not a text"),
        "column misspelt": (c(t.short_video, "control_vide"), "did you mean 'control_video'"),
    }
    for name, (write, says) in bad.items():
        yield Malformed(name=name, kind="control", write=write, says=says)


CATALOGUE = {
    each.name: each for make in (_media, _captions, _metadata, _controls) for each in make()
}
"""By name."""
assert len(CATALOGUE) >= 60
