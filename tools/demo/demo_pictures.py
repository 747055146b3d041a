"""The pictures of the README: the page of a run of Wan's demo in a browser, and its samples before
and after training.

    uv run wan-train --demo --run.folder runs/demo
    uv run tools/demo/demo_pictures.py --run runs/demo

Needs Chromium or Chrome. Each picture says in its header what it was made of;
`tests/test_demo_pictures.py` compares that with the files of today, and refuses a picture that is
old or large.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from ditkit_core.data.media import video
from ditkit_core.diagnostics.report.data import Section, read_sections
from ditkit_core.diagnostics.report.overview import section_verdict
from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.errors import UserError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
DEMO = ROOT / "packages/wan/src/ditkit_wan/demo/demo.toml"
SOURCES = {
    "report.png": (DEMO, ROOT / "shared/src/ditkit_core/documents/page.css"),
    "before_after.png": (DEMO,),
    # tools/docs/precision_pictures.py
    "precision.png": tuple(
        ROOT / f"packages/{name}/src/ditkit_{name}/demo/demo.toml"
        for name in ("flux2", "wan", "zimage")
    ),
}
"""The files that decide what a picture shows, by its name."""
PAGES = {
    "report.png": ("README.md", "docs/watching.md"),
    "before_after.png": ("README.md", "docs/watching.md"),
    "precision.png": ("docs/precision.md",),
}
"""The pages that show a picture."""
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
_WINDOW, _SHOWN_WIDTH = (1280, 800), 960
_TILE, _GAP, _LINE = 96, 6, 20
_FRAMES = (0, 2, 5, 8)
"""Frames of a sample that are shown, of nine."""
_COLOURS = 256


def source_of(name: str) -> str:
    """The digest of the files that decide what a picture shows."""
    digest = hashlib.sha256()
    for path in SOURCES[name]:
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def write_picture(image: Image.Image, path: Path, facts: Mapping[str, str]) -> None:
    """Write a PNG of few colours, with its source and other facts in its header."""
    header = PngInfo()
    for name, text in {"source": source_of(path.name), **facts}.items():
        header.add_text(name, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert("RGB").quantize(_COLOURS, kmeans=3, dither=Image.Dither.NONE).save(
        path, optimize=True, pnginfo=header
    )


def photograph(page: Path) -> Image.Image:
    """The top of a page, as a browser shows it at a width of 1,280 pixels.

    Raises:
        UserError: If no browser is installed.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UserError(f"no browser is installed (looked for {', '.join(BROWSERS)})")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "page.png"
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile", f"--window-size={_WINDOW[0]},{_WINDOW[1]}",
            "--virtual-time-budget=4000", f"--screenshot={shot}", page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=150)
        with Image.open(shot) as image:
            return image.convert("RGB").resize(
                (_SHOWN_WIDTH, _SHOWN_WIDTH * image.height // image.width)
            )


def before_and_after(section: Section) -> Image.Image:
    """A row for the first prompt and for the last, which is a control: frames before training, and
    frames after it."""
    first, last = section.samples[0], section.samples[-1]
    side = len(_FRAMES) * _TILE
    prompts = {
        0: first.samples[0].prompt,
        len(first.samples) - 1: f"control: {first.samples[-1].prompt}",
    }
    image = Image.new(
        "RGB", (2 * side + 3 * _GAP, len(prompts) * (_TILE + _LINE) + _LINE + 2 * _GAP), "white"
    )
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    for row, (index, prompt) in enumerate(prompts.items()):
        top = _LINE + row * (_TILE + _LINE) + _GAP
        for column, (label, samples) in enumerate((("before training", first), (last.title, last))):
            left = _GAP + column * (side + _GAP)
            draw.text((left, 4), label, "#1b1f24", font)
            seconds = [frame / 16 for frame in _FRAMES]
            for place, frame in enumerate(video.frames_at(samples.samples[index].file, seconds)):
                tile = Image.fromarray(frame).resize((_TILE, _TILE), Image.Resampling.BICUBIC)
                image.paste(tile, (left + place * _TILE, top))
        draw.text((_GAP, top + _TILE + 2), prompt, "#5b6570", font)
    return image


def main(argv: Sequence[str] | None = None) -> int:
    """Write both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="the folder of a complete run of wan-train --demo"
    )
    folder = parser.parse_args(argv).run
    (section,) = read_sections(folder)
    headline = section_verdict(section)[0].headline
    verdict = f"{headline[0].upper()}{headline[1:]}."
    write_picture(photograph(write_report(folder)), FOLDER / "report.png", {"verdict": verdict})
    write_picture(
        before_and_after(section), FOLDER / "before_after.png", {"steps": str(section.completed)}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
