"""The doctor and training try every shape on the model before weights are read, and the doctor
fetches nothing and tries what is cached."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from colour_profiles import P3, rgb_profile, srgb_curve
from doctor_codes import codes, error, errors
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from safetensors.torch import save_file
from toy_world import World
from two_experts import TwoExperts

from ditkit_core.errors import UserError
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY

HUB = "huggingface_hub.snapshot_download"


def check(world: Any, *flags: str) -> tuple[int, dict[str, Any]]:
    status = world.run(
        "train", "--run.folder", str(world.folder / "run"), "--train.steps", "1", "--check", *flags
    )
    return status, json.loads((world.folder / "run" / "check.json").read_text())


def _narrow(latents: Sequence[torch.Tensor], *given: Any) -> Any:
    """Inputs of a model that takes no image wider than high."""
    if any(each.shape[-1] > each.shape[-2] for each in latents):
        raise UserError("too wide for this model; make it higher")
    return TOY.training.make_inputs(latents, *given)


@pytest.mark.parametrize("flags", [(), ("--audit-precision",)])
def test_a_shape_that_the_model_does_not_take_is_said_before_the_first_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
) -> None:
    world = World(tmp_path)
    world.spec = altered(world.spec, make_inputs=_narrow)
    world.add("clips/z-wide.png", (16, 48), "red", "a wide picture")
    buckets = ("--data.buckets", "true")
    if not flags:
        status, found = check(world, *buckets)
        assert (
            status == 1
            and codes(found) == ["D21"]
            and "z-wide: too wide for this model" in errors(found)
        )
        assert world.media.loads == 0, "no sample is encoded for it"
    monkeypatch.setattr(
        "ditkit_core.run.model.load_weights",
        lambda *given, **named: pytest.fail("weights were read"),
    )
    assert world.train("a", 1, *buckets, *flags) == 1
    assert "z-wide: too wide for this model" in error(capsys)


def test_clips_that_the_model_is_conditioned_on_as_a_whole_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    assert "D28" not in codes(check(world)[1], "warning")
    world.spec = altered(world.spec, fewest_frames=5)
    status, found = check(world)
    (warned,) = [each for each in found["findings"] if each["code"] == "D28"]
    assert status == 0 and warned["severity"] == "warning"
    assert "clips of 5 frames" in warned["remedy"]
    capsys.readouterr()
    assert world.train("a", 1) == 0
    assert f"D28 {warned['where']}: they have fewer than 5 frames" in capsys.readouterr().err


def test_colours_that_are_converted_are_counted_and_others_are_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not {"D30", "D31"} & {each["code"] for each in check(world)[1]["findings"]}
    profile = rgb_profile(P3, srgb_curve(), "Display P3")
    for name, options in {
        "p": {"icc_profile": profile},
        "q": {"icc_profile": profile},
        "r": {"icc_profile": b"torn"},
    }.items():
        (tmp_path / "clips" / f"{name}.txt").write_text(f"a picture {name}")
        Image.new("RGB", (16, 16), (len(name), 60, 40 * ord(name) % 251)).save(
            tmp_path / "clips" / f"{name}.png", **options
        )
    status, found = check(world)
    (note,) = [each for each in found["findings"] if each["code"] == "D30"]
    (warning,) = [each for each in found["findings"] if each["code"] == "D31"]
    assert status == 0 and (note["severity"], warning["severity"]) == ("note", "warning")
    assert note["where"].startswith("2 files (") and "(Display P3: 2)" in note["what"]
    assert (
        warning["where"].endswith("r.png")
        and "a colour profile that cannot be used" in warning["what"]
    )


class Hub:
    """A hub of which some repositories are in the local cache."""

    def __init__(self, cached: Mapping[str, Path]) -> None:
        self.cached = cached

    def __call__(self, repository: str, *, local_files_only: bool = False, **given: Any) -> str:
        assert local_files_only, "a check downloads nothing"
        if repository not in self.cached:
            raise LocalEntryNotFoundError("not in the local cache")
        return str(self.cached[repository])


def test_a_model_in_the_local_cache_is_tried_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    (tmp_path / "cached" / "transformer").mkdir(parents=True)
    where = tmp_path / "cached" / "transformer" / "diffusion_pytorch_model.safetensors"
    (tmp_path / "toy.safetensors").rename(where)
    monkeypatch.setattr(HUB, Hub({"some/model": tmp_path / "cached"}))
    status, found = check(world, "--model.transformer", "some/model")
    assert (
        status == 0
        and [each["code"] for each in found["findings"]].count("D20") == 0
        and found["steps"]
    )
    status, found = check(world, "--model.transformer", "other/model")
    assert status == 0 and "D20" in codes(found, "note") and found["steps"] == []
    index = {"weight_map": {"a": "diffusion_pytorch_model-00002-of-00002.safetensors"}}
    where.with_name("diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    status, found = check(world, "--model.transformer", "some/model")
    assert status == 0 and "D20" in codes(found, "note"), (
        "a download that was broken off is not all there"
    )


def test_a_part_that_only_this_architecture_has_is_not_fetched_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    monkeypatch.setattr(HUB, Hub({}))
    looking = ("--model.image_encoder", "some/clip")
    assert check(world, *looking)[1]["steps"], (
        "an architecture that does not look takes no encoder of pictures"
    )
    world.spec = altered(world.spec, components=lambda arch: ("image_encoder",))
    status, found = check(world, *looking)
    (note,) = [each for each in found["findings"] if each["code"] == "D20"]
    assert status == 0 and "image_encoder" in note["where"] and found["steps"] == []


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoExperts:
    monkeypatch.chdir(tmp_path)
    return TwoExperts(tmp_path)


def test_both_experts_are_tried_each_with_its_own_settings(two: TwoExperts) -> None:
    status, found = check(two, "--experts.rank", "[2, 3]")
    assert status == 0 and [step["expert"] for step in found["steps"]] == [
        "high_noise",
        "low_noise",
    ]
    assert all(step["without_gradient"] == [] and step["reloaded"] for step in found["steps"])
    high, low = (step["losses"] for step in found["steps"])
    assert high != low
    assert sorted(path.name for path in (two.folder / "run").iterdir()) == [
        "check.html",
        "check.json",
    ]
    status, found = check(two, "--experts.train", "low_noise")
    assert status == 0 and [step["expert"] for step in found["steps"]] == ["low_noise"]


def test_what_is_wrong_with_the_second_expert_alone_is_found(
    two: TwoExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HUB, Hub({}))
    status, found = check(two, "--model.transformer_2", "some/model")
    (note,) = [each for each in found["findings"] if each["code"] == "D20"]
    assert status == 0 and "transformer_2" in note["where"]
    assert [step["expert"] for step in found["steps"]] == ["high_noise"]
    broken = {name: tensor * float("nan") for name, tensor in two.base["low_noise"].items()}
    save_file(broken, two.folder / "toy_low_noise.safetensors")
    status, found = check(two)
    assert status == 1 and codes(found) == ["D22"]
    assert [step["expert"] for step in found["steps"]] == ["high_noise"]
