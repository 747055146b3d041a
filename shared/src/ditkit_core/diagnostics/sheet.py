"""A sheet of samples, as a page that works without a network and as one image with labels."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ditkit_core.data.media import image as still
from ditkit_core.data.media import video
from ditkit_core.data.media.clip import probe
from ditkit_core.diagnostics.embedded import PageMedia
from ditkit_core.diagnostics.report.page import RELOAD_SECONDS
from ditkit_core.documents.document import Medium, Strip
from ditkit_core.documents.html import html_page, page_text
from ditkit_core.io.files import atomic_write, write_text

CELL_SIDE = 512
"""Longer side of an image in the sheet's image, at most, in pixels; and the width of a video's
frames side by side."""
STRIP_FRAMES = 4
"""Frames of a video in the sheet's image, at most."""
_GAP, _TEXT_SIZE = 12, 20
_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial.ttf", "arial.ttf")
"""Fonts of operating systems with more letters than the one of Pillow, which has ASCII alone."""


class Sheet:
    """A table of samples that is written again as they are generated.

    Args:
        folder: The folder of the samples, which the page and the image are written into.
        title: Title of the page.
        rows: For each row its prompt and its seed.
        columns: Labels of the columns.
    """

    def __init__(
        self, folder: Path, title: str, rows: Sequence[tuple[str, int]], columns: Sequence[str]
    ):
        self._folder, self._title, self._rows, self._columns = folder, title, rows, columns
        self._files: list[list[Path | None]] = [[None for _ in columns] for _ in rows]
        self._media = PageMedia(folder, links_videos=True)  # the page is next to its videos

    def put(self, row: int, column: int, file: Path) -> None:
        """Put a sample into its cell."""
        self._files[row][column] = file

    def write_page(self) -> Path:
        """Write sheet.html, with the samples that are there; it reloads itself until all are."""
        strips = [
            Strip(
                heading=f"{prompt} (seed {seed})",
                tiles=[
                    Medium(label=label, problem="not generated yet")
                    if file is None
                    else self._media.tile(file, label, prompt)
                    for label, file in zip(self._columns, files, strict=True)
                ],
            )
            for (prompt, seed), files in zip(self._rows, self._files, strict=True)
        ]
        num_all = len(self._rows) * len(self._columns)
        num_done = num_all - sum(files.count(None) for files in self._files)
        text = html_page(
            "diagnostics/sheet.html",
            title=self._title,
            is_served=True,
            script=page_text("documents/strips.js", "diagnostics/sheet.js"),
            style=page_text("diagnostics/sheet.css"),
            strips=strips,
            now=datetime.now(UTC),
            num_done=num_done,
            num_all=num_all,
            reload=RELOAD_SECONDS if num_done < num_all else None,
        )
        path = self._folder / "sheet.html"
        write_text(path, text)
        return path

    def write_image(self) -> Path:
        """Write sheet.png, of a sheet without missing samples: labels above the columns, and above
        each row its prompt. A video is a row of a few of its frames."""
        cells = [[_cell(file) for file in files if file is not None] for files in self._files]
        width = max(cell.width for row in cells for cell in row) + _GAP
        font = _font()
        labels = [_wrapped(label, width - _GAP, font) for label in self._columns]
        total = len(self._columns) * width + _GAP
        headings = [
            _wrapped(f"{text} (seed {seed})", total - 2 * _GAP, font) for text, seed in self._rows
        ]
        line = _TEXT_SIZE * 4 // 3
        label_height = max(map(len, labels)) * line + _GAP
        heights = [
            len(heading) * line + max(cell.height for cell in row) + 2 * _GAP
            for heading, row in zip(headings, cells, strict=True)
        ]
        canvas = Image.new("RGB", (total, label_height + sum(heights) + _GAP), "white")
        draw = ImageDraw.Draw(canvas)
        for column, lines in enumerate(labels):
            draw.multiline_text((_GAP + column * width, _GAP), "\n".join(lines), "black", font)
        top = label_height + _GAP
        for heading, row, height in zip(headings, cells, heights, strict=True):
            draw.multiline_text((_GAP, top), "\n".join(heading), "black", font)
            below = top + len(heading) * line + _GAP // 2
            for column, cell in enumerate(row):
                canvas.paste(cell, (_GAP + column * width, below))
            top += height
        path = self._folder / "sheet.png"
        with atomic_write(path) as temporary:
            canvas.save(temporary, format="PNG")
        return path


def _cell(file: Path) -> Image.Image:
    """A sample in the sheet's image."""
    if file.suffix != ".mp4":
        image = Image.fromarray(still.read_image(file))
        image.thumbnail((CELL_SIDE, CELL_SIDE))
        return image
    info = probe(file)
    num_frames = max(1, round(info.seconds * info.fps))
    count = min(STRIP_FRAMES, num_frames)
    indices = [round(index * (num_frames - 1) / max(count - 1, 1)) for index in range(count)]
    frames = [
        Image.fromarray(frame)
        for frame in video.frames_at(file, [(index + 0.5) / info.fps for index in indices])
    ]
    for frame in frames:
        frame.thumbnail((CELL_SIDE // count, CELL_SIDE))
    strip = Image.new("RGB", (sum(frame.width for frame in frames), frames[0].height), "white")
    for index, frame in enumerate(frames):
        strip.paste(frame, (index * frame.width, 0))
    return strip


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The first of these fonts that this machine has, or Pillow's."""
    for name in _FONTS:
        with suppress(OSError):
            return ImageFont.truetype(name, _TEXT_SIZE)
    return ImageFont.load_default(_TEXT_SIZE)


def _wrapped(
    text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> list[str]:
    """A text in lines of at most this width in pixels, where its words allow it."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
