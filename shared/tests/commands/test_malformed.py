"""Everything of the catalogue of bad inputs: one clear line each, a place in the doctor's table,
and nothing of it trained."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from malformed import CATALOGUE, Kind, Malformed, controlled, good
from malformed_media import damaged_inside
from media_files import noisy_video
from one_line import check_line
from toy_world import World

from ditkit_core.config.resolve import resolve
from ditkit_core.data.media.clip import read_clip
from ditkit_core.diagnostics.doctor.dataset import ExaminedDataset, examine_dataset
from ditkit_core.errors import UserError, printable
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.testing.toy import TOY

GOOD = ["good0", "good1"]
BESIDES = {"(base weights)", "(empty caption)", "(digest)"}
"""In data.json, and no samples."""


def made(folder: Path, each: Malformed) -> str:
    """Write it next to two sound images; returns what names it."""
    lines = good(folder)
    said = each.put(folder)
    if not each.listed:
        return Path(said).stem if each.outcome != "refused" else said
    (folder / "metadata.jsonl").write_text("\n".join([*lines, said]), encoding="utf-8")
    return ""


def look(folder: Path, **settings: Any) -> tuple[ExaminedDataset, RunContext]:
    """What the doctor sees, before anything is encoded."""
    flags = {
        "model.preset": "tiny", "data.folder": str(folder), "data.frames": 5, "data.height": 16,
        "data.width": 16,
        "run.folder": str(folder.parent / "run"), **settings,
    }  # fmt: skip
    run = create_run(controlled(TOY), resolve(RunConfig, flags=flags))
    return examine_dataset(run.data), run


def of_outcome(outcome: str) -> list[Any]:
    return [
        pytest.param(each, id=name) for name, each in CATALOGUE.items() if each.outcome == outcome
    ]


@pytest.mark.parametrize("each", of_outcome("excluded"))
def test_what_is_bad_is_one_line_in_the_table_and_the_rest_is_used(
    tmp_path: Path, each: Malformed, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    name = made(folder, each)
    strict, run = look(folder)
    (row,) = strict.checkup.excluded
    assert row.stops and not strict.checkup.trainable
    assert printable(row.name) == row.name
    check_line(row.reason, each.says, printable(name))
    assert (
        "metadata.jsonl line 3" in row.reason or "'" in row.reason or str(folder) in row.reason
    ), "where it is"
    lenient, _ = look(folder, **{"data.on_bad": "skip", "data.short_clips": "skip"})
    assert [sample.id for sample in lenient.samples] == GOOD
    assert [(other.name, other.reason, other.stops) for other in lenient.checkup.excluded] == [
        (row.name, row.reason, False)
    ]
    assert lenient.checkup.trainable
    assert capfd.readouterr().err == "", "libraries keep quiet"
    if "D03" not in [finding.code for finding in strict.checkup.findings]:
        with pytest.raises(UserError) as caught:
            assert run.data.dataset
        assert row.reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("each", of_outcome("refused"))
def test_a_list_that_cannot_be_read_is_one_line(tmp_path: Path, each: Malformed) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    name = made(folder, each)
    for settings in ({}, {"data.on_bad": "skip"}):
        found, _ = look(folder, **settings)
        (finding,) = found.checkup.findings
        assert (finding.code, finding.severity, list(found.samples)) == ("D01", "error", [])
        check_line(finding.observation, name, str(folder))


@pytest.mark.parametrize("each", of_outcome("accepted"))
def test_what_looks_odd_and_is_sound_is_used(tmp_path: Path, each: Malformed) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    made(folder, each)
    found, _ = look(folder)
    assert found.checkup.excluded == () and found.checkup.trainable
    sample = next(sample for sample in found.samples if sample.id.startswith("bad"))
    assert sample.captions[0].isprintable() or "\u200d" in sample.captions[0]
    assert sample.captions[0] == sample.captions[0].strip() != ""
    clip = read_clip(
        sample.media, frames=sample.frames, fps=8.0, height=16, width=16, start_seconds=0.0
    )
    assert torch.isfinite(clip).all() and clip.shape == (3, sample.frames, 16, 16)
    if each.name in WHITE:
        assert clip.min() > 0.9, "white, as a player shows it"


WHITE = {
    "transparent png", "palette with transparency", "transparent mov", "hdr video", "1 x 1",
    "10000 wide", "10000 high",
    "video with a long tag", "video with a tag in latin-1", "png with a long comment",
    "picture of a phone",
    "picture turned", "gif",
}  # fmt: skip


def test_times_below_zero_are_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    made(folder, CATALOGUE["times below zero"])
    clip = read_clip(folder / "bad.mp4", frames=1, fps=8.0, height=16, width=16)
    assert -1 < float(clip.mean()) < -0.7, "a frame after the first, which is black"


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.spec = controlled(world.spec)
    shutil.rmtree(tmp_path / "clips")
    (tmp_path / "clips").mkdir()
    return world


def everything(world: World, kinds: Sequence[Kind]) -> int:
    """Write every bad entry of some kinds into one dataset; returns how many there are."""
    folder = world.folder / "clips"
    lines = good(folder)
    entries = [
        each for each in CATALOGUE.values() if each.kind in kinds and each.outcome == "excluded"
    ]
    for i, each in enumerate(entries):
        said = each.put(folder, f"bad{i}x")
        lines += [said] if each.listed else []
    if any(each.listed for each in entries):
        (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return len(entries)


@pytest.mark.parametrize("kinds", [("media", "caption"), ("metadata", "control")])
def test_nothing_that_was_excluded_is_trained(
    world: World, kinds: Sequence[Kind], capsys: pytest.CaptureFixture[str]
) -> None:
    count = everything(world, kinds)
    flags = ["--data.frames", "5", "--data.on_bad", "skip", "--data.short_clips", "skip"]
    check = ["--run.folder", str(world.folder / "check"), "--check", *flags]
    assert world.run("train", *check) == 0
    found = json.loads((world.folder / "check" / "check.json").read_text(encoding="utf-8"))
    assert len(found["excluded"]) == count and found["samples"] == 2
    page = (world.folder / "check" / "check.html").read_text(encoding="utf-8")
    assert page.count('<tr class="warning">') >= count or page.count("<tr") > count
    capsys.readouterr()
    assert world.train("run", 1, *flags) == 0
    said = capsys.readouterr().err
    assert said.count("left out: ") == count
    trained = (
        json.loads((world.folder / "run" / "data.json").read_text(encoding="utf-8")).keys()
        - BESIDES
    )
    assert sorted(trained) == GOOD
    strict = [*flags[:2], *check[:2]]
    assert world.run("train", *strict) == 1
    complaint = capsys.readouterr().err.splitlines()
    assert len(complaint) == 1 and f"and {count - 1 - by_decoding(found)} more" in complaint[0]


def test_a_clip_is_trained_up_to_where_it_is_damaged(world: World) -> None:
    folder = world.folder / "clips"
    lines = good(folder, 1)
    damaged, sound = damaged_inside(folder, "late"), noisy_video(folder / "whole.mp4")
    for name in ("late", "whole"):
        lines.append(
            json.dumps({"file_name": f"{name}.mp4", "text": name, "control_video": damaged})
        )
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    flags = [
        "--data.frames",
        "1",
        "--data.windows",
        "all",
        "--data.on_bad",
        "skip",
        "--run.folder",
        str(world.folder / "run"),
    ]
    assert world.run("train", "--check", *flags) == 0
    found = json.loads((world.folder / "run" / "check.json").read_text())
    out = {each["name"] for each in found["excluded"]}
    assert out and {name.partition("#")[0] for name in out} == {"late", "whole"}, (
        "of the one its own frames, of the other its control's"
    )
    kept = {f"{name}#{i}" for name in ("late", "whole") for i in range(11)} - out
    assert {"late#0", "whole#0"} <= kept and sound.is_file()
    assert world.run("train", "--train.steps", str(len(kept) + 1), *flags) == 0, (
        "an epoch: each is read"
    )
    trained = json.loads((world.folder / "run" / "data.json").read_text()).keys() - BESIDES
    assert trained == kept | {"good0"}


def by_decoding(found: dict[str, Any]) -> int:
    """How many were found by decoding, which stops a run later, or as too short, which is another
    setting."""
    later = sum(each["code"] == "D03" for each in found["findings"])
    return later + sum("data.short_clips" in each["reason"] for each in found["excluded"])
