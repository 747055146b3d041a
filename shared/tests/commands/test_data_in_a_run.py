"""Buckets, several captions, references and budgets of tokens, from the command line to the trained
adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import picture
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from toy_world import World, equal

from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY
from ditkit_core.testing.world import differing

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

BUCKETS = ("--data.buckets", "true", "--data.bucket_step", "4", "--sample.captions", "0")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Five square images, three wide ones, and a model that remembers the shapes that it was
    given."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path, captions=0)
    for i, colour in enumerate(("pink", "lime", "black")):
        world.add(f"clips/wide{i}.png", (20, 40), colour, f"wide {i}")
    world.seen = []  # type: ignore[attr-defined]

    def seeing(noised: Any, sigma: Any, items: Any, guidance: float) -> Any:
        shapes = [
            {name: tuple(t.shape) for name, t in item.items() if name != "text"} for item in items
        ]
        if not noised[0].is_meta:  # a first look at whether items fit
            world.seen.append(shapes)  # type: ignore[attr-defined]
        return TOY.training.make_inputs(noised, sigma, items, guidance)

    world.spec = altered(
        world.spec,
        make_inputs=seeing,
        reference_size=lambda height, width, count: (16 // count, 16),
    )
    return world


def sizes(world: World) -> list[tuple[int, ...]]:
    """Of each micro-batch since the last call, how many samples and their grid; all in one have the
    same."""
    found = []
    for shapes in world.seen:  # type: ignore[attr-defined]
        assert all(shape == shapes[0] for shape in shapes)
        found.append((len(shapes), *shapes[0]["latents"][2:]))
    world.seen.clear()  # type: ignore[attr-defined]
    return found


def test_buckets_are_reported_and_no_micro_batch_mixes_them(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 5, *BUCKETS, "--train.batch_size", "3") == 0
    said = capsys.readouterr().out.splitlines()
    assert "data.folder: buckets 12 x 24: 3, 16 x 16: 5 samples" in said
    assert "8 samples have 2 shapes: 2.7 in a micro-batch on average" in said
    # one epoch is three micro-batches
    assert sorted(sizes(world)[:3]) == [(2, 4, 4), (3, 3, 6), (3, 4, 4)]


def test_without_buckets_every_sample_has_the_size_of_the_configuration(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train.batch_size", "4", "--sample.captions", "0", "--data.buckets", "false")
    assert world.train("run", 4, *flags) == 0
    assert sizes(world) == [(4, 4, 4)] * 4
    said = capsys.readouterr()
    assert "data.folder: " not in said.out
    assert (
        "D32" in said.err
        and "50% of it is cut away" in said.err
        and 'set data.buckets = "auto"' in said.err
    )


def test_mixed_shapes_are_bucketed_without_a_word_in_the_run_file(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a grid that is fine enough for these small images; a plan is that of the data."""
    flags = ("--data.bucket_step", "4", "--sample.captions", "0", "--train.batch_size", "4")
    assert world.train("run", 3, *flags) == 0
    said = capsys.readouterr()
    line = "data.folder: shapes 12 x 20: 3, 16 x 16: 5 samples; data.buckets = false crops all to 16 x 16"
    assert line in said.out.splitlines() and "D32" not in said.err
    assert {size[1:] for size in sizes(world)} == {(3, 5), (4, 4)}
    assert (
        world.run(
            "train",
            "--run.folder",
            str(world.folder / "run"),
            *flags,
            "--check",
            "--train.steps",
            "3",
        )
        == 0
    )
    found = json.loads((world.folder / "run" / "check.json").read_text())
    assert {(row["height"], row["width"]) for row in found["buckets"]} == {(12, 20), (16, 16)}
    assert world.train("run", 4, *flags, "--data.buckets", "false") == 1, (
        "the same data in other sizes is another run"
    )


def test_a_run_over_buckets_in_two_parts_equals_one_in_one_part(world: World) -> None:
    flags = (
        *BUCKETS,
        "--train.batch_size",
        "2",
        "--train.accumulation",
        "2",
        "--export.dtype",
        "fp32",
    )
    assert world.train("whole", 6, *flags) == 0
    assert world.train("parts", 3, *flags) == 0
    assert world.train("parts", 6, *flags) == 0
    assert equal(world.adapter("whole"), world.adapter("parts"))


@pytest.mark.slow
def test_everything_at_once_is_resumed_bitwise_after_being_killed(world: World) -> None:
    """Buckets, a budget of tokens, captions by the line, dropout, references and a prior: each
    decides what a step sees."""
    for text in (world.folder / "clips").glob("*.txt"):
        text.write_text("".join(f"{text.stem} in other words: {i}\n" for i in range(3)))
    for name in ("0_0", "0_1", "2", "wide1"):
        picture(world.folder / "before" / f"{name}.png", (30, 20), "gold")
    for i, size in enumerate(((16, 16), (20, 40), (16, 16))):
        world.add(f"class/{i}.png", size, "gray", f"a class\nthe class {i}")
    switches = {
        "batch_tokens": ("--train.batch_tokens", "36"),
        "captions": ("--data.captions", "lines"),
        "dropout": ("--train.caption_dropout", "0.4"),
        "references": ("--data.references", "before"),
        "prior": ("--prior.folder", "class", "--prior.weight", "0.5"),
        "average": ("--ema.decay", "0.9"),
    }
    common = (
        *BUCKETS,
        "--train.accumulation",
        "2",
        "--held_out.clips",
        "1",
        "--save.every_steps",
        "2",
    )
    common += ("--export.dtype", "fp32", "--flow.sampling", "logit_normal")

    def train(name: str, steps: int = 7, without: str = "") -> int:
        chosen = [flag for switch, flags in switches.items() if switch != without for flag in flags]
        return world.train(name, steps, *common, *chosen)

    assert train("whole") == 0
    saved = world.folder / "killed" / "state" / "step-000004"
    world.kill(lambda: train("killed"), saved)
    assert max(saved.parent.glob("step-*")) == saved, "in the midst of a step"
    assert train("killed") == 0
    assert equal(world.adapter("whole"), world.adapter("killed"))
    assert train("short", 2) == 0
    for switch in switches:
        assert train(f"no {switch}", 2, without=switch) == 0
        assert not equal(world.adapter("short"), world.adapter(f"no {switch}")), (
            f"{switch} did nothing"
        )


def test_training_and_measuring_tell_the_model_the_same_guidance(world: World) -> None:
    told = set()

    def hearing(noised: Any, sigma: Any, items: Any, guidance: float) -> Any:
        if not noised[0].is_meta:
            told.add((guidance, torch.is_grad_enabled()))
        return TOY.training.make_inputs(noised, sigma, items, guidance)

    world.spec = altered(world.spec, make_inputs=hearing)
    flags = ("--held_out.clips", "1", "--sample.captions", "0")
    assert world.train("usual", 1, *flags) == 0
    assert told == {(1.0, True), (1.0, False)}
    told.clear()
    assert world.train("other", 1, *flags, "--flow.guidance", "2.5") == 0
    assert told == {(2.5, True), (2.5, False)}


def test_a_budget_of_tokens_decides_the_size_of_micro_batches(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 5, *BUCKETS, "--train.batch_tokens", "36") == 0
    assert sorted(sizes(world)) == [(1, 3, 6), (1, 4, 4), (2, 3, 6), (2, 4, 4), (2, 4, 4)]
    assert world.train("smaller", 6, *BUCKETS, "--train.batch_tokens", "35") == 0
    assert sorted(sizes(world)) == [
        (1, 3, 6),
        (1, 3, 6),
        (1, 3, 6),
        (1, 4, 4),
        (2, 4, 4),
        (2, 4, 4),
    ]
    capsys.readouterr()
    assert world.train("other", 1, "--train.batch_tokens", "36", "--train.batch_size", "2") == 2
    error = capsys.readouterr().err
    assert "takes the place of train.batch_size = 2" in error and error.count("\n") == 1


def test_buckets_that_do_not_fit_are_said_before_anything_is_encoded(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1, "--data.buckets", "true", "--data.bucket_step", "6") == 1
    assert "data.bucket_step = 6 is not a multiple of 4; set 4 or 8" in capsys.readouterr().err
    assert world.media.loads == 0


def test_several_captions_are_all_encoded_and_the_first_is_sampled(world: World) -> None:
    (world.folder / "clips" / "0.txt").write_text("first\nsecond\nthird\n")
    flags = ("--data.captions", "lines", "--sample.captions", "1")
    assert world.train("run", 1, *flags) == 0
    assert world.text.calls == 1 + 3 + 7
    assert [path.name for path in (world.folder / "run" / "samples").glob("*.png")] == [
        "step-000001-0-first.png"
    ]
    (world.folder / "clips" / "0.txt").write_text("first\nsecond\nfourth\n")
    assert world.train("run", 2, *flags) == 1, "another caption is other data"


def test_pairs_train_next_to_images_without_references(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, colours in enumerate((("red",), ("navy", "gold"), ("white",))):
        for number, colour in enumerate(colours):
            picture(world.folder / "before" / f"{i}_{number}.png", (30, 20), colour)
    flags = ("--data.references", "before", "--train.batch_size", "2", "--sample.captions", "2")
    assert world.train("run", 5, *flags, "--held_out.clips", "1") == 0
    groups = {frozenset(shape) for shapes in world.seen for shape in shapes}  # type: ignore[attr-defined]
    assert len(groups) >= 2 and all("latents" in names for names in groups)
    used = json.loads((world.folder / "run" / "data.json").read_text())
    assert [len(used[id]) for id in ("0", "1", "3")] == [3, 4, 2]
    picture(world.folder / "before" / "1_1.png", (30, 20), "pink")
    capsys.readouterr()
    assert world.train("run", 6, *flags, "--held_out.clips", "1") == 1
    assert "1 changed, first '1'" in capsys.readouterr().err


def test_a_model_without_references_says_so_in_one_line(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    picture(world.folder / "before" / "1.png")
    world.spec = altered(world.spec, reference_size=None)
    assert world.train("run", 1, "--data.references", "before") == 1
    error = capsys.readouterr().err
    assert "does not edit images" in error and error.count("\n") == 1


def test_a_model_of_still_images_trains_on_images(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.spec = altered(world.spec, frame_step=0, size=(1, 16, 16))
    assert world.train("run", 1) == 0
    capsys.readouterr()
    assert world.train("other", 1, "--data.frames", "5") == 1
    assert "data.frames = 5: this model takes still images only; set 1" in capsys.readouterr().err


def test_advice_on_an_architecture_is_given_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.spec = altered(
        world.spec, advice=lambda arch: f"depth {arch.depth}: train something else"
    )
    assert world.train("run", 1) == 0
    assert capsys.readouterr().err.count("depth 2: train something else") == 1
    assert world.run("encode", "--run.folder", str(world.folder / "run")) == 0
    assert "train something else" not in capsys.readouterr().err


def test_the_cache_may_be_lost_between_two_parts(world: World) -> None:
    assert world.train("whole", 4, *BUCKETS) == 0
    assert world.train("parts", 2, *BUCKETS) == 0
    shutil.rmtree(world.folder / "cache")
    assert world.train("parts", 4, *BUCKETS) == 0
    assert equal(world.adapter("whole"), world.adapter("parts"))


def mask(path: Path, size: tuple[int, int]) -> None:
    """A mask whose left half is white."""
    image = Image.new("L", size)
    ImageDraw.Draw(image).rectangle((0, 0, size[0] // 2 - 1, size[1]), fill=255)
    path.parent.mkdir(exist_ok=True)
    image.save(path)


def losses(world: World, run: str, key: str = "loss") -> list[float]:
    rows = map(json.loads, (world.folder / run / "metrics.jsonl").read_text().splitlines())
    return [row[key] for row in rows if key in row]


def test_masks_weigh_the_loss_from_the_folder_to_the_report(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--train.batch_size",
        "3",
        "--held_out.clips",
        "2",
        "--export.dtype",
        "fp32",
        "--sample.captions",
        "0",
        "--log.every_steps",
        "1",
    )
    assert world.train("plain", 2, *flags) == 0
    for i in range(5):
        mask(world.folder / "masks" / f"{i}.png", (16, 16))
    masks = (*flags, "--data.masks", str(world.folder / "masks"))
    capsys.readouterr()
    assert world.train("whole", 2, *masks) == 0
    assert (
        "data.folder: 5 of 8 samples have loss masks; train.mask_weight = 0 outside"
        in capsys.readouterr().out
    )
    assert (
        "5 with loss masks (weight 0 outside)"
        in (world.folder / "whole" / "report.html").read_text()
    )
    plain, whole = losses(world, "plain", "held_out"), losses(world, "whole", "held_out")
    assert 0 < whole[0] < plain[0], (
        "both before training, by the same weights: the masked one is a part of the other"
    )
    for weight in ("1", "0.5"):
        assert world.train(f"weight-{weight}", 2, *masks, "--train.mask_weight", weight) == 0
    assert losses(world, "weight-1") == pytest.approx(losses(world, "plain"), rel=1e-6)
    half = losses(world, "weight-0.5", "held_out")[0]
    assert half == pytest.approx((whole[0] + plain[0]) / 2, rel=1e-6), (
        "the loss is linear in the weight"
    )
    assert world.train("parts", 1, *masks) == 0
    assert world.train("parts", 2, *masks) == 0
    assert equal(world.adapter("whole"), world.adapter("parts"))
    assert not equal(world.adapter("whole"), world.adapter("plain"))


def test_a_run_is_not_continued_with_other_masks(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--sample.captions", "0")
    assert world.train("run", 1, *flags) == 0
    mask(world.folder / "clips" / "0-mask.png", (16, 16))
    capsys.readouterr()
    assert world.train("run", 2, *flags) == 1
    assert "was trained on something else (1 changed, first '0'" in capsys.readouterr().err


def test_a_run_continues_on_data_that_was_moved_and_on_no_other(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--sample.captions", "0", "--ema.decay", "0.9", "--held_out.clips", "1")
    assert world.train("whole", 4, *flags) == 0
    assert world.train("run", 2, *flags) == 0
    moved, edited, fewer = (world.folder / name for name in ("new place/moved", "edited", "fewer"))
    shutil.copytree(world.folder / "clips", edited)
    (edited / "3.txt").write_text("another caption")
    shutil.copytree(world.folder / "clips", fewer)
    (fewer / "2.png").unlink()
    moved.parent.mkdir()
    (world.folder / "clips").rename(moved)
    stored, loads = (world.folder / "run" / "config.toml").read_bytes(), world.text.loads
    capsys.readouterr()
    for folder, changed in ((fewer, "2"), (edited, "3")):
        assert world.train("run", 4, *flags, "--data.folder", str(folder)) == 1
        said = capsys.readouterr()
        assert f'data.folder "{world.folder / "clips"}" -> "{folder}"' in said.out
        assert said.err.splitlines()[-1].startswith(
            f"error: {world.folder / 'run'} was trained on something else (1 changed, first "
            f"{changed!r}: clip"
        )
        assert "set data.folder to where its data is now" in said.err
        assert (world.folder / "run" / "config.toml").read_bytes() == stored, (
            "refused settings are not stored"
        )
        assert world.text.loads == loads + (changed == "3"), (
            "a sample that is missing is noticed before anything is encoded"
        )
    assert world.train("run", 4, *flags, "--data.folder", str(moved)) == 0
    assert equal(world.adapter("run"), world.adapter("whole"))
    states = (
        load_file(world.folder / run / "state/step-000004/optimizer.safetensors")
        for run in ("run", "whole")
    )
    assert differing(*states) == []
    assert losses(world, "run", "held_out")[-1] == losses(world, "whole", "held_out")[-1]
    capsys.readouterr()
    assert world.train("run", 4, *flags, "--data.folder", str(edited)) == 0
    assert (
        f'not used, because the run is complete: data.folder "{moved}" -> "{edited}"\n'
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_plan_has_the_memory_of_masks(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def planned() -> tuple[str, int]:
        assert world.train("plan", 1, "--plan", "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        return plan["bucket"], plan["devices"][0]["activations"]

    bucket, activations = planned()
    mask(world.folder / "clips" / "0-mask.png", (16, 16))
    masked, more = planned()
    assert masked == bucket.replace(" (", " with loss masks (", 1) and more > activations


@pytest.mark.parametrize("key", ["metadata", "references", "masks"])
def test_what_belongs_to_the_data_may_be_moved_with_it(
    world: World, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """The record has its content, so that other content is refused."""
    old, new = world.folder / "old", world.folder / "new"
    picture(old / "0.png", (16, 16), "white")
    path = ""
    if key == "metadata":
        path = "list.jsonl"
        rows = [{"file_name": f"{name}.png", "text": f"picture {name}"} for name in range(5)]
        (old / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--sample.captions", "0", f"--data.{key}")
    assert world.train("run", 1, *flags, str(old / path)) == 0
    shutil.copytree(old, new)
    if path:
        (old / path).write_text((old / path).read_text().replace("picture 3", "another caption"))
    else:
        picture(old / "0.png", (16, 16), "black")
    assert world.train("run", 2, *flags, str(old / path)) == 1
    assert f"1 changed, first {'3' if path else '0'!r}" in capsys.readouterr().err
    assert world.train("run", 2, *flags, str(new / path)) == 0
    assert (
        f'changed since the last part of this run: data.{key} "{old / path}" -> "{new / path}"'
        in capsys.readouterr().out
    )
