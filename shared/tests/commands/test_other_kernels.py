"""A run that is continued where `train.kernels = auto` is another implementation."""

from pathlib import Path

import pytest
from toy_world import World


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
    for continued in (("run", 2, "--sample.captions", "0"), ("run", 3, "--run", str(world.folder / "run"))):
        file.write_text(file.read_text().replace('kernels = "torch"', 'kernels = "triton"'))
        capsys.readouterr()
        assert world.train(*continued) == 0
        said = capsys.readouterr().out
        assert said.count("changed since") == 1
        assert 'changed since the last part of this run: train.kernels "triton" -> "torch"' in said
        assert 'kernels = "torch"' in file.read_text()
