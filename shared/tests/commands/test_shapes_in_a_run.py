"""Samples of several shapes, lengths and resolutions: what is trained is what plan, doctor, cache and report say."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_clips import pan, texture, written
from PIL import Image
from toy_world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    for path in (tmp_path / "clips").iterdir():
        path.unlink()
    for i in range(4):
        add_image(world, f"{i}.png", i)
    return world


def add_image(world: World, name: str, seed: int, size: tuple[int, int] = (32, 32), caption: str = "") -> None:
    """Add an image of a height and a width, with a caption."""
    path = world.folder / "clips" / name
    Image.fromarray(texture(seed, *size).astype("uint8")).save(path)
    path.with_suffix(".txt").write_text(caption or f"picture number {seed}")


def check(world: World, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a check."""
    folder = world.folder / "checked"
    status = world.run("train", "--run.folder", str(folder), "--train.steps", "1", "--check", *flags)
    return status, json.loads((folder / "check.json").read_text())


def test_clips_shorter_than_the_models_own_length_are_trained_and_said(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the run file asks for a length."""
    for name, count in (("long", 30), ("short", 9)):
        clip = written(world.folder / "clips" / f"{name}.mp4", pan(count, count, height=32, width=32))
        clip.with_suffix(".txt").write_text(f"a {name} clip")
    own = ("--data.frames", "0")  # five, at 8 per second
    status, found = check(world, *own)
    assert status == 0 and found["excluded"] == [] and {row["frames"] for row in found["buckets"]} == {1, 5}
    (note,) = [each for each in found["findings"] if each["code"] == "D33"]
    assert note["severity"] == "note" and note["where"] == "1 of 6 samples"
    assert "fewer than 5 frames (0.62 s at 8 fps), and are trained with what they have: 1" in note["what"]
    capsys.readouterr()
    assert world.train("run", 1, *own) == 0
    said = capsys.readouterr().out
    assert (
        "1 of 6 samples are shorter than 5 frames (0.62 s at 8 fps) and are trained with the frames that they" in said
    )
    assert world.train("run", 2, *own) == 0, "the run continues with what it was resolved to"
    assert world.train("asked", 1, "--data.frames", "5") == 1
    assert "short.mp4 has 3 frames at 8 fps, but data.frames asks for 5" in capsys.readouterr().err
    assert world.train("asked", 1, *own, "--data.short_clips", "error") == 1
