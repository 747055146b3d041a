"""A run that trains a LoKr or LoHa: continued, exported, sampled with, started from, checked and
planned."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from toy_world import World, equal


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


@pytest.mark.parametrize("method", ["lokr", "loha"])
def test_a_run_goes_from_files_to_a_file_and_on_from_there(
    world: World, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    flags = (
        "--adapter.method",
        method,
        "--adapter.dropout",
        "0",
        "--ema.decay",
        "0.9",
        "--optim.lr",
        "1e-2",
    )
    flags += ("--adapter.targets", '["qkv", "out"]', "--held_out.clips", "1")
    assert world.train("whole", 4, *flags) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    name = {"lokr": "LoKr", "loha": "LoHa"}[method]
    assert f"train a {name} of rank 2" in said and list(
        (world.folder / "whole" / "samples").glob("*.png")
    )
    assert world.train("parts", 2, *flags) == 0 and world.train("parts", 4, *flags) == 0
    whole, parts = world.adapter("whole"), world.adapter("parts")
    assert equal(whole, parts)
    start = {"lokr": ".lokr_w1", "loha": ".hada_w2_b"}[method]
    assert any(key.endswith(start) and tensor.any() for key, tensor in whole.items())
    assert f"{name}, rank 2" in (world.folder / "whole" / "report.html").read_text()
    on = ("--init-from", str(world.folder / "whole"))
    assert world.train("other", 0, *flags, *on) == 0 and equal(world.adapter("other"), whole)
    file = world.folder / "whole" / "exports" / "whole.safetensors"
    begun = ("--adapter.init", str(file), "--adapter.dropout", "0", "--train.steps", "0")
    assert world.run("train", "--run.folder", str(world.folder / "begun"), *begun) == 0, (
        capsys.readouterr().err
    )
    assert equal(world.adapter("begun"), whole)
    assert (
        world.run("sample", "--adapter", str(file), "--adapter.dropout", "0", "--prompt", "a cat")
        == 0
    )
    capsys.readouterr()
    assert world.train("parts", 6, *flags, "--adapter.method", "lora") == 1
    assert "adapter.method" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--adapter.method", "lokr"), "are for adapter.method = lora, and this one is lokr"),
        (("--adapter.method", "loha", "--adapter.dropout", "0", "--optim.loraplus_lr_ratio", "4"), "adapter.method = loha has none"),
        (("--adapter.method", "lokr", "--adapter.dropout", "0", "--export.forms", '["diffusers"]'), "for more or less than one layer"),
    ],
)  # fmt: skip
def test_what_a_lokr_or_loha_does_not_have_is_refused_before_anything_is_encoded(
    world: World, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    assert world.train("run", 2, *flags) in (1, 2)
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert (world.media.loads, world.text.loads) == (0, 0)


@pytest.mark.parametrize("method", ["lokr", "loha"])
def test_the_merged_export_of_a_run_is_a_base(
    world: World, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--adapter.method",
        method,
        "--adapter.dropout",
        "0",
        "--optim.lr",
        "1e-2",
        "--export.merged",
        "true",
    )
    assert world.train("run", 2, *flags) == 0, capsys.readouterr().err
    (folder,) = (world.folder / "run" / "exports").glob("transformer_*")
    before = load_file(world.folder / "toy.safetensors")
    after = load_file(next(folder.glob("*.safetensors")))
    assert after.keys() == before.keys()
    assert any((after[name].float() - before[name].float()).norm() > 0 for name in before)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--adapter.rank", "10000", "--adapter.alpha", "1"), "adapter.alpha: 2 of 2 LoKrs .* scales them by 0.0001; .* leave adapter.alpha out"),
        (("--adapter.rank", "6", "--adapter.alpha", "3"), "adapter.alpha: 2 of 2 LoKrs have whole factors, .* by 0.5;"),
        (("--adapter.rank", "2", "--adapter.rank_pattern", '["0.qkv=6"]', "--adapter.alpha", "3"), "1 of 2 LoKrs .* by 0.5;"),
        (("--adapter.rank", "6", "--adapter.alpha", "0", "--adapter.alpha_pattern", '["0.qkv=3", "1.qkv=12"]'), "adapter.alpha_pattern: 2 of 2 LoKrs .* by 0.5 to 2;"),
        (("--adapter.rank", "10000", "--adapter.alpha", "0"), ""),
        (("--adapter.rank", "5", "--adapter.alpha", "0.01"), ""),
        (("--adapter.rank", "6", "--adapter.alpha", "3", "--adapter.method", "loha"), ""),
    ],
)  # fmt: skip
def test_an_alpha_that_scales_a_lokr_of_whole_factors_is_said(
    world: World, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    """The second factor of the layer has a side of 12. LyCORIS ignores alpha where it is whole, and
    we do not."""
    flags = (
        "--adapter.method",
        "lokr",
        "--adapter.dropout",
        "0",
        "--adapter.targets",
        '["qkv"]',
        *flags,
    )
    assert world.train("run", 0, *flags) == 0
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert re.search(says, said) if says else "LyCORIS" not in said
