"""Samples in the cache: what a damaged entry costs a run."""

from pathlib import Path

import pytest
import torch
from toy_world import World


def test_damage_in_the_cache_does_not_reach_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert world.train("runs/whole", 2) == 0
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-7] ^= 4
        path.write_bytes(data)
    capsys.readouterr()
    assert world.train("runs/damaged", 2) == 0
    assert "is damaged: it is removed, and encoded again" in capsys.readouterr().err
    whole, after = world.adapter("runs/whole"), world.adapter("runs/damaged")
    assert whole.keys() == after.keys() and all(torch.equal(whole[name], after[name]) for name in whole)
