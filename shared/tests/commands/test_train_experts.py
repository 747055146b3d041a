"""The commands on a model of two experts: trained one after the other, sampled with in turn,
exported each."""

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from toy_world import equal
from two_experts import BOUNDARY, EXPERTS, TwoExperts

from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.run import model as run
from ditkit_core.run.data import RunData
from ditkit_core.training import trainer as train

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

NAMES = tuple(expert.name for expert in EXPERTS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoExperts:
    monkeypatch.chdir(tmp_path)
    return TwoExperts(tmp_path, captions=1)


@contextmanager
def loads_watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The parts in the order that they are loaded; fails where one is loaded while a parameter of
    another lives."""
    alive: list[weakref.ref[Any]] = []
    loaded: list[str] = []
    original = run.load_weights

    def load(unloaded: Any, **arguments: Any) -> Model:
        gc.collect()
        left = [reference for reference in alive if reference() is not None]
        assert not left, (
            f"{len(left)} parameters of {loaded[-1]} are alive when "
            f"{unloaded.origin.stored.source.path.name} is loaded"
        )
        prepared = original(unloaded, **arguments)
        loaded.append(unloaded.origin.stored.source.path.stem.removeprefix("toy_"))
        alive.extend(weakref.ref(parameter) for parameter in prepared.module.parameters())
        return prepared

    with monkeypatch.context() as patched:
        patched.setattr(run, "load_weights", load)
        yield loaded


def error(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


def test_both_in_one_run_are_each_alone_bitwise(world: TwoExperts) -> None:
    flags = (
        "--ema.decay",
        "0.9",
        "--held_out.clips",
        "1",
        "--experts.rank",
        "[2, 3]",
        "--experts.lr",
        "[1e-2, 2e-2]",
    )
    assert world.train("both", 2, *flags) == 0
    for name, rank, lr in zip(NAMES, (2, 3), (1e-2, 2e-2), strict=True):
        alone = ("--experts.train", name, "--adapter.rank", str(rank), "--optim.lr", str(lr))
        assert world.train(name, 2, "--ema.decay", "0.9", "--held_out.clips", "1", *alone) == 0
        assert equal(world.exported("both", name), world.adapter(name))
        ranks = {tensor.shape[0] for key, tensor in world.adapter(name).items() if "lora_A" in key}
        assert ranks == {rank}
        lines = [
            json.loads(line)
            for line in (world.folder / "both" / name / "metrics.jsonl").read_text().splitlines()
        ]
        losses = [line for line in lines if "loss" in line]
        assert [line["step"] for line in losses] == [1, 2] and max(
            line["lr"] for line in losses
        ) == lr
        levels = {
            float(key.split("_")[-1])
            for line in lines
            for key in line
            if key.startswith("held_out/sigma_")
        }
        assert levels and all(
            (level >= BOUNDARY) == (name == "high_noise")
            for level in levels
            if "low" not in str(level)
        )
    high, low = (world.exported("both", name) for name in NAMES)
    assert high.keys() == low.keys() and not any(
        torch.equal(high[key], low[key]) for key in high if "lora_B" in key
    )
    assert not (world.folder / "both" / "metrics.jsonl").exists(), "metrics are each expert's"
    with safe_open(world.folder / "both" / "exports" / "both_low_noise.safetensors", "pt") as file:
        assert file.metadata()["ditkit.expert"] == "low_noise" and file.metadata()[
            "ditkit.base"
        ].endswith("low_noise.safetensors")


def test_the_data_is_encoded_once(world: TwoExperts) -> None:
    assert world.train("both", 1) == 0
    assert (world.media.loads, world.text.loads) == (1, 1)


def test_each_step_of_training_is_on_its_experts_side(
    world: TwoExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    original = train.training_step

    def step(*arguments: Any, **settings: Any) -> Any:
        flow = arguments[3].flow
        seen.append((flow.min_sigma, flow.max_sigma))
        return original(*arguments, **settings)

    monkeypatch.setattr(train, "training_step", step)
    assert world.train("both", 2, "--flow.max_sigma", "0.95") == 0
    assert seen[:2] == [(0.875, 0.95)] * 2
    assert {low for low, _ in seen[2:]} == {0.0} and all(
        0.8749 < high < 0.875 for _, high in seen[2:]
    )


def test_both_experts_are_trained_on_the_same_data_wherever_it_is(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("both", 2) == 0
    run, second = world.folder / "both", world.exported("both", NAMES[1])
    (run / "complete.json").unlink()
    shutil.rmtree(run / NAMES[1])  # the first one is complete, and the second not begun
    clips, edited, moved = (world.folder / name for name in ("clips", "edited", "moved"))
    shutil.copytree(clips, edited)
    (edited / "0.txt").write_text("another caption")
    clips.rename(moved)
    stored = (run / "config.toml").read_bytes()
    assert world.train("both", 2, "--data.folder", str(edited)) == 1
    assert (
        f"{NAMES[0]} was trained on something else (1 changed, first '0'" in capsys.readouterr().err
    )
    assert (run / "config.toml").read_bytes() == stored
    assert world.train("both", 2, "--data.folder", str(moved)) == 0
    assert equal(second, world.exported("both", NAMES[1]))


@pytest.mark.slow
def test_one_expert_is_in_memory_at_a_time(
    world: TwoExperts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with loads_watched(monkeypatch) as loaded:
        assert world.train("both", 1, "--sample.captions", "2", "--sample.images", "2") == 0
        assert loaded == [*NAMES, *NAMES], (
            "each is trained, then each draws its steps of all four samples"
        )
        loaded.clear()
        assert world.run("sample", "--run", "both", "--prompt", "a", "--prompt", "b") == 0
        assert loaded == list(NAMES)
        loaded.clear()
        assert world.run("export", "--run", "both") == 0
        assert loaded == list(NAMES)


@pytest.mark.slow
def test_a_run_killed_between_the_experts_goes_on_with_the_second(
    world: TwoExperts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--ema.decay", "0.9", "--save.every_steps", "2")
    assert world.train("whole", 4, *flags) == 0
    original = train.training_step
    # counted over all experts: before a step of the second expert, then in the middle of what is
    # left of it
    for stop_at in (5, 3):
        count = 0

        def step(*arguments: Any, **settings: Any) -> Any:
            nonlocal count
            count += 1
            if count == stop_at:  # noqa: B023 (used at once)
                raise KeyboardInterrupt
            return original(*arguments, **settings)

        monkeypatch.setattr(train, "training_step", step)
        assert world.train("parts", 4, *flags) == 130
        assert not (world.folder / "parts" / "complete.json").exists()
    monkeypatch.setattr(train, "training_step", original)
    capsys.readouterr()
    assert world.train("parts", 4, *flags) == 0
    said = capsys.readouterr().out
    assert "one in memory at a time: low_noise" in said and "train 4/4" in said
    for name in NAMES:
        assert equal(world.exported("whole", name), world.exported("parts", name))
    assert world.train("parts", 4, *flags) == 0
    assert "is complete; nothing is left to do" in capsys.readouterr().out
    assert world.train("parts", 5, *flags) == 0
    assert not equal(world.exported("whole", "high_noise"), world.exported("parts", "high_noise"))


def test_a_change_that_makes_it_another_run_is_refused_in_the_expert_that_it_is_of(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("both", 1, "--experts.rank", "[2, 3]") == 0
    capsys.readouterr()
    assert world.train("both", 2, "--experts.rank", "[2, 4]") == 1
    said = error(capsys)
    assert "low_noise contains another run" in said and "adapter.rank 3 -> 4" in said
    assert world.train("both", 1, "--experts.rank", "[2, 4]") == 1, (
        "a run that is complete is no other"
    )
    assert "adapter.rank 3 -> 4" in error(capsys)
    assert world.train("both", 2, "--experts.train", "low_noise") == 1
    assert "is a run of several experts; continue one of them with --run" in error(capsys)
    assert (
        world.run(
            "train",
            "--run",
            "both/low_noise",
            "--experts.train",
            "low_noise",
            "--adapter.rank",
            "3",
            "--train.steps",
            "2",
        )
        == 0
    )


def test_an_expert_that_was_gone_on_with_alone_is_handed_over(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("both", 1) == 0
    alone = ("--run", "both/low_noise", "--experts.train", "low_noise", "--train.steps", "2")
    assert world.run("train", *alone) == 0
    newest, whole = (
        Path("both/low_noise/exports/low_noise.safetensors"),
        Path("both/exports/both_low_noise.safetensors"),
    )
    assert newest.read_bytes() != whole.read_bytes()
    assert world.train("both", 1) == 0
    assert newest.read_bytes() == whole.read_bytes() and list(
        Path("both/samples").glob("step-000002-*")
    )
    capsys.readouterr()
    assert world.train("both", 1) == 0
    assert "is complete; nothing is left to do" in capsys.readouterr().out


@pytest.mark.slow
def test_exports_are_one_file_for_each_expert(world: TwoExperts) -> None:
    assert (
        world.train(
            "both", 2, "--export.forms", '["official", "diffusers"]', "--experts.rank", "[2, 3]"
        )
        == 0
    )
    names = {file.name for file in (world.folder / "both" / "exports").iterdir()}
    assert names == {
        f"both_{name}{form}.safetensors" for name in NAMES for form in ("", "_diffusers")
    }
    assert world.run("export", "--run", "both", "--out", "mine.safetensors") == 0
    for name in NAMES:
        assert equal(load_file(f"mine_{name}.safetensors"), world.exported("both", name))
    assert (
        world.run("export", "--run", "both", "--merge", "--dtype", "fp32", "--out", "merged") == 0
    )
    for name in NAMES:
        whole = load_file(
            world.folder / f"merged_{name}/transformer_official/diffusion_pytorch_model.safetensors"
        )
        close = max(float((whole[key] - world.base[name][key]).abs().max()) for key in whole)
        assert 0 < close < 0.1, "its own base with its own adapter"


def test_one_expert_alone_samples_with_the_other_as_it_is(
    world: TwoExperts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with loads_watched(monkeypatch) as loaded:
        assert world.train("low", 2, "--experts.train", "low_noise") == 0
        assert loaded == ["low_noise", *NAMES]
    said = capsys.readouterr().out
    assert (
        "sampling with the high_noise expert with its base weights" in said
        and "sampling with the low_noise expert at step 2" in said
    )
    assert list((world.folder / "low" / "samples").glob("step-000002-0-*.png"))
    assert world.train("alone", 1, "--experts.train", "low_noise", "--model.transformer", "") == 0
    assert (
        "no samples: sampling needs all experts, and model.transformer (high_noise) is missing"
        in capsys.readouterr().out
    )
    assert equal(load_file("alone/exports/alone.safetensors"), world.adapter("alone"))


def test_narrowed_levels_of_one_expert_are_no_matter_of_sampling_with_both(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = ("--experts.train", "low_noise", "--flow.max_sigma", "0.5")
    assert world.train("low", 1, *narrow) == 0
    assert "sampling with the high_noise expert with its base weights" in capsys.readouterr().out
    assert world.train("low", 1, *narrow) == 0
    assert "is complete" in capsys.readouterr().out


def test_class_images_are_generated_once_with_both_before_either_is_trained(
    world: TwoExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    prior = ("--prior.prompt", "a class", "--prior.images", "3", "--sample.captions", "0")
    with loads_watched(monkeypatch) as loaded:
        assert world.train("both", 1, *prior) == 0
        assert loaded == [*NAMES, *NAMES]
    assert len(list((world.folder / "both" / "prior").glob("*.png"))) == 3
    assert not (world.folder / "both" / "high_noise" / "prior").exists()
    assert world.train("high", 1, *prior, "--experts.train", "high_noise") == 0
    assert equal(world.exported("both", "high_noise"), world.adapter("high"))


def test_class_images_that_no_text_makes_are_refused_before_experts_encode_anything(
    world: TwoExperts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: RunData) -> None:
        raise UserError("this model starts from an image")

    monkeypatch.setattr("ditkit_core.run.checks.check_class_prompt", refuse)
    assert (
        world.train(
            "both", 1, "--prior.prompt", "a class", "--prior.images", "3", "--sample.captions", "0"
        )
        == 1
    )
    assert "this model starts from an image" in capsys.readouterr().err
    assert not list((world.folder / "cache").rglob("*.safetensors"))


def test_a_full_fine_tune_trains_each_in_its_folder(world: TwoExperts) -> None:
    assert world.train("both", 1, "--adapter.method", "full", "--adapter.dropout", "0") == 0
    where = "exports/transformer_official/diffusion_pytorch_model.safetensors"
    for name in NAMES:
        tuned = load_file(world.folder / "both" / name / where)
        assert tuned.keys() == world.base[name].keys() and not equal(tuned, world.base[name])


def test_another_run_of_both_starts_from_the_weights_of_one(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("first", 2) == 0
    assert world.train("second", 0, "--init-from", "first") == 0
    for name in NAMES:
        assert equal(world.exported("first", name), world.exported("second", name))
    capsys.readouterr()
    assert world.train("third", 1, "--init-from", "first/high_noise") == 1
    assert (
        "is a run of one transformer, and this run trains both experts; name the folder of a run "
        "of both" in error(capsys)
    )
    assert world.train("third", 1, "--init-from", "nowhere") == 1
    assert "--init-from nowhere does not exist; correct the path" in error(capsys)
    (world.folder / "first" / "low_noise" / "state").rename(
        world.folder / "first" / "low_noise" / "gone"
    )
    assert world.train("third", 1, "--init-from", "first") == 1
    assert "has no save of the low_noise expert" in error(capsys)
    assert world.train("third", 1, "--init-from", "first", "--experts.train", "high_noise") == 1
    assert f"name its folder: --init-from {Path('first', 'high_noise')}" in error(capsys)
    assert (
        world.train("fourth", 0, "--init-from", "first/high_noise", "--experts.train", "high_noise")
        == 0
    )
    assert not (world.folder / "third" / "config.toml").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ("--model.preset", "one", "--experts.train", "high_noise"),
            "experts.train is for a model of two experts",
        ),
        (
            ("--model.preset", "one", "--model.transformer", "toy.safetensors"),
            "model.transformer_2 is the second of two",
        ),
        (("--experts.lr", "[1e-3, 1e-3, 1e-3]"), "experts.lr has 3 numbers"),
        (("--flow.max_sigma", "0.5"), "leave nothing to the high_noise expert"),
        (("--model.transformer_2", ""), "the model has no transformer_2: set model.transformer_2"),
        (
            ("--model.transformer_2", "nowhere.safetensors"),
            "model.transformer_2 = 'nowhere.safetensors'",
        ),
        (("--model.transformer_2", "toy.safetensors"), "toy.safetensors"),
        (("--adapter.init", "some.safetensors"), "belongs to one expert and would initialize both"),
        (
            ("--base.merge_low", '["turbo_high_noise.safetensors"]'),
            "named after the high_noise expert, and this is the low_noise",
        ),
        (
            ("--base.merge", '["toy.safetensors"]'),
            "base.merge is for the high_noise expert",
        ),
        (
            ("--base.merge", '["toy.safetensors"]', "--experts.train", "low_noise"),
            "low_noise one in base.merge_low",
        ),
        (
            ("--base.merge_low", '["lost.safetensors"]'),
            "base.merge_low: there is no file lost.safetensors",
        ),
        (
            (
                "--model.preset",
                "one",
                "--model.transformer",
                "toy.safetensors",
                "--model.transformer_2",
                "",
                "--base.merge_low",
                '["a"]',
            ),
            "add its files to base.merge",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_encoded(
    world: TwoExperts, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    assert world.train("both", 1, *flags) == 1
    assert says in error(capsys)
    assert (world.media.loads, world.text.loads) == (0, 0)


def test_a_check_of_both_refuses_a_device_of_previews_as_training_does(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--sample.every_steps", "1", "--sample.device", "cuda:7")
    for more in ((), ("--check",)):
        assert world.train("both", 1, *flags, *more) == 1
        assert "sample.device = 'cuda:7': this machine has" in error(capsys)


def test_swapped_files_are_refused(world: TwoExperts, capsys: pytest.CaptureFixture[str]) -> None:
    swapped = (
        "--model.transformer",
        "toy_low_noise.safetensors",
        "--model.transformer_2",
        "toy_high_noise.safetensors",
    )
    assert world.train("both", 1, *swapped) == 1
    assert "exchange them, or rename the file" in error(capsys)


@pytest.mark.slow
def test_a_plan_is_of_the_one_that_is_resident(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--train.device", "cpu", "--experts.rank", "[2, 8]")
    assert world.train("both", 1, "--plan", "--gpus", "24GiB", *flags) == 0
    said = capsys.readouterr().out
    assert "trained one after the other" in said and "this plan is for low_noise" in said
    assert world.train("both", 1, "--plan", "--json", "--gpus", "24GiB", *flags) == 0
    both = json.loads(capsys.readouterr().out)
    assert (
        world.train(
            "low",
            1,
            "--plan",
            "--json",
            "--gpus",
            "24GiB",
            "--experts.train",
            "low_noise",
            "--adapter.rank",
            "8",
        )
        == 0
    )
    low = json.loads(capsys.readouterr().out)
    assert both["devices"] == low["devices"]
    assert world.train("both", 1, "--fit", "--gpus", "24GiB", "--experts.rank", "[2, 8]") == 0
    assert "rank = [2, 8]" in capsys.readouterr().out


@pytest.mark.slow
def test_an_audit_is_of_one_expert_and_leaves_the_folder_to_the_run(world: TwoExperts) -> None:
    assert world.train("both", 1, "--audit-precision", "--sample.captions", "0") == 0
    assert (world.folder / "both" / "audit" / "precision.json").exists()
    assert world.train("both", 1, "--sample.captions", "0") == 0
