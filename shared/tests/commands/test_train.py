"""The commands from end to end on the toy model: files in, adapter out, continued, sampled,
exported."""

import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from toy_world import World, equal

from ditkit_core.data.media import image as still
from ditkit_core.errors import UserError
from ditkit_core.models.encoders import AuxiliaryModel
from ditkit_core.models.paths import ModelPaths
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, captions=1)


def test_training_goes_from_files_to_an_adapter_with_its_history(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = ("--flow.shifting", "constant", "--flow.shift", "3.0", "--flow.sampling", "logit_normal")
    flags = ("--held_out.clips", "1", "--save.every_steps", "2", "--sample.captions", "2", *flow)
    assert world.train("run", 4, *flags) == 0
    said = capsys.readouterr().out
    run = world.folder / "run"
    assert "validation loss" in said and str(run / "exports" / "run.safetensors") in said
    assert [p.name for p in sorted(run.glob("exports/*"))] == [
        "run-step-000002.safetensors", "run-step-000004.safetensors", "run.safetensors",
    ]  # fmt: skip
    assert len(list(run.glob("samples/step-000004-[0-9]*.png"))) == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if "loss" in line} and any(
        "held_out" in line for line in lines
    )
    with safe_open(run / "exports" / "run.safetensors", "pt") as file:
        header = file.metadata()
    config = tomllib.loads(header["ditkit.config"])
    assert header["ditkit.step"] == "4" and config["adapter"]["rank"] == 2
    chosen = [config["flow"][key] for key in ("shifting", "shift", "sampling", "guidance")]
    assert chosen == ["constant", 3.0, "logit_normal", 1.0]
    assert (
        header["ditkit.data"]
        and json.loads(header["ditkit.versions"])["torch"] == torch.__version__
    )
    assert config["run"]["folder"] == "run" and not any(
        str(world.folder) in value for value in header.values()
    )
    assert str(world.folder) in (run / "config.toml").read_text(), (
        "the run itself goes on from its paths"
    )


def test_a_run_says_in_a_line_what_it_trains_and_numbers_its_stages(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "train a LoRA of rank 2 of tiny for 2 steps on cpu (precision default, each dtype is in the report)"
    )
    assert [line for line in lines if line.startswith("[")] == [
        "[1/5] check data and model",
        "[2/5] encode",
        "[3/5] load the model",
        "[4/5] train",
        "[5/5] export, verify and sample",
    ]
    order = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in ("[2", "encode", "[4", "train 1/", "[5", "sample")
    ]
    assert order == sorted(order)
    about = json.loads((world.folder / "run" / "about.json").read_text())
    assert "norms fp32" in about["environments"][0]["precision"], (
        "the list that the line leaves out"
    )


def test_dora_alone_is_exported_for_comfyui_and_for_diffusers(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--adapter.use_dora", "true", "--adapter.targets", '["all"]')
    assert world.train("run", 2, *flags) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert (
        "a DoRA of rank 2" in first and "its files are in the official and diffusers forms" in first
    )
    exports = world.folder / "run" / "exports"
    assert any(
        name.endswith("lora_magnitude_vector")
        for name in load_file(exports / "run_diffusers.safetensors")
    )
    assert any(name.endswith("dora_scale") for name in load_file(exports / "run.safetensors"))
    again = world.folder / "x.safetensors"
    assert (
        world.run(
            "export", "--run", str(world.folder / "run"), "--to", "official", "--out", str(again)
        )
        == 0
    )
    assert equal(load_file(again), load_file(exports / "run.safetensors"))
    assert world.run("export", "--run", str(world.folder / "run"), "--to", "musubi") == 1
    assert "do not reproduce DoRA" in capsys.readouterr().err


def test_a_second_call_says_that_the_run_is_complete_and_loads_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 2) == 0
    assert (world.media.loads, world.text.loads) == (1, 1)
    before = world.adapter("run")
    capsys.readouterr()
    assert world.train("run", 2) == 0
    assert "is complete at step 2" in capsys.readouterr().out
    stored = (world.folder / "run" / "config.toml").read_bytes()
    assert world.train("run", 2, "--optim.lr", "1e-5") == 0
    assert "changed since" not in capsys.readouterr().out
    assert (world.folder / "run" / "config.toml").read_bytes() == stored, (
        "it says how these weights were trained"
    )
    assert world.train("run", 3) == 0  # goes on, and everything is encoded already
    assert (world.media.loads, world.text.loads) == (1, 1)
    assert not equal(before, world.adapter("run"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_in_two_parts_equals_one_in_one_part_bitwise(world: World, method: str) -> None:
    flags = (
        "--adapter.method",
        method,
        "--ema.decay",
        "0.9",
        "--train.accumulation",
        "2",
        "--export.dtype",
        "fp32",
    )
    assert world.train("whole", 4, *flags) == 0
    assert world.train("parts", 2, *flags) == 0
    assert world.train("parts", 4, *flags, "--train.checkpointing", "attn_only") == 0
    transformer = "exports/transformer_official/diffusion_pytorch_model.safetensors"
    whole, parts = (
        load_file(
            world.folder
            / name
            / (f"exports/{name}.safetensors" if method == "lora" else transformer)
        )
        for name in ("whole", "parts")
    )
    assert equal(whole, parts)


def test_another_run_starts_from_the_weights_of_one(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("first", 2) == 0
    assert world.train("second", 0, "--init-from", str(world.folder / "first")) == 0
    said = capsys.readouterr()
    assert (
        "starting from the weights of" in said.out
        and "--train.steps 1000 trains the run" in said.out
    )
    assert "train.steps = 0: nothing is trained" in said.err
    assert equal(world.adapter("first"), world.adapter("second"))
    assert world.train("third", 0, "--init-from", str(world.folder / "nowhere")) == 1
    error = capsys.readouterr().err
    assert "nowhere" in error and error.count("\n") == 1
    for number in range(4):
        (world.folder / "runs" / f"run{number}" / "state" / "step-000001").mkdir(parents=True)
    assert world.train("third", 0, "--init-from", "runs") == 1
    inside = ", ".join(str(Path("runs", f"run{number}")) for number in range(3))
    assert (
        f"--init-from runs has no save; runs inside it: {inside} and 1 more; name one"
        in capsys.readouterr().err
    )
    (world.folder / "runs" / "config.toml").touch()
    assert world.train("third", 0, "--init-from", "runs") == 1
    assert "is a run of several experts" in capsys.readouterr().err


def test_previews_are_sampled_while_training_and_change_nothing(world: World) -> None:
    flags = ("--train.caption_dropout", "0.5", "--ema.decay", "0.9")
    assert world.train("without", 4, *flags) == 0
    assert world.train("run", 4, "--sample.every_steps", "2", *flags) == 0
    assert equal(world.adapter("run"), world.adapter("without"))
    steps = {path.name[:11] for path in (world.folder / "run" / "samples").glob("step-*.png")}
    assert steps == {"step-000000", "step-000002", "step-000004"}


def test_samples_and_exports_are_commands_of_their_own(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 2) == 0
    run = str(world.folder / "run")
    capsys.readouterr()
    out = world.folder / "drawn"
    assert world.run("sample", "--run", run, "--prompt", "a new thing", "--out", str(out)) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "sampled-001-step-000002-0-a-new-thing.png",
        "sampled-001-step-000002.json",
    ]
    file = world.folder / "mine.safetensors"
    assert world.run("export", "--run", run, "--out", str(file)) == 0
    assert equal(load_file(file), world.adapter("run"))
    renamed = world.folder / "renamed.safetensors"
    assert world.run("export", "--run", run, "--to", "diffusers", "--out", str(renamed)) == 0
    assert load_file(renamed).keys() != load_file(file).keys(), (
        "the name is the one that was asked for"
    )
    assert (
        world.run(
            "export",
            "--run",
            run,
            "--merge",
            "--dtype",
            "fp32",
            "--out",
            str(world.folder / "merged"),
        )
        == 0
    )
    merged = load_file(
        world.folder / "merged" / "transformer_official" / "diffusion_pytorch_model.safetensors"
    )
    base = load_file(world.folder / "toy.safetensors")
    assert merged.keys() == base.keys() and not equal(merged, base)


def test_any_adapter_file_that_fits_is_sampled_with(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the run itself would train: other layers, modules of several ranks as `--rank auto`
    writes them, a full fine-tune."""
    assert (
        world.train(
            "run", 2, "--sample.captions", "0", "--optim.lr", "0.1", "--export.dtype", "fp32"
        )
        == 0
    )
    tensors = world.adapter("run")
    name = next(name for name in tensors if "lora_A" in name)
    other = name.replace("lora_A", "lora_B")
    tensors[name] = torch.cat([tensors[name], torch.ones_like(tensors[name][:1])])
    tensors[other] = torch.cat([tensors[other], torch.zeros_like(tensors[other][:, :1])], 1)
    save_file(tensors, world.folder / "mixed@2.safetensors")
    module = name.removeprefix("diffusion_model.").removesuffix(".lora_A.weight").rpartition(".")[2]

    def drawn(file: Path, *flags: str) -> torch.Tensor:
        out = world.folder / "drawn" / file.stem / "-".join(flags).replace("*", "")
        assert (
            world.run("sample", "--adapter", str(file), "--prompt", "a", "--out", str(out), *flags)
            == 0
        )
        (picture,) = out.glob(f"sampled-*-{file.stem}-0-a.png")
        return torch.from_numpy(still.read_image(picture)).int()

    alike = drawn(world.folder / "run" / "exports" / "run.safetensors")
    for flags in (
        (),
        ("--adapter.method", "full"),
        ("--adapter.targets", f'["layers.0.*{module}"]'),
    ):
        assert (drawn(world.folder / "mixed@2.safetensors", *flags) - alike).abs().max() <= 1, flags
    assert torch.equal(drawn(world.folder / "run" / "exports" / "run.safetensors", *flags), alike)
    save_file(
        {key: 0 * tensor for key, tensor in tensors.items()}, world.folder / "zero.safetensors"
    )
    zero = drawn(world.folder / "zero.safetensors")
    assert (zero - alike).abs().max() > 1
    for strength, expected in (("@0", zero), ("@1", alike)):
        out = world.folder / f"drawn{strength}"
        file = f"{world.folder / 'run' / 'exports' / 'run.safetensors'}{strength}"
        assert world.run("sample", "--adapter", file, "--prompt", "a", "--out", str(out)) == 0
        (picture,) = out.glob("sampled-*-run*-0-a.png")
        assert (torch.from_numpy(still.read_image(picture)).int() - expected).abs().max() <= 1, (
            strength
        )


def test_what_cannot_be_sampled_with_is_said_before_anything_is_encoded(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(
        {"blocks.0.nothing.lora_A.weight": torch.ones(2, 2)}, world.folder / "strange.safetensors"
    )
    cases = {
        "no save to sample with; name a run that was trained": (),
        "there is no adapter file": ("--adapter", str(world.folder / "nothing.safetensors")),
        "is a LoRA of another model": ("--adapter", str(world.folder / "strange.safetensors")),
    }
    for words, flags in cases.items():
        assert (
            world.run("sample", "--prompt", "a", "--run.folder", str(world.folder / "none"), *flags)
            == 1
        )
        said = capsys.readouterr()
        assert words in said.err and said.err.count("\n") == 1 and "encode" not in said.out
    assert not world.text.calls


def test_the_best_save_is_kept_named_and_exported(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that ruins the model after a good start: the best save is not the last."""
    flags = (
        "--held_out.clips",
        "2",
        "--save.every_steps",
        "1",
        "--save.keep_last",
        "1",
        "--sample.captions",
        "0",
    )
    assert world.train("run", 2, *flags, "--optim.lr", "1e-2", "--export.dtype", "fp32") == 0
    assert "best save: step 2, the last one" in capsys.readouterr().out
    assert world.train("run", 6, *flags, "--optim.lr", "0.2", "--export.dtype", "fp32") == 0
    said, run = capsys.readouterr().out, world.folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    _, best = min((line["held_out"], line["step"]) for line in lines if "held_out" in line)
    assert 0 < best < 6
    assert sorted(path.name for path in (run / "state").iterdir()) == [
        f"step-{best:06d}",
        "step-000006",
    ]
    assert (
        f"best save: step {best}, where the validation loss " in said and "95 % confidence" in said
    )
    assert "export it with --step best" in said
    file = world.folder / "best.safetensors"
    assert world.run("export", "--run", str(run), "--step", "best", "--out", str(file)) == 0
    assert equal(load_file(file), load_file(run / "exports" / f"run-step-{best:06d}.safetensors"))
    assert not equal(load_file(file), world.adapter("run"))
    assert world.run("export", "--run", str(run), "--step", "worst", "--out", str(file)) == 2
    assert "--step" in capsys.readouterr().err


def test_without_a_measurement_there_is_no_best_save(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1, "--sample.captions", "0") == 0
    assert world.run("export", "--run", str(world.folder / "run"), "--step", "best") == 1
    assert "none of them has a validation loss, set held_out.clips" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags", "says"),
    [
        ("export", ["--out", "."], "--out . is not a file name"),
        ("export", ["--out", "mine.pt"], "ends with .safetensors"),
        ("export", ["--out", "toy.safetensors", "--merge"], "name a folder"),
        ("export", ["--out", "new.safetensors", "--merge"], "name a folder"),
        ("export", ["--step", "7"], "(it has step-000001); choose another --step"),
        ("sample", ["--sample.captions", "0"], "nothing to sample: give a --prompt"),
    ],
)
def test_a_mistake_in_a_command_is_one_line(
    world: World, capsys: pytest.CaptureFixture[str], command: str, flags: list[str], says: str
) -> None:
    assert world.train("run", 1, "--sample.captions", "0") == 0
    assert "samples:" not in capsys.readouterr().out, "there are none"
    assert world.run(command, "--run", str(world.folder / "run"), *flags) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_the_dataset_is_looked_at_before_a_model_is_fetched(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "clips" / "3.txt").unlink()
    assert world.train("run", 1, "--model.transformer", "nobody/nowhere") == 1
    assert "3.png has no caption" in capsys.readouterr().err


def test_guidance_that_the_model_does_not_take_is_said_not_to_be_used(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1, "--flow.guidance", "4.0") == 0
    assert "flow.guidance = 4 is not used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--train.attention", "flash2"], "flash2"),
        (["--model.dtype", "fp16"], "loss scaler"),
        (["--model.transformer", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--adapter.targets", "nonsense"], "fits no layer"),
        (["--model.preset", "huge"], "huge"),
        (["--train.device", "cuda:7"], "cuda:7"),
        (["--train.device", "warp"], "warp"),
        (["--train.device", "meta"], "meta"),
        (["--sample.frames", "8"], "try 9"),
        (["--sample.height", "30"], "try 32"),
        (["--adapter.method", "full", "--model.dtype", "bf16"], "rounds most updates away"),
        (["--held_out.clips", "5"], "none to train on"),
        (["--data.folder", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_before_anything_is_encoded(
    world: World, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert world.train("run", 2, *flags) == 1
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1
    assert (world.media.loads, world.text.loads) == (0, 0)
    assert not (world.folder / "run" / "config.toml").exists(), "nothing was begun"


def test_a_folder_of_another_run_is_refused_with_the_remedy(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1) == 0
    capsys.readouterr()
    assert world.train("run", 2, "--adapter.rank", "3") == 1
    error = capsys.readouterr().err
    assert "adapter.rank" in error and "--base.merge" in error and error.count("\n") == 1
    assert world.train("run", 2, "--optim.lr", "1e-5") == 0
    assert "optim.lr" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_stops_the_run_with_evidence(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> Any:
        inputs = TOY.training.make_inputs(*args)
        return inputs._replace(latents=[latent * float("nan") for latent in inputs.latents])

    world.spec = altered(world.spec, make_inputs=broken)
    assert world.train("run", 2, "--sample.captions", "0") == 1
    error = capsys.readouterr().err
    (evidence,) = (world.folder / "run").glob("failure-step-*.json")
    assert str(evidence) in error and error.count("\n") == 1
    assert json.loads(evidence.read_text())["samples"]
    assert not list((world.folder / "run").glob("exports/*"))


def test_encoding_first_leaves_the_folder_to_training(world: World) -> None:
    demo = world.folder / "demo.toml"
    demo.write_text("")
    world.spec = altered(
        world.spec, config=demo, write=lambda folder: folder.mkdir(parents=True, exist_ok=True)
    )
    assert world.run("encode", "--demo", "--run.folder", str(world.folder / "run")) == 0
    assert world.train("run", 1, "--demo") == 0


def test_a_run_is_not_continued_on_other_data(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1) == 0
    (world.folder / "clips" / "3.txt").write_text("another caption")
    capsys.readouterr()
    assert world.train("run", 2) == 1
    error = capsys.readouterr().err
    assert "1 changed, first '3'" in error and "--init-from" in error and error.count("\n") == 1
    assert world.train("new", 1, "--init-from", str(world.folder / "run")) == 0


def test_weights_of_an_adapter_of_another_shape_or_scale_are_refused(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1) == 0
    for flags in (["--adapter.rank", "3"], ["--adapter.alpha", "7"]):
        capsys.readouterr()
        assert world.train("other", 1, "--init-from", str(world.folder / "run"), *flags) == 1
        error = capsys.readouterr().err
        assert "base.merge" in error and error.count("\n") == 1
        assert f'["{world.folder / "run" / "exports" / "run.safetensors"}"]' in error
    # as an earlier version named it
    adapter = (world.folder / "run" / "exports" / "run.safetensors").rename(
        world.folder / "run" / "exports" / "adapter.safetensors"
    )
    capsys.readouterr()
    assert world.train("other", 1, "--init-from", str(world.folder / "run"), *flags) == 1
    assert f'base.merge = ["{adapter}"]' in capsys.readouterr().err
    assert (
        world.train("merged", 1, "--adapter.rank", "3", "--base.merge", f'["{adapter.as_posix()}"]')
        == 0
    )


def test_exports_are_next_to_the_saves_that_are_kept(world: World) -> None:
    flags = (
        "--adapter.method",
        "full",
        "--save.every_steps",
        "1",
        "--save.keep_last",
        "2",
        "--sample.captions",
        "0",
    )
    assert world.train("full", 4, *flags) == 0
    exports = {path.name for path in (world.folder / "full" / "exports").iterdir()}
    assert exports == {"step-000003", "transformer_official"}
    mine = world.folder / "lora" / "exports" / "lora-export-step-000001.safetensors"
    flags = (
        "--save.every_steps",
        "1",
        "--save.keep_last",
        "1",
        "--sample.captions",
        "0",
        "--export.merged",
        "true",
    )
    assert world.train("lora", 1, *flags) == 0
    assert world.run("export", "--run", str(world.folder / "lora")) == 0
    assert world.train("lora", 3, *flags) == 0
    assert {path.name for path in mine.parent.iterdir()} == {
        mine.name, "lora-step-000003.safetensors", "lora.safetensors", "transformer_official",
    }  # fmt: skip


def test_encoders_of_another_model_are_found_before_the_weights_are_read(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.spec = altered(world.spec, presets={"tiny": ToyArch(text_dim=9)})
    save_file(
        {**load_file(world.folder / "toy.safetensors"), "text_in.weight": torch.ones(32, 9)},
        world.folder / "toy.safetensors",
    )
    monkeypatch.setattr("ditkit_core.run.model.load_weights", None)
    assert world.train("run", 1) == 1
    error = capsys.readouterr().err
    assert "do not fit the transformer" in error and "text [" in error and error.count("\n") == 1


def test_auxiliary_models_of_another_transformer_are_refused_while_nothing_is_encoded(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def models(arch: ToyArch, components: ModelPaths) -> list[AuxiliaryModel]:
        raise UserError("the VAE makes 16 latent channels and the model takes 4")

    world.spec = altered(world.spec, models=models)
    assert world.train("run", 1) == 1
    assert "makes 16 latent channels" in capsys.readouterr().err
    assert (world.media.loads, world.text.loads) == (0, 0)


def test_a_signal_ends_with_a_save_and_a_status_that_says_so(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupting(*args: Any) -> Any:
        if not args[0][0].is_meta:  # a step, not the look at an outline
            signal.raise_signal(signal.SIGINT)
        return TOY.training.make_inputs(*args)

    world.spec = altered(world.spec, make_inputs=interrupting)
    assert world.train("run", 3) == 130
    assert "stopped at step 1" in capsys.readouterr().err
    assert (world.folder / "run" / "state" / "step-000001").is_dir()
    world.spec = altered(world.spec, make_inputs=TOY.training.make_inputs)
    assert world.train("run", 3) == 0


def test_weights_changed_in_place_are_noticed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1) == 0
    file = world.folder / "toy.safetensors"
    state = load_file(file)
    state["blocks.0.qkv.weight"] *= 1.5
    save_file(state, file)
    capsys.readouterr()
    assert world.train("run", 2) == 1
    assert "(base weights)" in capsys.readouterr().err


def test_a_part_that_is_missing_is_said_before_anything_is_encoded(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: Any) -> Any:
        raise UserError("model.base holds no scheduler; name another")

    world.spec = altered(world.spec, sampler=missing)
    assert world.train("run", 1) == 1
    assert "no scheduler" in capsys.readouterr().err
    assert (world.media.loads, world.text.loads) == (0, 0)
    assert world.train("run", 1, "--sample.captions", "0") == 0


def test_dropout_is_off_when_the_export_is_verified(world: World) -> None:
    seen = []

    def verify(file: Path, components: Any, model: Any, run: Any) -> str:
        seen.append(model.training)
        return "looked at"

    world.spec = altered(world.spec, verify=verify)
    assert world.train("run", 1) == 0
    assert seen == [False]


@pytest.mark.parametrize("strength", ["nan", "inf", "1e30"])
def test_a_strength_without_meaning_is_refused(
    world: World, capsys: pytest.CaptureFixture[str], strength: str
) -> None:
    assert world.train("run", 1, "--base.merge", f'["some.safetensors@{strength}"]') == 1
    error = capsys.readouterr().err
    assert "strength" in error and error.count("\n") == 1
