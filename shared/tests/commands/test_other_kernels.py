"""What `train.kernels = auto` is reaches all of a run, and is stated where a continued run has
another implementation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_world import World

from ditkit_core.commands import stage
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading import weights
from ditkit_core.run import checks
from ditkit_core.run.config import RunConfig
from ditkit_core.training.optim import optimizer


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def test_other_kernels_than_before_are_stated_also_where_only_the_machine_changed(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run stores what `train.kernels = auto` was; here as a GPU would have stored it."""
    assert world.train("run", 1, "--sample.captions", "0") == 0
    file = world.folder / "run" / "config.toml"
    stored = file.read_text()
    assert 'kernels = "torch"' in stored
    for continued in (
        ("run", 2, "--sample.captions", "0"),
        ("run", 3, "--run", str(world.folder / "run")),
    ):
        file.write_text(file.read_text().replace('kernels = "torch"', 'kernels = "triton"'))
        capsys.readouterr()
        assert world.train(*continued) == 0
        said = capsys.readouterr().out
        assert said.count("changed since") == 1
        assert 'changed since the last part of this run: train.kernels "triton" -> "torch"' in said
        assert 'kernels = "torch"' in file.read_text()


def test_what_auto_is_on_a_gpu_reaches_blocks_and_updates(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes with torch then."""
    in_blocks, in_updates = set[str](), set[str]()

    def engine(*, kernels: str = "", **settings: Any) -> BlockEngine:
        if not kernels:  # that of a model before its run has one
            return BlockEngine(**settings)
        in_blocks.add(kernels)
        return BlockEngine(kernels=kernels, **settings)

    def on_a_gpu(config: RunConfig, ranks: object) -> RunConfig:
        return replace(config, train=replace(config.train, kernels="triton"))

    monkeypatch.setattr(stage, "with_kernels", on_a_gpu)
    monkeypatch.setattr(checks, "check_kernels", lambda *given: None)
    monkeypatch.setattr(weights, "BlockEngine", engine)
    monkeypatch.setattr(optimizer, "kernels_on", lambda name, x: bool(in_updates.add(name)))
    whole = ("--adapter.method", "full", "--model.dtype", "bf16", "--optim.rounding", "split")
    assert world.train("run", 1, *whole, "--sample.captions", "0") == 0
    assert in_blocks == in_updates == {"triton"}
