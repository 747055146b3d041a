"""Samples on the page of a run: embedded within limits, and linked to their files."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from made_runs import write_run, write_samples
from report_pages import read

from ditkit_core.diagnostics import embedded as embedded_part
from ditkit_core.diagnostics.embedded import MEDIA_BYTES, small_jpeg
from ditkit_core.diagnostics.report import page as page_part


def test_images_are_made_to_take_little() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3000, 2000, 3), dtype=np.uint8)
    assert len(small_jpeg(noise, (640, 640), 150_000)) <= 150_000


def test_images_are_embedded_and_lead_to_their_files(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for step in (0, 40):
        write_samples(run / "samples", step, ("a cat", "50% & <b>"), suffix=".png")
    page = read(run)
    assert [image["alt"] for image in page.all("img")] == [
        "a cat",
        "a cat",
        "50% & <b>",
        "50% & <b>",
    ]
    assert all(image["src"].startswith("data:image/jpeg;base64,") for image in page.all("img"))
    assert [link["href"] for link in page.all("a")][:2] == ["samples/step-000000-0.png"] * 2, (
        "the image, and its label"
    )


def test_a_sample_that_was_not_decoded_whole_says_how(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_samples(run / "samples", 0, ("a cat", "a dog"), suffix=".png")
    listed = run / "samples" / "step-000000.json"
    about = json.loads(listed.read_text())
    for sample, decoded in zip(about["samples"], ("whole", "in bf16 tiles <b>"), strict=True):
        sample["decoded"] = decoded
    listed.write_text(json.dumps(about))
    assert (
        read(run).text.count("decoded ")
        == read(run).text.count("decoded in bf16 tiles &lt;b&gt;")
        == 1
    )


def test_large_videos_are_a_link_and_the_page_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link works where the page is in the folder of the run. The newest samples and those before
    training go first."""
    run = write_run(tmp_path)
    for step in range(1, 8):
        write_samples(run / "samples", step, ("a cat", "a dog"))
    size = max(path.stat().st_size for path in (run / "samples").glob("*.mp4"))
    monkeypatch.setattr(page_part, "MEDIA_BYTES", 6 * size)
    page = read(run)
    embedded = {video["src"]: video["aria-label"] for video in page.all("video")}
    assert 1 <= len(embedded) and 4 <= len(page.all("video")) <= 6
    strip = page.text[page.text.index("a cat (seed 0)") : page.text.index("a dog (seed 0)")]
    tiles = strip.split('<figure class="tile">')[1:]
    assert len(tiles) == 9 and [("<video" in tile) for tile in (tiles[0], tiles[-1], tiles[1])] == [
        True,
        True,
        False,
    ]
    assert (
        all('href="samples/step-' in tile for tile in tiles)
        and "in the run&#39;s folder" in tiles[1]
    )
    spent = sum(
        len(base64.b64decode(each["src"].split(",")[1]))
        for kind in ("video", "img")
        for each in page.all(kind)
        if each.get("src")
    )
    assert spent <= 6 * size < MEDIA_BYTES
    monkeypatch.undo()
    monkeypatch.setattr(embedded_part, "VIDEO_BYTES", 10)
    page = read(run)
    assert not page.all("video") and len(page.all("img")) == 18, (
        "the first frame of each, which leads to the file"
    )


def test_samples_that_cannot_be_shown_are_a_line_on_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    secret = tmp_path.parent / "secret.mp4"
    secret.write_bytes(b"secret")
    (run / "samples" / "step-000000-0.mp4").unlink()
    (run / "samples" / "step-000000-1.mp4").unlink()
    (run / "samples" / "step-000000-1.mp4").symlink_to(secret)
    write_samples(run / "samples", 20, ("a cat", "a dog"), suffix=".png")
    (run / "samples" / "step-000020-0.png").write_bytes(b"no image")
    page = read(run)
    assert (
        "step-000000-0.mp4 is missing" in page.shown
        and "step-000000-1.mp4 is a link, which the page leaves out" in page.shown
    )
    assert (
        "cannot be read as an image" in page.shown
        and base64.b64encode(b"secret").decode() not in page.text
    )
    assert len(page.all("video")) == 2 and len(page.all("img")) == 1
    assert "Samples of the sample command" not in page.shown
    write_samples(run / "samples", 40, ("my prompt",), name="sampled-001-step-000040")
    page = read(run)
    assert (
        page.titles.index("Samples")
        < page.titles.index("Samples of the sample command")
        < page.titles.index("Loss")
    )
    assert (
        "sampled-001-step-000040" in page.shown
        and page.all("video")[-1]["aria-label"] == "my prompt"
    )


def test_samples_of_one_step_fill_the_page_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the newest and the first samples at the same time."""
    run = write_run(tmp_path)
    for path in (run / "samples").iterdir():
        path.unlink()
    write_samples(run / "samples", 40, ("a cat", "a dog"))
    monkeypatch.setattr(
        page_part, "MEDIA_BYTES", sum(path.stat().st_size for path in run.glob("samples/*.mp4"))
    )
    assert len(read(run).all("video")) == 2


def configure(run: Path, **sections: str) -> None:
    (run / "config.toml").write_text(
        "".join(f"[{name}]\n{lines}\n" for name, lines in sections.items())
    )


def test_controls_are_marked_and_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert 'class="control"' not in read(run).text
    prompts = 'prompts = ["a cat", "a dog"]'
    configure(run, sample=f"{prompts}\nnum_control_prompts = 1")
    page = read(run)
    assert "a dog (seed 0)control" in page.shown and "a cat (seed 0)control" not in page.shown
    assert page.shown.count("Controls are prompts of what this run does not teach.") == 1
    configure(run, sample=f"{prompts}\nnum_control_prompts = 2")
    assert 'class="control"' not in read(run).text, "there would be nothing that the run teaches"
    configure(run, sample=prompts, data='trigger = "A CAT"')
    assert "a dog (seed 0)control: without the trigger" in read(run).shown
    configure(run, sample=prompts, data='trigger = "zwx"')
    assert 'class="control"' not in read(run).text, "no prompt has the trigger: another mistake"


def test_two_samples_leave_room_for_another_strip_and_many_take_the_line(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert [figure.get("class") for figure in read(run).all("figure")].count("many") == 0
    write_samples(run / "samples", 20, ("a cat", "a dog"))
    assert [figure.get("class") for figure in read(run).all("figure")].count("many") == 2
