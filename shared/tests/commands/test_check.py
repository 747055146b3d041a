"""`train --check` as a person meets it: everything that is wrong at once, nothing left behind, and
a verdict that training agrees with."""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_clips import pan, texture, written
from media_files import noisy_video, numbered_video, truncated
from PIL import Image
from safetensors.torch import load_file, save_file
from toy_world import World, equal

from ditkit_core.diagnostics.doctor import trial as doctor_step
from ditkit_core.diagnostics.doctor.findings import CutsCaptions
from ditkit_core.models.protocol import PartlyUsed
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyBlock, ToyModel, ToyTextEncoder

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    shutil.rmtree(tmp_path / "clips")
    for i in range(4):
        add_picture(world, f"{i}.png", i)
    return world


def add_picture(
    world: World, name: str, seed: int, size: tuple[int, int] = (32, 32), caption: str | None = None
) -> Path:
    path = world.folder / "clips" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(texture(seed, *size).astype("uint8")).save(path)
    path.with_suffix(".txt").write_text(caption or f"picture number {seed}")
    return path


def check(world: World, *flags: str, name: str = "run") -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a check."""
    folder = world.folder / name
    status = world.run(
        "train", "--run.folder", str(folder), "--train.steps", "1", "--check", *flags
    )
    return status, json.loads((folder / "check.json").read_text())


def codes(found: Mapping[str, Any], severity: str | None = None) -> list[str]:
    return [each["code"] for each in found["findings"] if severity in (None, each["severity"])]


def test_a_sound_run_can_be_trained_and_nothing_else_is_left(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = check(world, "--train.batch_size", "2", "--held_out.clips", "1")
    assert status == 0 and found["trainable"] and codes(found) == []
    assert sorted(path.name for path in (world.folder / "run").iterdir()) == [
        "check.html",
        "check.json",
    ]
    assert found["samples"] == 4 and found["frames"] == {"kept": 4, "dropped": 0}
    (row,) = found["buckets"]
    assert (
        row["samples"],
        row["held_out"],
        row["tokens"],
        row["batch_size"],
        row["micro_batches"],
    ) == (4, 1, 16, 2, 2)
    (step,) = found["steps"]
    assert len(step["samples"]) == 2 and step["tokens"] == 32 and step["reloaded"] is True
    assert (
        step["without_gradient"] == [] and step["parameters"] > 0 and len(set(step["losses"])) == 2
    )
    assert world.media.calls == 2, "what is not in the largest micro-batch is not encoded"
    said = capsys.readouterr().out
    assert found["memory"]["fits"] is None and "fits: not planned: a run on the CPU" in said
    assert (
        "4 samples of 4 files" in said
        and "can be trained; checked in" in said
        and "check.html" in said
    )


def test_training_after_a_check_equals_training_without_one_bitwise(world: World) -> None:
    flags = ("--train.accumulation", "2", "--held_out.clips", "1")
    assert check(world, *flags, name="a")[0] == 0
    assert world.train("a", 3, *flags) == 0 == world.train("b", 3, *flags)
    assert equal(world.adapter("a"), world.adapter("b"))
    assert check(world, *flags, name="a")[0] == 0, "a run that was trained can be checked"
    assert world.train("a", 4, *flags) == 0


def test_json_is_all_that_stdout_has(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    _, written = check(world, "--json")
    assert json.loads(capsys.readouterr().out) == written


def test_class_images_are_examined_like_the_data_and_distinguished_from_it(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        add_picture(world, f"../class/{i}.png", 50 + i, (32, 64), "a picture")
    shutil.copy(world.folder / "clips" / "2.png", world.folder / "class" / "same.png")
    (world.folder / "class" / "same.txt").write_text("a picture")
    Image.new("RGB", (32, 64), "teal").save(world.folder / "class" / "blank.png")
    (world.folder / "class" / "blank.txt").write_text("a picture")
    torn = add_picture(world, "../class/torn.jpg", 60, (64, 64))
    truncated(torn, torn, 0.7)
    add_picture(world, "../class/nocaption.png", 61).with_suffix(".txt").unlink()
    flags = (
        "--prior.folder",
        str(world.folder / "class"),
        "--data.buckets",
        "true",
        "--train.batch_size",
        "2",
    )
    status, found = check(world, *flags, "--data.on_bad", "skip")
    assert status == 0 and (found["samples"], found["class_images"]) == (4, 5)
    where = {each["code"]: each["where"] for each in found["findings"]}
    assert where.keys() == {"D02", "D03", "D04", "D07"}, (
        "that they share a caption is what they are for"
    )
    assert (where["D03"], where["D04"], where["D07"]) == (
        "prior: torn",
        "2, prior: same",
        "prior: blank",
    )
    rows = [(each["dataset"], each["samples"], each["micro_batches"]) for each in found["buckets"]]
    assert rows[0] == ("data", 4, 2) and sum(each[1] for each in rows[1:]) == 5
    assert {(each[0], each[2]) for each in rows[1:]} == {("prior", None)}
    assert [each["dataset"] for each in found["files"]] == ["data"] * 4 + ["prior"] * 5
    assert all(name.startswith("prior: ") for name in found["steps"][0]["samples"]), (
        "theirs is the largest micro-batch"
    )
    assert "4 samples and 5 class images of 9 files" in capsys.readouterr().out
    torn.rename(world.folder / "torn.jpg")
    shutil.rmtree(torn.parent)
    assert codes(check(world, *flags)[1], "error") == ["D01"]
    torn.parent.mkdir()
    (world.folder / "torn.jpg").rename(torn)
    torn.with_suffix(".txt").write_text("a picture")
    status, found = check(world, *flags, "--data.on_bad", "skip")
    assert status == 0 and codes(found) == ["D03", "D01"]
    assert "without prior preservation" in found["findings"][1]["what"]


def spoil(world: World) -> list[str]:
    """Five things that are wrong, by name."""
    clips = world.folder / "clips"
    (clips / "empty.png").write_bytes(b"")
    (clips / "empty.txt").write_text("an empty file")
    add_picture(world, "nocaption.png", 10).with_suffix(".txt").unlink()
    add_picture(world, "blank.png", 11).with_suffix(".txt").write_text(" \n")
    numbered_video(clips / "noise.mp4").write_bytes(b"no video" * 50)
    (clips / "noise.txt").write_text("noise")
    torn = add_picture(world, "torn.jpg", 12, (64, 64))
    truncated(torn, torn, 0.7)
    return ["empty", "nocaption", "blank", "noise", "torn"]


def test_all_that_is_wrong_is_listed_whatever_is_done_about_it(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    names = spoil(world)
    status, strict = check(world)
    assert status == 1 and not strict["trainable"]
    assert sorted(Path(each["name"]).stem for each in strict["excluded"]) == sorted(names)
    assert all(each["stops"] for each in strict["excluded"])
    assert sorted(codes(strict, "error")) == ["D02"] * 4 + ["D03"]
    status, lenient = check(world, "--data.on_bad", "skip")
    assert status == 0 and codes(lenient, "error") == [] and len(codes(lenient, "warning")) == 5
    assert not any(each["stops"] for each in lenient["excluded"])
    capsys.readouterr()
    assert world.train("run", 1) == 1 and "and 3 more" in capsys.readouterr().err
    assert world.train("skip", 1, "--data.on_bad", "skip") == 0
    recorded = json.loads((world.folder / "skip" / "data.json").read_text()).keys()
    assert recorded - {"(base weights)", "(empty caption)", "(digest)"} == {"0", "1", "2", "3"}


def test_a_dataset_of_nothing_but_problems_lists_them(world: World) -> None:
    shutil.rmtree(world.folder / "clips")
    (world.folder / "clips").mkdir()
    names = [name for name in spoil(world) if name != "torn"]
    (world.folder / "clips" / "torn.jpg").unlink()
    status, found = check(world, "--data.on_bad", "skip")
    assert status == 1 and codes(found, "error") == ["D01"] and found["steps"] == []
    assert sorted(Path(each["name"]).stem for each in found["excluded"]) == sorted(names)
    shutil.rmtree(world.folder / "clips")
    status, found = check(world)
    assert (
        status == 1 and codes(found) == ["D01"] and "does not exist" in found["findings"][0]["what"]
    )


def test_short_clips_stop_or_are_left_out_by_their_own_setting(world: World) -> None:
    written(world.folder / "clips" / "short.mp4", pan(1, 6, height=32, width=32)).with_suffix(
        ".txt"
    ).write_text("a clip")
    flags = ("--data.frames", "17", "--data.on_bad", "skip")
    status, found = check(world, *flags)
    assert status == 1 and [each["stops"] for each in found["excluded"]] == [True]
    assert check(world, *flags, "--data.short_clips", "skip")[0] == 0
    status, found = check(world, *flags, "--data.short_clips", "shorten")
    assert (
        status == 0
        and found["excluded"] == []
        and {row["frames"] for row in found["buckets"]} == {1}
    )


def test_what_is_likely_a_mistake_is_warned_of(world: World) -> None:
    clips = world.folder / "clips"
    clip = written(clips / "cut.mp4", pan(1, 30) + pan(2, 30))
    shutil.copy(clip, clips / "again.mp4")
    for path in (clip, clips / "again.mp4"):
        path.with_suffix(".txt").write_text("a clip that is cut")
    add_picture(world, "tiny.png", 20, (8, 8))
    status, found = check(world, "--data.frames", "17", "--data.fps", "8")
    assert status == 0
    where = {each["code"]: each["where"] for each in found["findings"]}
    assert where.keys() == {"D04", "D06", "D11"}
    assert found["same"] == [["again", "cut"]] and where["D04"] == "again, cut"
    assert Path(where["D11"]).stem == "tiny"
    cut = next(
        each for each in found["findings"] if each["code"] == "D06" and each["where"] == "cut"
    )
    assert "1.25 s" in cut["what"]
    row = next(each for each in found["files"] if Path(each["file"]).stem == "cut")
    assert (row["frames"], row["kept"], row["dropped"], row["trained_fps"]) == (20, 17, 3, 8.0)


def test_what_is_damaged_behind_its_window_is_reported_and_trained(world: World) -> None:
    clips = world.folder / "clips"
    torn = truncated(noisy_video(world.folder / "whole.mp4"), clips / "torn.mp4")
    torn.with_suffix(".txt").write_text("torn")
    flags = ("--data.frames", "5", "--data.fps", "16")
    status, found = check(world, *flags)
    assert status == 0 and found["samples"] == 5 and codes(found, "warning") == ["D27"]
    (finding,) = found["findings"]
    assert (
        "torn.mp4 is truncated or damaged after" in finding["what"]
        and "up to 0.31 s, can be read" in finding["what"]
    )
    row = next(each for each in found["files"] if Path(each["file"]).stem == "torn")
    assert (row["frames"], row["kept"], row["dropped"]) == (5, 5, 0)
    assert world.train("run", 1, *flags) == 0
    assert check(world, *flags, "--data.windows", "all", name="all")[1]["excluded"][0]["stops"]


class Cutting(ToyTextEncoder):
    """Reads 20 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated: list[str] = []

    def encode(self, items: Sequence[str], *args: Any) -> list[dict[str, torch.Tensor]]:
        self.truncated += [item for item in items if self.cut_of(item)]
        return super().encode([item[:20] for item in items], *args)

    def cut_of(self, caption: str, num_pictures: int = 0) -> tuple[int, str] | None:
        return (len(caption) - 20, caption[:20]) if len(caption) > 20 else None


def test_captions_that_are_cut_are_shown_with_what_is_left(world: World) -> None:
    assert isinstance(Cutting(), CutsCaptions) and not isinstance(ToyTextEncoder(), CutsCaptions)
    world.text = Cutting()
    add_picture(world, "wordy.png", 30, caption="a very long caption that nobody reads")
    status, found = check(world)
    assert status == 0 and codes(found) == ["D14"]
    assert found["captions"]["cut"] == [
        {"sample": "wordy", "tokens": 17, "kept": "a very long caption "}
    ]
    world.text = ToyTextEncoder()
    assert check(world)[1]["captions"]["cut"] is None


def test_every_adapter_matrix_is_heard_of_and_the_first_only_after_an_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_step, "STEPS", 1)
    status, found = check(world)
    (step,) = found["steps"]
    assert status == 1 and codes(found, "error") == ["D23"]
    assert len(step["without_gradient"]) * 2 == step["parameters"]
    assert all("lora_A" in name for name in step["without_gradient"])


@pytest.mark.parametrize("flags", [("--adapter.method", "full"), ("--adapter.use_dora", "true"), (
    "--optim.fused_backward", "true", "--train.clip_norm", "0", "--adapter.method", "full"), (
    "--train.pipelined", "true", "--train.accumulation", "2"), ("--adapter.method", "lokr", "--adapter.dropout", "0"), ("--ema.decay", "0.9", "--train.checkpointing", "full")])  # fmt: skip
def test_the_trial_is_the_runs_own_step(world: World, flags: Sequence[str]) -> None:
    flags = [
        *flags,
        *(
            ["--export.forms", '["diffusers"]']
            if "true" in flags and "use_dora" in flags[0]
            else []
        ),
    ]
    status, found = check(world, *flags)
    assert status == 0 and codes(found) == [] and found["steps"][0]["reloaded"] is True
    assert found["steps"][0]["without_gradient"] == []


class _DeafBlock(ToyBlock):
    """Takes no notice of the text."""

    def forward(self, carry: Any) -> Any:
        return super().forward(carry._replace(text=torch.zeros_like(carry.text)))


class _Deaf(ToyModel):
    def __init__(self, arch: Any, precision: Any):
        super().__init__(arch, precision)
        self.layers = torch.nn.ModuleList(_DeafBlock(arch, precision) for _ in range(arch.depth))


class _PartlyUsedBlock(_DeafBlock, PartlyUsed):
    """Says so."""

    unused = ("key_value",)


class _Partly(ToyModel):
    def __init__(self, arch: Any, precision: Any):
        super().__init__(arch, precision)
        self.layers = torch.nn.ModuleList(
            _PartlyUsedBlock(arch, precision) for _ in range(arch.depth)
        )


def test_layers_that_nothing_reads_are_expected_next_to_others(world: World) -> None:
    world.spec = altered(world.spec, build=_Partly)
    status, found = check(world)
    assert status == 0 and codes(found) == []
    status, found = check(world, "--adapter.targets", '["key_value"]')
    assert status == 1 and codes(found) == ["D23"], "an adapter of these alone"


def test_parameters_that_nothing_reaches_are_an_error(world: World) -> None:
    world.spec = altered(world.spec, build=_Deaf)
    status, found = check(world)
    assert status == 1 and codes(found) == ["D23"]
    silent = found["steps"][0]["without_gradient"]
    assert len(silent) == 4 and all(".key_value.lora_" in name for name in silent)


def test_a_loss_that_is_not_finite_is_an_error(world: World) -> None:
    state = load_file(world.folder / "toy.safetensors")
    save_file(
        {name: tensor * float("nan") for name, tensor in state.items()},
        world.folder / "toy.safetensors",
    )
    status, found = check(world)
    assert status == 1 and codes(found, "error") == ["D22"] and found["steps"] == []


def test_a_save_that_comes_back_otherwise_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipped(path: Path) -> Any:
        state = load_state(path)
        group = dict(state.tensors["trainable"])
        name = next(iter(group))
        group[name] = torch.nextafter(group[name], torch.tensor(torch.inf))
        return replace(state, tensors={**state.tensors, "trainable": group})

    load_state = doctor_step.load_state
    monkeypatch.setattr(doctor_step, "load_state", flipped)
    status, found = check(world)
    assert status == 1 and codes(found) == ["D24"] and found["steps"][0]["reloaded"] is False


def test_a_model_that_is_not_here_is_not_fetched(world: World) -> None:
    status, found = check(world, "--model.transformer", "somebody/model")
    assert status == 0 and codes(found) == ["D20"] and found["steps"] == []
    assert found["findings"][0]["remedy"].startswith(
        'fetch them with hf download somebody/model --include "*" and '
    )
    status, found = check(world, "--model.transformer", "no such file")
    assert (
        status == 1 and codes(found) == ["D21"] and "no such file" in found["findings"][0]["what"]
    )


def test_memory_that_runs_out_is_an_error_with_a_remedy(world: World) -> None:
    def full(*given: Any) -> Any:
        if given[0][0].device.type != "meta":
            raise MemoryError
        return TOY.training.make_inputs(*given)

    world.spec = altered(world.spec, make_inputs=full)
    status, found = check(world)
    assert status == 1 and codes(found) == ["D25"] and "--fit" in found["findings"][0]["remedy"]


@pytest.mark.slow
def test_memory_is_planned_for_accelerators(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = SimpleNamespace(name="a card", total_memory=2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    wide = add_picture(world, "../class/0.png", 9, (16, 64))
    flags = (
        "--model.transformer",
        "somebody/model",
        "--data.buckets",
        "true",
        "--data.on_bad",
        "skip",
    )
    flags += ("--train.kernels", "torch")  # others are checked on the GPU
    _, found = check(world, *flags, "--train.device", "cuda:0", "--prior.folder", str(wide.parent))
    assert found["memory"]["batch"].startswith("1 x 16x32 (the largest of the class images")
    add_picture(world, "wide.png", 9, (16, 64))
    add_picture(world, "torn.png", 9).write_bytes(b"")
    two = (*flags, "--train.devices", '["cuda:0", "cuda:1"]')
    status, found = check(world, *two)
    # The wide picture is cropped, and captions of the world differ in a number alone.
    assert status == 0 and codes(found) == ["D02", "D32", "D41", "D20"]
    plan = found["memory"]
    assert plan["fits"] is True and plan["batch"].startswith("1 x 16x32 "), (
        "the largest of those that can be read"
    )
    rows = [(row["device"], row["total"], row["fits"]) for row in plan["devices"]]
    assert rows == [(f"{index}: a card", 2**30, True) for index in (0, 1)]
    status, found = check(world, *two, "--train.reserve", "[0.0, 0.34]")
    assert (
        status == 0
        and codes(found) == ["D02", "D32", "D41", "D26", "D20"]
        and found["memory"]["fits"] is False
    )
    (lacking,) = [each for each in found["findings"] if each["code"] == "D26"]
    assert lacking["where"] == "1: a card" and "--fit" in lacking["remedy"]
    first, second = found["memory"]["devices"]
    assert (
        first["fits"]
        and not second["fits"]
        and second["peak"] + second["reserve"] > second["total"]
    )
    said = capsys.readouterr().out
    assert (
        "fits: yes, as planned for 1 x 16x32" in said
        and "fits: no, as planned for 1 x 16x32" in said
    )
    assert "lacks 0.0" in said
    shutil.rmtree(world.folder / "clips")
    truncated(torn := add_picture(world, "torn.jpg", 12, (64, 64)), torn, 0.7)
    add_picture(world, "../class/0.png", 50)
    _, found = check(
        world, *flags, "--train.device", "cuda:0", "--prior.folder", str(world.folder / "class")
    )
    assert (found["class_images"], codes(found), found["memory"]) == (1, ["D03", "D01"], None), (
        "nothing is tried"
    )


def test_holding_everything_out_is_an_error(world: World) -> None:
    status, found = check(world, "--held_out.clips", "4")
    assert (
        status == 1 and codes(found) == ["D01"] and "4 are held out" in found["findings"][0]["what"]
    )


@pytest.mark.parametrize(
    "flags", [("--check", "--plan"), ("--check", "--audit-precision"), ("--check", "--fit")]
)
def test_one_thing_at_a_time(
    world: World, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    assert world.run("train", *flags) == 2
    error = capsys.readouterr().err
    assert "--check and --" in error and error.count("\n") == 1


def test_before_training_the_same_is_said_in_brief(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.text = Cutting()
    add_picture(world, "wordy.png", 30, caption="a very long caption that nobody reads")
    shutil.copy(world.folder / "clips" / "wordy.png", world.folder / "clips" / "again.png")
    (world.folder / "clips" / "again.txt").write_text("the same picture")
    (world.folder / "clips" / "empty.png").write_bytes(b"")
    assert world.train("run", 1, "--data.on_bad", "skip") == 0
    said = capsys.readouterr()
    assert "data: 6 samples (6 of 1 x 16 x 16), 1 left out; --check examines them" in said.out
    found = [line for line in said.err.splitlines() if line.startswith("D")]
    assert [line[:3] for line in found] == ["D04", "D14"]
    assert (
        "again, wordy: these files have the same content" in found[0] and "1 caption:" in found[1]
    )


def _bad(world: World, draw: random.Random, name: str) -> None:
    """One entry of which something is wrong."""
    clips = world.folder / "clips"
    match draw.randrange(6):
        case 0:
            (clips / f"{name}.png").write_bytes(b"")
            (clips / f"{name}.txt").write_text("empty")
        case 1:
            add_picture(world, f"{name}.png", draw.randrange(99)).with_suffix(".txt").unlink()
        case 2:
            torn = add_picture(world, f"{name}.jpg", draw.randrange(99), (64, 64))
            truncated(torn, torn, 0.3 + 0.6 * draw.random())
        case 3:
            add_picture(world, f"{name}.png", draw.randrange(99)).with_suffix(".txt").write_bytes(
                b"\xff\xfe caption"
            )
        case 4:
            clip = written(clips / f"{name}.mp4", pan(draw.randrange(99), 30, height=32, width=32))
            clip.with_suffix(".txt").write_text("damaged")
            data = bytearray(clip.read_bytes())
            for _ in range(40):
                data[draw.randrange(len(data))] ^= 1 + draw.randrange(255)
            clip.write_bytes(bytes(data))
        case _:
            clip = written(
                clips / f"{name}.mp4",
                pan(draw.randrange(99), 1 + draw.randrange(8), height=32, width=32),
            )
            clip.with_suffix(".txt").write_text("short")


def _made(world: World, draw: random.Random) -> list[str]:
    """Fill the folder with whatever is sampled; returns flags."""
    for i in range(draw.randrange(3, 7)):
        size = draw.choice([(32, 32), (16, 48), (64, 24), (9, 7)])
        if draw.random() < 0.4:
            clip = written(
                world.folder / "clips" / f"good{i}.mp4",
                pan(draw.randrange(99), 30, height=32, width=48),
            )
            clip.with_suffix(".txt").write_text(f"clip {i}")
        else:
            add_picture(world, f"good{i}.png", draw.randrange(99), size)
    for i in range(draw.choice([0, 0, 1, 3])):
        _bad(world, draw, f"bad{i}")
    flags = ["--data.on_bad", draw.choice(["error", "skip", "skip"])]
    flags += ["--data.short_clips", draw.choice(["error", "skip", "shorten"])]
    flags += [
        "--data.frames",
        draw.choice(["1", "5", "9"]),
        "--held_out.clips",
        str(draw.choice([0, 1, 2])),
    ]
    flags += draw.choice(
        [["--train.batch_size", str(draw.randrange(1, 4))], ["--train.batch_tokens", "40"]]
    )
    flags += draw.choice([[], ["--data.buckets", "true"]])
    return flags + draw.choice([[], ["--data.windows", "all"]])


LATER = [
    pytest.param(seed, marks=pytest.mark.slow if seed < 40 else pytest.mark.exhaustive)
    for seed in range(18, 80)
]


@pytest.mark.parametrize("seed", [12, 13, 14, 16, 17, *LATER])
def test_what_the_doctor_accepts_is_trained_and_what_it_excludes_is_not(
    tmp_path: Path, seed: int
) -> None:
    world, draw = World(tmp_path), random.Random(seed)
    shutil.rmtree(tmp_path / "clips")
    (tmp_path / "clips").mkdir()
    flags = _made(world, draw)
    status, found = check(world, *flags)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert status == (0 if found["trainable"] else 1)
    trained = world.train("trained", 1, *flags)
    assert (trained == 0) == found["trainable"], found["findings"]
    if trained == 0:
        recorded = json.loads((tmp_path / "trained" / "data.json").read_text()).keys()
        used = recorded - {"(base weights)", "(empty caption)", "(digest)"}
        assert len(used) == found["samples"]
        out = {Path(each["name"]).with_suffix("").name for each in found["excluded"]}
        assert out.isdisjoint(id.partition("#")[0] for id in used)
