"""`base.merge` and `base.merge_low`: adapters that each of two experts is trained and sampled with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_world import equal
from two_experts import BOUNDARY, EXPERTS, TwoExperts

from ditkit_core.testing.toy import official_name

NAMES = tuple(expert.name for expert in EXPERTS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoExperts:
    monkeypatch.chdir(tmp_path)
    return TwoExperts(tmp_path)


@pytest.mark.slow
def test_each_expert_has_its_own_merged_files(world: TwoExperts, capsys: pytest.CaptureFixture[str]) -> None:
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
        up, down = sorted(load_file(files[index]).values(), key=len, reverse=True)  # B [out, rank], A [rank, in]
        torch.testing.assert_close(weight, world.base[NAMES[index]][official_name("embed.patch.weight")] + up @ down)
