"""Samples of several shapes, lengths and resolutions: what is trained is what plan, doctor, cache
and report say."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_clips import pan, texture, written
from PIL import Image
from toy_world import World, equal

from ditkit_core.api.dataset import completed
from ditkit_core.data.config import DataConfig
from ditkit_core.errors import UserError
from ditkit_core.testing.specs import altered

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    for path in (tmp_path / "clips").iterdir():
        path.unlink()
    for i in range(4):
        add_image(world, f"{i}.png", i)
    return world


def add_image(
    world: World, name: str, seed: int, size: tuple[int, int] = (32, 32), caption: str = ""
) -> None:
    """Add an image of a height and a width, with a caption."""
    path = world.folder / "clips" / name
    Image.fromarray(texture(seed, *size).astype("uint8")).save(path)
    path.with_suffix(".txt").write_text(caption or f"picture number {seed}")


def check(world: World, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a check."""
    folder = world.folder / "checked"
    status = world.run(
        "train", "--run.folder", str(folder), "--train.steps", "1", "--check", *flags
    )
    return status, json.loads((folder / "check.json").read_text())


def test_clips_shorter_than_the_models_own_length_are_trained_and_said(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the run file asks for a length."""
    for name, count in (("long", 30), ("short", 9)):
        clip = written(
            world.folder / "clips" / f"{name}.mp4", pan(count, count, height=32, width=32)
        )
        clip.with_suffix(".txt").write_text(f"a {name} clip")
    own = ("--data.frames", "0")  # five, at 8 per second
    status, found = check(world, *own)
    assert (
        status == 0
        and found["excluded"] == []
        and {row["frames"] for row in found["buckets"]} == {1, 5}
    )
    (note,) = [each for each in found["findings"] if each["code"] == "D33"]
    assert note["severity"] == "note" and note["where"] == "1 of 6 samples"
    assert (
        "fewer than 5 frames (0.62 s at 8 fps), and are trained with what they have: 1"
        in note["what"]
    )
    capsys.readouterr()
    assert world.train("run", 1, *own) == 0
    said = capsys.readouterr().out
    assert (
        "1 of 6 samples are shorter than 5 frames (0.62 s at 8 fps) and are trained with the "
        "frames that they" in said
    )
    assert world.train("run", 2, *own) == 0, "the run continues with what it was resolved to"
    assert world.train("asked", 1, "--data.frames", "5") == 1
    assert "short.mp4 has 3 frames at 8 fps, but data.frames asks for 5" in capsys.readouterr().err
    assert world.train("asked", 1, *own, "--data.short_clips", "error") == 1


RESOLUTIONS = (
    "--data.height",
    "0",
    "--data.width",
    "0",
    "--data.resolutions",
    "[8, 16, 32]",
    "--sample.captions",
    "0",
)


def test_each_image_is_trained_at_the_largest_resolution_that_it_has(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the cache, the plan, the check and the report; the smallest is enlarged."""
    sizes = {"4": (31, 90), "5": (20, 20), "6": (15, 16), "7": (6, 7)}
    for name, size in sizes.items():
        add_image(world, f"{name}.png", int(name), size)
    assert world.train("run", 1, *RESOLUTIONS) == 0
    assert (
        "data.folder: buckets 8 x 8: 2, 16 x 16: 2, 32 x 32: 4 samples"
        in capsys.readouterr().out.splitlines()
    )
    shapes = json.loads((world.folder / "run" / "about.json").read_text())["data"]["shapes"]
    assert [(each["height"], each["width"], each["samples"]) for each in shapes] == [
        (8, 8, 2),
        (16, 16, 2),
        (32, 32, 4),
    ]
    status, found = check(world, *RESOLUTIONS)
    assert status == 0 and [(row["height"], row["width"],
        row["samples"]) for row in found["buckets"]] == [
        (8, 8, 2), (16, 16, 2), (32, 32, 4)
    ]  # fmt: skip
    assert [Path(each["where"]).name for each in found["findings"] if each["code"] == "D11"] == [
        "7.png"
    ]
    loads = world.media.loads
    fine = (*RESOLUTIONS, "--data.bucket_step", "4")
    assert world.train("fine", 1, *fine) == 0 and world.media.loads > loads
    assert "20 x 40: 1" not in capsys.readouterr().out, "its upper and lower rows would be enlarged"
    assert world.train("run", 2, *RESOLUTIONS) == 0, "the run continues"
    assert world.train("run", 2, *fine) == 1


def test_a_plan_without_data_is_of_the_largest_resolution(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*RESOLUTIONS, "--data.folder", "elsewhere")
    assert world.run("train", *flags, "--plan", "--gpus", "24GiB") == 0
    assert "1 x 32x32 (data.frames and resolutions)" in capsys.readouterr().out
    assert world.run("train", *RESOLUTIONS, "--plan", "--gpus", "24GiB") == 0
    assert "1 x 32x32 (the largest in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("resolutions", "height", "said"),
    [
        (
            "[8, 16]",
            "8",
            (
                "data.resolutions = [8, 16] and data.height or data.width are both set; remove "
                "data.height and"
            ),
        ),
        ("[8, 18]", "0", "data.resolutions has 18, which is not a multiple of 4; set 16 or 20"),
        ("[8, 8]", "0", "data.resolutions = [8, 8] must contain different sides from 1 to 16384"),
    ],
)
def test_resolutions_that_contradict_something_are_one_line(
    world: World, capsys: pytest.CaptureFixture[str], resolutions: str, height: str, said: str
) -> None:
    flags = ("--data.resolutions", resolutions, "--data.height", height, "--data.width", "0")
    assert world.train("run", 1, *flags) != 0
    assert said in capsys.readouterr().err


def test_a_run_may_mirror_its_images_and_continues_bitwise(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flip = ("--data.flip", "true", "--sample.captions", "0", "--export.dtype", "fp32")
    assert world.train("plain", 6, *flip[2:]) == 0
    assert world.train("whole", 6, *flip) == 0
    assert world.train("parts", 3, *flip) == 0
    assert world.train("parts", 6, *flip) == 0
    assert equal(world.adapter("whole"), world.adapter("parts"))
    assert not equal(world.adapter("whole"), world.adapter("plain"))
    recorded = json.loads((world.folder / "whole" / "data.json").read_text())["0"]
    assert sum(key.startswith("mirrored ") for key in recorded) * 2 == len(recorded)
    assert world.train("parts", 7, *flip, "--data.flip", "false") == 1
    add_image(world, "sided.png", 9, caption="a tree on the left")
    capsys.readouterr()
    assert world.train("sided", 1, *flip) == 1
    assert (
        "data.flip would train the other side than the caption of sided says: 'left'"
        in capsys.readouterr().err
    )
    status, found = check(world, *flip)
    assert status == 1 and [
        each["code"] for each in found["findings"] if each["severity"] == "error"
    ] == ["D01"]


def test_numbers_in_names_of_folders_are_said_to_be_no_repeats(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """As kohya's programs read them."""
    folders = {name: world.folder / "clips" / name for name in ("10_cat", "5_dog", "plain")}
    for number, (name, folder) in enumerate(folders.items()):
        folder.mkdir()
        add_image(world, f"{name}/a.png", 10 + number)

    def said(run: str, *flags: str) -> str:
        capsys.readouterr()
        assert world.train(run, 1, *flags) == 0
        return " ".join(capsys.readouterr().out.split())

    numbered = [str(folders["10_cat"]), str(folders["5_dog"])]
    line = "10_cat 5_dog: numbers in names of folders are not read as repeats; if they are meant so, set data.folders = "
    assert f"{line}{json.dumps(numbered)} and data.repeats = [10, 5]" in said("run")
    alone = said("alone", "--data.folder", numbered[0])
    assert (
        "10_cat: numbers in names of folders are not read as repeats; with one folder they change "
        "nothing" in alone
    )
    both = said(
        "both",
        "--data.folder",
        "",
        "--data.folders",
        json.dumps(numbered),
        "--data.repeats",
        "[10, 5]",
    )
    assert "not read as repeats" not in both + said("plain", "--data.folder", str(folders["plain"]))


def test_another_rate_than_the_only_one_of_a_model_is_refused(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """The toy reads clips at 8 frames per second. Where positions are seconds, clips at another
    rate would be as fast as a model has never seen them."""
    assert world.train("any", 1, "--data.fps", "30") == 0
    world.spec = altered(world.spec, fps_is_fixed=True)
    for command in ("train", "encode", "sample"):
        capsys.readouterr()
        assert (
            world.run(command, "--run.folder", str(world.folder / "other"), "--data.fps", "30") == 1
        )
        refusal = "data.fps = 30: this model counts time at 8 frames per second, and at no other rate; leave it out"
        assert refusal in capsys.readouterr().err and not (world.folder / "other").exists()
    assert world.train("fixed", 1, "--data.fps", "8") == 0 and world.train("default", 1) == 0
    with pytest.raises(UserError, match=r"fps = 30: this model counts time at 8"):
        completed(DataConfig(folder="clips", fps=30.0), world.spec.data)
