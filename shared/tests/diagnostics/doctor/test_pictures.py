"""The doctor's page shows the files, and a finding leads to the row of its file."""

import base64
import re
from html import unescape
from pathlib import Path

import pytest
import torch
from PIL import Image
from report_pages import Page

from ditkit_core.data.media.clip import write_video
from ditkit_core.diagnostics.doctor import render
from ditkit_core.diagnostics.doctor.findings import CheckReport, Excluded, FileRow, Finding
from ditkit_core.diagnostics.doctor.render import check_document

NAME = "<b>'50% & x.png"


def row(path: Path, *ids: str) -> FileRow:
    return FileRow(
        file=str(path), samples=1, seconds=0, fps=0, trained_fps=0, frames=1, kept=1, dropped=0,
        height=64, width=64, enlarged=1, ids=ids,
    )  # fmt: skip


def page_of(
    folder: Path,
    files: tuple[FileRow, ...],
    *findings: Finding,
    excluded: tuple[Excluded, ...] = (),
) -> Page:
    checkup = CheckReport(
        model="toy", samples=2, fps=8, files=files, findings=findings, excluded=excluded
    )
    return Page(check_document(checkup, folder).page())


def write_image(path: Path, color: str = "red") -> Path:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (1600, 900), color).save(path)
    return path


def test_each_kind_of_file_is_a_small_image_that_leads_to_it(tmp_path: Path) -> None:
    image = write_image(tmp_path / "data" / NAME)
    clip = tmp_path / "data" / "clip.mp4"
    write_video(clip, torch.zeros(3, 5, 64, 64), fps=8.0)
    for number in range(2):
        write_image(tmp_path / "frames" / f"{number}.png")
    page = page_of(tmp_path / "run", (row(image), row(clip), row(tmp_path / "frames")))
    images = page.all("img")
    assert [each["alt"] for each in images] == [str(image), str(clip), str(tmp_path / "frames")]
    for each in images:
        head, _, content = each["src"].partition(",")
        assert head == "data:image/jpeg;base64" and len(base64.b64decode(content)) <= 40_000
    links = [link["href"] for link in page.all("a")]
    assert links[::2] == ["../data/%3Cb%3E%2750%25%20%26%20x.png", "../data/clip.mp4", "../frames"]
    assert "<b>" not in page.text and "in the run's folder" not in page.shown


def test_a_finding_leads_to_the_rows_of_its_files(tmp_path: Path) -> None:
    files = [write_image(tmp_path / name) for name in ("a.png", NAME, "c.png")]
    rows = (row(files[0], "a"), row(files[1], NAME), row(files[2], "c #1", "c #2"))
    findings = (
        Finding("D04", f"{NAME}, c #2", "these files have the same content"),
        Finding("D11", str(files[0]), "it is upscaled"),
        Finding("D02", "d.png", "it is damaged"),
        Finding("D42", "no such file", "of prompts"),
    )
    excluded = (Excluded(name="d.png", reason="it is damaged", stops=False),)
    page = page_of(tmp_path, rows, *findings, excluded=excluded)
    cells = re.findall(r'<tr id="([^"]+)"><td dir="auto">([^<]*)<', page.text)
    of_file = {Path(unescape(cell)).name: f"#{id}" for id, cell in cells}
    assert len(set(of_file.values())) == len(of_file) == 4
    links = [link["href"] for link in page.all("a") if link["href"].startswith("#")]
    assert links == [of_file[name] for name in ("d.png", NAME, "c.png", "a.png")]
    notes = [part.split("</small>")[0] for part in page.text.split("<small>")[1:]]
    assert notes == ["D11", "D04", "D04"]


def test_pictures_are_limited_and_those_with_findings_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_image(tmp_path / f"{number}.png") for number in range(4)]
    rows = tuple(row(file, file.stem) for file in files)
    monkeypatch.setattr(render, "_MOST_PICTURES", 2)
    page = page_of(tmp_path, rows, Finding("D16", "3", "it has no caption"))
    assert [image["alt"] for image in page.all("img")] == [str(files[3]), str(files[0])]
    assert "and 2 more, in the table of files" in page.shown
    monkeypatch.setattr(render, "_PICTURE_BYTES", 10)
    page = page_of(tmp_path, rows)
    assert not page.all("img") and [link["href"] for link in page.all("a")][::2] == [
        "0.png",
        "1.png",
    ]


def test_a_file_that_cannot_be_shown_is_a_line_and_a_link_is_left_out(tmp_path: Path) -> None:
    secret = write_image(tmp_path / "secret" / "a.png")
    (tmp_path / "link.png").symlink_to(secret)
    for number in range(2):
        write_image(tmp_path / "frames" / f"{number}.png")
    (tmp_path / "linked").symlink_to(tmp_path / "frames")
    (tmp_path / "damaged.png").write_bytes(b"no image")
    names = ("link.png", "linked", "damaged.png", "removed.png")
    page = page_of(tmp_path, tuple(row(tmp_path / name) for name in names))
    assert not page.all("img") and "damaged.png cannot be read as an image" in page.shown
    for name in ("link.png", "linked"):
        assert f"{name} is a link, which the page leaves out" in page.shown
    assert "removed.png is missing" in page.shown
