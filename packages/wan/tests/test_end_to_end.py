"""The demo is the real path on generated inputs: from mp4 files to an adapter that diffusers loads."""

import pytest
import torch
from safetensors.torch import load_file

from ditkit_core.testing.demo import LEVERS, Demo, check_loss
from ditkit_wan.spec import WAN


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo.write(WAN, tmp_path_factory.mktemp("demo"))


def test_the_demo_ends_with_a_verified_adapter_samples_and_metrics(demo, tmp_path, capsys):
    tensors = demo.check_run(tmp_path / "run", lambda: capsys.readouterr().out, samples="*.mp4")
    assert "diffusion_model.blocks.0.self_attn.q.lora_A.weight" in tensors
    assert all(name.startswith("diffusion_model.blocks.") for name in tensors)


@pytest.mark.parametrize(
    "flags",
    [
        *LEVERS[1::2],
        *(pytest.param(flags, marks=pytest.mark.exhaustive) for flags in LEVERS[0::2]),  # daily in the other family
        ("--data.frames", "1", "--sample.guidance", "1", "--adapter.targets", '["self"]', "--adapter.alpha", "3"),
    ],
)  # fmt: skip
def test_the_demo_takes_every_lever(demo, tmp_path, capsys, flags):
    assert demo.train(tmp_path / "run", *flags) == 0, capsys.readouterr().err
    assert list((tmp_path / "run" / "exports").iterdir())


def test_an_adapter_trained_here_starts_and_merges_into_another_run(demo, tmp_path, capsys):
    assert demo.train(tmp_path / "first") == 0
    adapter = tmp_path / "first" / "exports" / "adapter.safetensors"
    assert demo.train(tmp_path / "second", "--adapter.init", str(adapter), "--train.steps", "0") == 0
    again = load_file(tmp_path / "second" / "exports" / "adapter.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in load_file(adapter).items())
    assert demo.train(tmp_path / "third", "--base.merge", f'["{adapter.as_posix()}@0.5"]') == 0
    assert "at strength 0.5" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_demo_lowers_the_held_out_loss_by_a_fifth(tmp_path):
    check_loss(WAN, tmp_path)
    assert len(list((tmp_path / "samples").glob("*.mp4"))) == 2
