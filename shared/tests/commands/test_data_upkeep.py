"""Several folders, lengths, captions and the care of the cache, from the command line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_specs import CLIPS
from media_files import numbered_video, picture
from PIL import Image
from toy_world import World

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import scan
from ditkit_core.data.media.clip import available, read_clip
from ditkit_core.encoding.preview_dataset import dump
from ditkit_core.models.conditions import Column


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def encode(world: World, *flags: str) -> int:
    return world.run("encode", "--run.folder", str(world.folder / "runs" / "one"), *flags)


def entries(world: World) -> set[Path]:
    return {path for path in (world.folder / "cache").rglob("*.safetensors")}


def test_a_damaged_entry_is_found_removed_and_encoded_again(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert encode(world) == 0
    before = entries(world)
    victim = min(before)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert encode(world) == 0
    assert victim.read_bytes() == bytes(data), "a start does not read what it need not"
    capsys.readouterr()
    assert encode(world, "--verify-cache") == 0
    said = capsys.readouterr()
    assert f"the cache entry {victim} is damaged: it is removed" in said.out + said.err
    assert f"{len(before)} entries read, 1 damaged" in said.out
    assert entries(world) == before and victim.read_bytes() != bytes(data)


def test_verifying_reads_the_files_that_entries_were_made_of(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that tells nothing but the size, content that changes between the samples is
    found by reading all of it."""
    unseen = classmethod(lambda cls, path: cls(path.stat().st_size, 10**18, 10**18))
    monkeypatch.setattr("ditkit_core.encoding.cache._FileState.of", unseen)
    photo = world.folder / "clips" / "photo.bmp"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)).save(photo)
    photo.with_suffix(".txt").write_text("a photograph")
    assert encode(world) == 0
    before = entries(world)
    data = bytearray(photo.read_bytes())
    data[len(data) // 4] ^= 128
    photo.write_bytes(data)
    assert encode(world) == 0 and entries(world) == before, "a start does not read what it need not"
    capsys.readouterr()
    assert encode(world, "--verify-cache") == 0
    said = capsys.readouterr()
    assert "all files are read again" in said.out
    assert len(entries(world) - before) == 1 and before < entries(world)
    after = entries(world)
    assert encode(world, "--verify-cache") == 0 and entries(world) == after


def test_what_no_run_needs_is_pruned(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.train("runs/other", 1, "--data.width", "24") == 0
    of_other = entries(world)
    (world.folder / "clips" / "0.txt").write_text("for a while")
    assert encode(world) == 0
    (world.folder / "clips" / "0.txt").write_text("from now on")
    assert encode(world) == 0
    monkeypatch.setattr("ditkit_core.encoding.cache._SETTLED_SECONDS", -1)
    before = entries(world)
    assert of_other < before
    assert encode(world, "--prune-cache", "unused") == 0
    assert "removed 1 entries" in capsys.readouterr().out, "the caption for a while"
    left = entries(world)
    assert of_other <= left and len(before - left) == 1
    assert encode(world, "--prune-cache", "1d") == 0
    assert entries(world) == left
    assert encode(world, "--prune-cache", "soon") == 1
    assert "'soon' is not a rule" in capsys.readouterr().err


def test_what_an_expert_of_another_run_needs_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditkit_core.encoding.cache._SETTLED_SECONDS", -1)
    assert (
        world.train("runs/both/high_noise", 1, "--data.width", "24", "--sample.captions", "0") == 0
    )
    of_expert = entries(world)
    assert encode(world) == 0
    record = world.folder / "runs" / "a" / "b" / "data.json"
    record.parent.mkdir(parents=True)
    record.write_text("no record of a run")
    assert encode(world, "--prune-cache", "unused") == 0
    assert of_expert <= entries(world)


def test_the_empty_caption_of_another_run_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditkit_core.encoding.cache._SETTLED_SECONDS", -1)
    monkeypatch.setattr(world.text, "identity", "another encoder")
    assert world.train("runs/other", 1, "--sample.captions", "0") == 0
    of_other = entries(world)
    monkeypatch.undo()
    monkeypatch.chdir(world.folder)
    monkeypatch.setattr("ditkit_core.encoding.cache._SETTLED_SECONDS", -1)
    assert encode(world) == 0
    assert encode(world, "--prune-cache", "unused") == 0
    assert of_other <= entries(world)


def test_a_run_whose_record_lacks_the_empty_caption_continues(world: World) -> None:
    assert world.train("run", 1, "--sample.captions", "0") == 0
    record = world.folder / "run" / "data.json"
    written = json.loads(record.read_text())
    assert written.pop("(empty caption)") and written.pop("(digest)")
    record.write_text(json.dumps(written))
    assert world.train("run", 2, "--sample.captions", "0") == 0
    assert "(empty caption)" in json.loads(record.read_text())
    written["0"] = ["other", "parts"]
    record.write_text(json.dumps(written))
    assert world.train("run", 3, "--sample.captions", "0") == 1


def test_a_damaged_record_is_named_and_no_other_data(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ("--sample.captions", "0")
    assert world.train("run", 1, *train) == 0
    record = world.folder / "run" / "data.json"
    written = record.read_text()
    changed = json.dumps(json.loads(written) | {"0": ["other", "parts"]})
    for text, said in {
        "{": "not readable JSON",
        "[]": "not a JSON object",
        changed: "is damaged",
    }.items():
        record.write_text(text)
        capsys.readouterr()
        assert world.train("run", 2, *train) == 1
        (error,) = [line for line in capsys.readouterr().err.splitlines() if "data.json" in line]
        assert said in error and "remove it to continue on the data as it is now" in error
    record.unlink()
    assert world.train("run", 2, *train) == 0
    assert json.loads(record.read_text()) == json.loads(written)


def test_samples_can_be_looked_at(world: World) -> None:
    picture(world.folder / "clips" / "wide.png", (16, 48), "red")
    (world.folder / "clips" / "wide.txt").write_text("red")
    assert encode(world, "--dump", "seen", "--data.trigger", "ohwx") == 0
    seen = world.folder / "seen"
    assert sorted(path.name for path in seen.iterdir()) == sorted(
        f"{name}{suffix}"
        for name in ("0", "1", "2", "3", "4", "wide")
        for suffix in (".png", ".txt")
    )
    assert available(seen / "wide.png", 0.0) == (1, 16, 16)
    assert (seen / "wide.txt").read_text() == "ohwx red\n"


@pytest.mark.parametrize(
    ("folder", "flags"),
    [
        ("clips", ()),
        ("clips/seen", ()),
        (".", ()),
        ("other/../clips", ()),
        ("~/clips", ()),
        ("clips", ("--data.folder", "~/clips")),
        ("class/seen", ("--prior.folder", "~/class")),
    ],
)
def test_a_dump_does_not_go_among_the_clips(
    world: World,
    folder: str,
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(world.folder))
    before = {path: path.read_bytes() for path in (world.folder / "clips").iterdir()}
    assert encode(world, "--dump", folder, *flags) == 1
    assert "which is data; name a folder apart from the data" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (world.folder / "clips").iterdir()} == before


def test_a_dump_shows_the_window_its_references_and_its_controls(tmp_path: Path) -> None:
    numbered_video(tmp_path / "set" / "sub" / "a.mp4", fps=16)
    numbered_video(tmp_path / "depths" / "sub" / "a.mp4", fps=16, size=(32, 32))
    numbered_video(tmp_path / "masks" / "sub" / "a.mp4", fps=16)
    picture(tmp_path / "before" / "sub" / "a.png")
    (tmp_path / "set" / "sub" / "a.txt").write_text("one\ntwo")
    config = DataConfig(
        folder=str(tmp_path / "set"), frames=5, height=32, width=48, windows="uniform",
        clips_per_file=2,
        captions="lines", references=str(tmp_path / "before"),
        controls=(f"depth={tmp_path / 'depths'}",),
        masks=str(tmp_path / "masks"),
    )  # fmt: skip
    columns = (Column(name="depth", kind="video"),)

    def size(height: int, width: int, count: int) -> tuple[int, int]:
        return 16, 32

    found = scan(config, replace(CLIPS, reference_size=size), columns)
    written = dump(found.samples, tmp_path / "seen", fps=16.0, columns=columns, reference_size=size)
    assert written == [tmp_path / "seen" / "sub" / f"a#{i}.mp4" for i in range(2)]
    for name in ("sub/a#1.mp4", "sub/a#1.depth.mp4", "sub/a#1.mask.mp4"):
        assert available(tmp_path / "seen" / name, 16.0) == (5, 32, 48)
        clip = read_clip(tmp_path / "seen" / name, frames=5, fps=16.0, height=32, width=48)
        levels = ((clip.mean(dim=(0, 2, 3)) + 1) * 127.5 / 8).tolist()
        assert levels == pytest.approx([19, 20, 21, 22, 23], abs=0.3), "the last of 24 frames"
    assert (tmp_path / "seen" / "sub" / "a#1.txt").read_text() == "one\n\ntwo\n"
    assert available(tmp_path / "seen" / "sub" / "a#1.reference_0.png", 0.0) == (1, 16, 32)


def test_a_png_of_a_dump_holds_the_pixels_of_the_encoder(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (32, 48, 3), np.uint8)
    (tmp_path / "set").mkdir()
    Image.fromarray(noise).save(tmp_path / "set" / "a.png")
    (tmp_path / "set" / "a.txt").write_text("x")
    config = DataConfig(folder=str(tmp_path / "set"), frames=1, height=16, width=16)
    (sample,) = scan(config, CLIPS).samples
    (path,) = dump([sample], tmp_path / "seen", fps=16.0)
    given = read_clip(sample.media, frames=1, fps=0.0, height=16, width=16)[:, 0]
    with Image.open(path) as image:
        pixels = np.array(image)
    shown = torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1
    assert (given - shown).abs().max() <= 0.5 / 127.5 + 1e-6


def test_clips_from_elsewhere_are_dumped_inside(tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "metadata.csv").write_text("image,text\n../elsewhere/a.png,x\n")
    config = DataConfig(
        folder=str(tmp_path / "set"), frames=1, height=32, width=32, allow_outside=True
    )
    (path,) = dump(scan(config, CLIPS).samples, tmp_path / "seen", fps=16.0)
    assert path.resolve().is_relative_to((tmp_path / "seen").resolve())


def test_several_folders_train_with_their_repeats(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(2):
        world.add(f"more/{i}.png", (16, 16), "navy", f"more {i}")
    flags = [
        "--data.folder",
        "",
        "--data.folders",
        f'["{world.folder}/clips", "{world.folder}/more"]',
    ]
    assert (
        world.train("run", 3, *flags, "--data.repeats", "[1, 2.5]", "--train.batch_size", "2") == 0
    )
    samples = (world.folder / "run" / "data.json").read_text()
    assert '"clips/0"' in samples and '"more/1"' in samples
    capsys.readouterr()
    assert world.train("run", 4, *flags, "--data.repeats", "[1, 2]", "--train.batch_size", "2") == 1
    assert "data.repeats" in capsys.readouterr().err


def test_orders_of_tags_are_encoded_once_and_all_come_from_the_cache(world: World) -> None:
    (world.folder / "clips" / "0.txt").write_text("a, b, c, d")
    flags = ["--data.shuffle_tags", "true", "--data.tag_variants", "3"]
    assert encode(world, *flags) == 0
    first = entries(world)
    assert len([path for path in first if path.parent.parent.name == "text"]) == 1 + 3 + 4, (
        "of the others one order each"
    )
    assert encode(world, *flags, "--data.tag_variants", "5") == 0
    assert len(entries(world) - first) == 2 and first <= entries(world)
