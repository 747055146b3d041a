"""The demo is the real path on generated inputs: from mp4 files to an adapter that diffusers loads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ditkit_core import cli
from ditkit_wan.spec import WAN

FEW = ("--train.steps", "2", "--held_out.clips", "1", "--sample.captions", "1", "--sample.steps", "2")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's inputs, and a cache that the tests share: written and encoded once."""
    folder = tmp_path_factory.mktemp("demo") / "inputs"
    WAN.write_demo(folder)
    return folder


def train(run: Path, inputs: Path, *flags: str) -> int:
    """The demo with its inputs copied instead of made again."""
    spec = replace(WAN, write_demo=lambda folder: shutil.copytree(inputs, folder, dirs_exist_ok=True))
    cache = ("--encode.cache", str(inputs.parent / "cache"), "--log.tensorboard", "false")
    return cli.run(spec, "train", ["--demo", "--run.folder", str(run), *cache, *FEW, *flags])


def test_the_demo_ends_with_a_verified_adapter_samples_and_metrics(inputs, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["--demo", "--run.folder", str(run), "--encode.cache", str(inputs.parent / "cache"), *FEW]
    assert cli.run(WAN, "train", arguments) == 0
    said = capsys.readouterr().out
    assert "diffusers loads adapter.safetensors and agrees with our model" in said
    assert list((run / "samples").glob("*.mp4")) and list((run / "tensorboard").iterdir())
    tensors = load_file(run / "exports" / "adapter.safetensors")
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in tensors
    assert all(name.startswith("diffusion_model.blocks.") for name in tensors)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[0] == 0
    assert cli.run(WAN, "train", arguments) == 0
    assert "complete at step 2" in capsys.readouterr().out
    assert cli.run(WAN, "train", [*arguments, "--train.steps", "3"]) == 0
    assert (run / "state" / "step-000003").is_dir()


@pytest.mark.parametrize(
    "flags",
    [
        ("--model.dtype", "bf16", "--train.checkpointing", "attn_only", "--adapter.dropout", "0.1"),
        ("--train.checkpointing", "full", "--adapter.method", "full", "--optim.lr", "1e-4", "--export.forms", '["diffusers"]'),
        ("--adapter.use_dora", "true", "--export.forms", '["diffusers"]', "--train.caption_dropout", "0.5"),
        ("--export.forms", '["official", "diffusers"]', "--export.dtype", "fp32", "--adapter.use_rslora", "true"),
        ("--data.frames", "1", "--sample.guidance", "1", "--adapter.targets", '["self"]', "--adapter.alpha", "3"),
    ],
)  # fmt: skip
def test_the_demo_takes_every_lever(inputs, tmp_path, capsys, flags):
    assert train(tmp_path / "run", inputs, *flags) == 0, capsys.readouterr().err
    assert list((tmp_path / "run" / "exports").iterdir())


def test_an_adapter_trained_here_starts_and_merges_into_another_run(inputs, tmp_path, capsys):
    assert train(tmp_path / "first", inputs) == 0
    adapter = tmp_path / "first" / "exports" / "adapter.safetensors"
    assert train(tmp_path / "second", inputs, "--adapter.init", str(adapter), "--train.steps", "0") == 0
    again = load_file(tmp_path / "second" / "exports" / "adapter.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in load_file(adapter).items())
    assert train(tmp_path / "third", inputs, "--base.merge", f'["{adapter.as_posix()}@0.5"]') == 0
    assert "at strength 0.5" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_demo_lowers_the_held_out_loss_by_a_fifth(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.run(WAN, "train", ["--demo", "--run.folder", str(run)]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [record["held_out"] for record in records if "held_out" in record]
    assert held_out[-1] <= 0.8 * held_out[0]
    assert len(list((run / "samples").glob("*.mp4"))) == 2
