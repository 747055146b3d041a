"""Commands where the sources are on the path and no distribution of ours is installed, as on a
machine without an index."""

from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest
from toy_world import World


def test_a_run_needs_no_metadata_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Callable[[str], Distribution] = Distribution.from_name

    def of_others(name: str) -> Distribution:
        if name.startswith("ditkit"):
            raise PackageNotFoundError(name)
        return found(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Distribution, "from_name", of_others)
    world = World(tmp_path)
    assert world.train("run", 1, "--save.every_steps", "1") == 0
    assert world.train("run", 2) == 0, "from the save of the first"
