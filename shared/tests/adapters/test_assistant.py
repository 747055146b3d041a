"""An assistant next to a DoRA that is trained: whole runs of the toy;
`testing/conformance_peers.py` has the numbers of the families."""

import json
from pathlib import Path

import pytest
import torch
from preview_runs import check_equal
from safetensors.torch import load_file
from torch import nn
from toy_world import World, equal

from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model

LEVERS = {
    "streamed": ("--train.swap_blocks", "2"),
    "recomputed": ("--train.checkpointing", "full"),
    "int8": ("--base.quantize", "int8"),
    "base matched": ("--prior.match_base", "0.5"),
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def donor(world: World) -> str:
    """A LoRA of layers with and without a DoRA in the runs below."""
    flags = (
        "--optim.lr",
        "0.05",
        "--sample.captions",
        "0",
        "--adapter.targets",
        '["qkv", "mlp.0"]',
    )
    assert world.train("donor", 2, *flags) == 0
    return str(world.folder / "donor" / "exports" / "donor.safetensors")


@pytest.mark.slow
def test_a_run_that_goes_on_is_bitwise_that_at_once_and_its_files_are_for_the_bare_base(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read back from either form, the adapter is that of the save; one that is trained over the
    merged assistant is another."""
    file = donor(world)
    flags = (
        "--adapter.use_dora",
        "true",
        "--adapter.targets",
        '["qkv"]',
        "--optim.lr",
        "0.05",
        "--ema.decay",
        "0.5",
        "--save.every_steps",
        "1",
    )
    assert world.train("whole", 2, *flags, "--base.assistant", file, "--plan") == 0
    assert world.train("whole", 2, *flags, "--base.assistant", file) == 0
    assert world.train("parts", 1, *flags, "--base.assistant", file) == 0
    assert world.run("train", "--run", "parts", "--train.steps", "2") == 0
    check_equal(world.folder / "whole", world.folder / "parts")
    capsys.readouterr()
    assert world.run("export", "--run", "whole", "--merge") == 1, (
        "the whole transformer would contain the assistant"
    )
    assert "merge the adapter's file with" in capsys.readouterr().err
    assert world.train("merged", 2, *flags, "--base.merge", json.dumps([file])) == 0
    assert not equal(world.adapter("whole"), world.adapter("merged"))
    exports = world.folder / "whole" / "exports"
    shapes = {
        name: tuple(m.weight.shape)
        for name, m in make_model(TOY, ToyArch()).named_modules()
        if isinstance(m, nn.Linear)
    }
    official, of_peft = (
        open_adapter(exports / f"whole{form}.safetensors", TOY.architecture.names, shapes)
        for form in ("", "_diffusers")
    )
    base = load_file(world.folder / "toy.safetensors")
    (part,) = TOY.architecture.names.from_native["official"]("layers.0.qkv.weight")
    weights = [base[part.name].float().clone() for _ in range(2)]
    for each, weight in zip((official, of_peft), weights, strict=True):
        each.change("layers.0.qkv", weight, 1.0)
    torch.testing.assert_close(*weights, rtol=1e-2, atol=1e-2)  # magnitudes in bf16


def test_next_to_layers_without_a_dora_an_assistant_is_of_any_method(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is merged there, as next to any other adapter, and refused by a plan and a run where a
    DoRA is trained."""
    flags = ("--optim.lr", "0.05", "--sample.captions", "0")
    loha = (
        *flags,
        "--adapter.dropout",
        "0",
        "--adapter.method",
        "loha",
        "--adapter.targets",
        '["mlp.0"]',
    )
    assert world.train("donor", 2, *loha) == 0
    dora = (
        *flags,
        "--adapter.use_dora",
        "true",
        "--base.assistant",
        "donor/exports/donor.safetensors",
    )
    for run, targets, code in (("run", '["qkv"]', 0), ("refused", '["qkv", "mlp.0"]', 1)):
        for mode in (("--plan",), ()):
            assert world.train(run, 1, *dora, "--adapter.targets", targets, *mode) == code, (
                capsys.readouterr()
            )
    error = capsys.readouterr().err
    assert (
        error.count("is a loha (layers.0.mlp.0)") == 2
        and "leave its layers out of adapter.targets" in error
    )
    assert (
        world.train("bare", 1, *dora, "--adapter.targets", '["qkv"]', "--base.assistant", "") == 0
    )
    assert not equal(world.adapter("run"), world.adapter("bare"))


@pytest.mark.slow
@pytest.mark.parametrize("lever", LEVERS)
def test_levers_train_it_as_without_them(world: World, lever: str) -> None:
    """Bitwise, but for a base of other numbers and a loss of other steps, which train another
    adapter."""
    flags = (
        "--adapter.use_dora",
        "true",
        "--adapter.targets",
        '["qkv"]',
        "--base.assistant",
        donor(world),
    )
    flags += ("--optim.lr", "0.05", "--sample.captions", "0", "--adapter.dropout", "0")
    assert world.train("plain", 2, *flags) == 0
    assert world.train("lever", 2, *flags, *LEVERS[lever]) == 0
    plain, other = world.adapter("plain"), world.adapter("lever")
    if lever in ("streamed", "recomputed"):
        assert equal(plain, other)
    else:
        assert plain.keys() == other.keys() and all(
            tensor.isfinite().all() for tensor in other.values()
        )
