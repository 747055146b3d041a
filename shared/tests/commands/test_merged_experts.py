"""`base.merge` and `base.merge_low`: adapters that each of two experts is trained and sampled
with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_world import World, equal
from two_experts import BOUNDARY, EXPERTS, TwoExperts

from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import official_name

NAMES = tuple(expert.name for expert in EXPERTS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoExperts:
    monkeypatch.chdir(tmp_path)
    return TwoExperts(tmp_path)


@pytest.mark.slow
def test_each_expert_has_its_own_merged_files(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a plan and a check, in a run that goes on, and in samples."""
    donor = ("--adapter.targets", '["embed.patch"]', "--export.dtype", "fp32", "--optim.lr", "0.5")
    assert world.train("donor", 1, *donor, "--sample.captions", "0") == 0
    files = [f"donor/exports/donor_{name}.safetensors" for name in NAMES]
    merges = [
        flag
        for key, file in zip(("merge", "merge_low"), files, strict=True)
        for flag in (f"--base.{key}", json.dumps([file]))
    ]
    capsys.readouterr()
    for mode in ("--plan", "--check"):
        assert world.train("both", 2, *merges, mode) == 0, capsys.readouterr()
    capsys.readouterr()
    assert world.train("both", 1, *merges, "--sample.captions", "0") == 0
    said = capsys.readouterr().out
    assert "base.merge: 1 modules of" in said and "base.merge_low: 1 modules of" in said
    assert world.run("train", "--run", "both", "--train.steps", "2") == 0
    for name, flags in zip(NAMES, (merges[:2], merges[2:]), strict=True):
        assert world.train(name, 2, "--experts.train", name, *flags, "--sample.captions", "0") == 0
        assert equal(world.exported("both", name), world.adapter(name))
    world.sampler.steps.clear()
    assert world.run("sample", "--run", "both", "--prompt", "a") == 0
    for _, level, weight, _ in world.sampler.steps:
        index = int(level < BOUNDARY)
        # B [out, rank], A [rank, in]
        up, down = sorted(load_file(files[index]).values(), key=len, reverse=True)
        torch.testing.assert_close(
            weight, world.base[NAMES[index]][official_name("embed.patch.weight")] + up @ down
        )


def test_an_adapter_that_cannot_be_trained_is_to_be_merged_with_the_key_of_its_expert(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"diffusion_model.{official_name('embed.patch')}"
    shape = world.base["low_noise"][f"{official_name('embed.patch')}.weight"].shape
    assert len(shape) == 2
    parts = {"lokr_w1": torch.ones(1, shape[1]), "lokr_w2": torch.ones(shape[0], 1)}
    save_file({f"{key}.{part}": tensor for part, tensor in parts.items()}, "lokr.safetensors")
    low = ("--experts.train", "low_noise", "--sample.captions", "0", "--adapter.dropout", "0")
    assert world.train("run", 1, *low) == 0
    for flags, says in (
        (("--adapter.init", "lokr.safetensors"), "makes its factors; merge it with base.merge_low"),
        (
            ("--adapter.init", "lokr.safetensors", "--plan"),
            "makes its factors; merge it with base.merge_low",
        ),
        (
            ("--adapter.init", "lokr.safetensors", "--adapter.method", "loha"),
            "or merge the file with base.merge_low",
        ),
        (
            ("--adapter.init", "lokr.safetensors", "--adapter.method", "full"),
            "add it to base.merge_low",
        ),
        (("--init-from", "run", "--adapter.rank", "3"), 'build on it with base.merge_low = ["'),
    ):
        capsys.readouterr()
        assert world.train("other", 1, *low, *flags) == 1
        error = capsys.readouterr().err
        assert says in error.splitlines()[-1] and error.count("error: ") == 1


def test_files_for_the_second_of_two_experts_are_refused_where_only_the_weights_say_that_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A demo's weights are written after the first checks, and those of a hub id are fetched after
    them."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    (tmp_path / "demo.toml").write_text("")

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        shutil.copy(tmp_path / "toy.safetensors", folder)

    presets = {"tiny": world.spec.architecture.presets["tiny"]}
    world.spec = altered(world.spec, config=tmp_path / "demo.toml", write=write, presets=presets)
    weights = ("--model.preset", "", "--model.transformer", "run/inputs/toy.safetensors")
    assert world.train("run", 1, "--demo", *weights, "--base.merge_low", '["a.safetensors"]') == 1
    assert "add its files to base.merge" in capsys.readouterr().err
    assert (world.media.loads, world.text.loads) == (0, 0)
