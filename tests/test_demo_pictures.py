"""The pictures of the pages are small, of the demo as it is today, and said in words as they show
it."""

import re

import numpy as np
import pytest
from PIL import Image

import demo_pictures
from ditkit_core.data.media import video
from ditkit_core.diagnostics.report.data import SampleSet, Section
from ditkit_core.io.run_dir import ListedSample
from workspace import ROOT

LARGEST_BYTES = 130_000


@pytest.mark.parametrize("name", list(demo_pictures.SOURCES))
def test_a_picture_is_small_and_of_the_files_of_today(name):
    path = demo_pictures.FOLDER / name
    assert path.stat().st_size <= LARGEST_BYTES
    with Image.open(path) as image:
        assert image.width <= 1000 and image.text["source"] == demo_pictures.source_of(name), (
            f"{name} shows an older demo or style: uv run tools/demo/demo_pictures.py --run RUN "
            f"makes it again"
        )


def test_no_other_picture_is_there_and_each_is_on_its_pages():
    assert {path.name for path in demo_pictures.FOLDER.iterdir()} == demo_pictures.SOURCES.keys()
    assert demo_pictures.PAGES.keys() == demo_pictures.SOURCES.keys()
    for name, pages in demo_pictures.PAGES.items():
        for page in pages:
            assert f"pictures/{name})" in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_readme_says_the_verdict_that_its_picture_shows():
    with Image.open(demo_pictures.FOLDER / "report.png") as image:
        verdict = image.text["verdict"]
    assert re.fullmatch(r"It learns: loss on unseen clips fell by \d+ %\.", verdict)
    assert f"The page of the demo's run: {verdict[:-1]}]" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )


def test_another_demo_makes_a_picture_old(tmp_path, monkeypatch):
    changed = tmp_path / "demo.toml"
    changed.write_bytes(demo_pictures.DEMO.read_bytes())
    monkeypatch.setitem(demo_pictures.SOURCES, "before_after.png", (changed,))
    before = demo_pictures.source_of("before_after.png")
    changed.write_bytes(changed.read_bytes() + b"# more\n")
    assert demo_pictures.source_of("before_after.png") != before


def test_the_strip_shows_frames_of_the_first_prompt_and_of_the_control(tmp_path):
    """Each sample is of one colour, which is where it belongs."""
    colours = {
        ("step 0", 0): (255, 0, 0),
        ("step 0", 1): (0, 255, 0),
        ("step 9", 0): (0, 0, 255),
        ("step 9", 1): (255, 255, 0),
    }
    files = {}
    for (title, index), colour in colours.items():
        files[title, index] = tmp_path / f"{title}-{index}.mp4"
        frame = np.full((64, 64, 3), colour, dtype=np.uint8)
        video.write_h264(files[title, index], [frame] * 9, fps=16)
    sets = [
        SampleSet(
            title=title,
            samples=[
                ListedSample(file=files[title, i], prompt="a", seed="0", decoded="") for i in (0, 1)
            ],
        )
        for title in ("step 0", "step 9")
    ]
    image = demo_pictures.before_and_after(Section(name="", series={}, samples=sets))
    for (title, index), colour in colours.items():
        at = (image.width // 4 + (title == "step 9") * image.width // 2, 70 + index * 116)
        assert max(abs(a - b) for a, b in zip(image.getpixel(at), colour, strict=True)) < 40, (
            title,
            index,
        )
