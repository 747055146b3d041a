"""Exports are verified at every save, however the model that trains is divided, and the run is the
same run."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from toy_world import World, equal

from ditkit_core.adapters.diffusers_model import compare_with_pipeline, share_base
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.files.start import initial_adapter
from ditkit_core.diagnostics.report.data import read_sections
from ditkit_core.diagnostics.verification.exported import Exported, Result, unverified
from ditkit_core.diagnostics.verification.verifier import Verifier
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import build_on_meta
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.nn.weight_at_use import weights_at_use
from ditkit_core.testing.pretend_devices import PretendDevices
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyInputs, toy_items

NAMES = StateDictNames.renaming(
    to_native=lambda name: name, from_native={"diffusers": lambda name: name}
)
FOUR = (
    "--save.every_steps",
    "2",
    "--save.keep_last",
    "9",
    "--sample.captions",
    "0",
    "--export.dtype",
    "fp32",
)


class StandIn:
    """Loads an adapter file into a toy that shares our base, as diffusers does; the model that it
    compares with is looked at."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.whole_matrices: set[str] = set()

    def __call__(self, file: Path, components: Any, model: Any, engine: Any) -> str:
        self.seen.append(file.name)
        assert not model.training
        torch.randn(3)  # a comparison may use up random numbers of the process
        at_use = weights_at_use(model)
        self.whole_matrices |= {
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and "lora_" not in name
            and id(module) not in map(id, at_use.values())
        }
        self.transformer = build_on_meta(
            TOY, TOY.architecture.presets["tiny"], Precision(matmul=torch.float32)
        )
        share_base(self.transformer, model, NAMES, "diffusers", lambda name: torch.float32)
        (item,) = toy_items(1)
        inputs = ToyInputs([item["latents"]], torch.tensor([0.5]), [item["text"]])
        return compare_with_pipeline(
            file, components, model, NAMES, pipeline=self, ours=lambda: engine(model, inputs)[0],
            theirs=lambda: self.transformer.eval()(inputs)[0],
        )  # fmt: skip

    def load_lora_weights(self, path: str, **options: Any) -> None:
        from ditkit_core.adapters.config import AdapterConfig
        from ditkit_core.adapters.inject import initialise, inject

        shapes = {
            n: (m.out_features, m.in_features)
            for n, m in self.transformer.named_modules()
            if _is_linear(m)
        }
        file = open_adapter(Path(path), TOY.architecture.names, shapes)
        kinds = {name for name in file.modules}
        dora = any("magnitude" in key or "dora" in key for key in file.source.tensors)
        inject(self.transformer, AdapterConfig(rank=2, targets=tuple(kinds), use_dora=dora), {})
        initialise(
            self.transformer,
            0,
            device_of=lambda name: torch.device("cpu"),
            start=initial_adapter(file, file.modules),
        )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # takes long, and nothing here is large
    world = World(tmp_path)
    world.spec = altered(world.spec, verify=StandIn())
    return world


def verify_of(world: World) -> Any:
    return world.spec.adapters.verify


def test_every_kept_save_is_verified_once_and_the_run_is_the_same_run_as_without(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """The finished file is that of the last."""
    plain = World(world.folder)
    flags = (*FOUR, "--held_out.clips", "1", "--ema.decay", "0.9")
    assert plain.train("plain", 5, *flags) == 0
    capsys.readouterr()
    assert world.train("run", 5, *flags) == 0
    said = capsys.readouterr().out
    steps = [f"run-step-00000{step}.safetensors" for step in (2, 4, 5)]
    assert verify_of(world).seen == steps
    for name in [*steps, "run.safetensors"]:
        assert said.count(f"verified: diffusers loads {name} and agrees with our model to ") == 1
    results = json.loads((world.folder / "run" / "verified.json").read_text())
    assert results.keys() == {*steps, "run.safetensors"} and all(
        each["agrees"] for each in results.values()
    )
    assert "4 of 4 verified" in (world.folder / "run" / "report.html").read_text()
    assert verify_of(world).whole_matrices == set(), "every matrix of the base is read at its use"
    for step in (4, 5):
        states = [
            load_file(world.folder / run / "state" / f"step-00000{step}" / "trainable.safetensors")
            for run in ("plain", "run")
        ]
        assert equal(*states)
    assert equal(plain.adapter("plain"), world.adapter("run"))


WAYS = {
    "streamed schedule-free": (
        "--train.swap_blocks", "[2]", "--train.checkpointing", "full",
        "--optim.name", "schedulefree_adamw",
    ),
    "int8 average merged too": (
        "--base.quantize", "int8", "--ema.decay", "0.5", "--export.merged", "true",
    ),
    "nf4 dora": (
        "--base.quantize",
        "nf4",
        "--adapter.use_dora",
        "true",
        "--export.forms",
        '["diffusers"]',
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_adapter_is_compared_however_the_run_trains(
    world: World, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    assert world.train("run", 2, *FOUR, "--optim.lr", "0.05", *WAYS[way]) == 0
    form = "_diffusers" * ("dora" in way)
    assert (
        f"verified: diffusers loads run{form}.safetensors and agrees with our model"
        in capsys.readouterr().out
    )


def test_a_model_that_is_split_over_devices_is_verified(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with PretendDevices():
        devices = ("--train.devices", '["cpu", "cpu:1"]', "--train.swap_blocks", "[1]")
        assert world.train("run", 2, *FOUR, "--optim.lr", "0.05", *devices) == 0
    assert (
        "verified: diffusers loads run.safetensors and agrees with our model"
        in capsys.readouterr().out
    )


def refusing(names: tuple[str, ...]) -> Any:
    def verify(file: Path, *_: Any) -> str:
        if file.name in names:
            raise UserError(f"{file}: diffusers' output differs; export it again")
        return f"diffusers loads {file.name}"

    return verify


def test_a_mistake_in_the_comparison_or_a_wrong_save_is_one_line_and_training_goes_on(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = refusing(("run-step-000004.safetensors",))

    def verify(file: Path, *_: Any) -> str:
        if file.name == "run-step-000002.safetensors":
            raise KeyError("a name that a library does not have")
        return str(refused(file))

    world.spec = altered(world.spec, verify=verify)
    assert world.train("run", 6, *FOUR) == 0
    out, err = capsys.readouterr()
    assert (
        "comparing it with diffusers failed (KeyError: 'a name that a library does not have')"
        in err
    )
    assert "not verified: run-step-000002.safetensors: " in err
    (line,) = [line for line in err.splitlines() if "differs" in line]
    assert "run-step-000004.safetensors: diffusers' output differs; export it again" in line
    assert (
        "verified: diffusers loads run-step-000006" in out
        and "verified: diffusers loads run.safetensors" in out
    )


def test_what_a_killed_run_left_unverified_is_verified_when_it_continues_unless_its_save_is_gone(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing could verify that, so that a run that waits for all exports would never end."""
    assert world.train("run", 2, *FOUR) == 0
    (world.folder / "run" / "verified.json").unlink()
    (world.folder / "run" / "exports" / "run.safetensors").unlink()
    assert world.train("run", 4, *FOUR) == 0
    assert verify_of(world).seen == [f"run-step-00000{step}.safetensors" for step in (2, 2, 4)]
    capsys.readouterr()
    assert world.train("run", 4, *FOUR) == 0, "a run that is complete"
    assert len(verify_of(world).seen) == 3
    folder = RunFolder(world.folder / "run")
    folder.verified.unlink()
    assert {each.step for each in unverified(folder)} == {2, 4}
    shutil.rmtree(folder.save(2))
    assert {each.step for each in unverified(folder)} == {4}
    (empty := folder.exports / "transformer_official").mkdir()
    assert Result.of(Exported(folder=folder, path=empty, form="official", step=4)).num_bytes == 0, (
        "a folder that is being removed"
    )


def test_a_finished_adapter_that_is_wrong_ends_the_run_as_long_as_it_is_there_unchanged(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one line; so do results count for the run, and on its page."""
    world.spec = altered(
        world.spec, verify=refusing(("run-step-000002.safetensors", "run.safetensors"))
    )
    assert world.train("run", 2, *FOUR) == 1
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "run.safetensors: diffusers' output" in line
    ]
    assert len(lines) == 1 and lines[0].startswith("error: ")
    folder = RunFolder(world.folder / "run")
    run: Any = None  # nothing is compared
    with pytest.raises(UserError, match="export it again"):
        Verifier(run, folder, apart=False).wait()
    (of_save,) = (
        section.verified.keys() - {"run.safetensors"} for section in read_sections(folder.path)
    )
    (folder.exports / "run.safetensors").unlink()
    capsys.readouterr()
    verifier = Verifier(run, folder, apart=False)
    verifier.wait()
    verifier._give_up("it crashed when it was done")
    assert not capsys.readouterr().err
    assert [section.verified for section in read_sections(folder.path)] == [
        dict.fromkeys(of_save, False)
    ]
    os.utime(folder.exports / "run-step-000002.safetensors")
    assert of_save and [section.verified for section in read_sections(folder.path)] == [{}]


def test_exports_of_removed_saves_are_forgotten_and_one_that_is_open_elsewhere_stays_for_a_save(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def on_windows(path: Path, **options: bool) -> None:
        if (
            path.name == "run-step-000001.safetensors"
            and (path.parents[1] / "state" / "step-000003").exists() is False
        ):
            raise PermissionError(13, "it is open", str(path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", on_windows)
    assert (
        world.train(
            "run", 3, "--save.every_steps", "1", "--save.keep_last", "1", "--sample.captions", "0"
        )
        == 0
    )
    assert not list((world.folder / "run" / "exports").glob("run-step-000001*"))
    results = json.loads((world.folder / "run" / "verified.json").read_text())
    assert results.keys() == {"run-step-000003.safetensors", "run.safetensors"}


def test_a_base_that_cannot_be_read_any_more_is_a_warning(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise UserError("there is no toy.safetensors; check the path")

    monkeypatch.setattr("ditkit_core.diagnostics.verification.verify.read_at_use", gone)
    assert world.train("run", 2, *FOUR) == 0
    (line,) = [
        line
        for line in capsys.readouterr().err.splitlines()
        if "not verified" in line and "run.saf" in line
    ]
    assert "there is no toy.safetensors; check the path" in line
