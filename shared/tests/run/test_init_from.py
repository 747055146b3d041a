"""A run that starts from another's weights."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from toy_world import World, equal

from ditkit_core.io.files import file_hash
from ditkit_core.io.ranks import Ranks
from ditkit_core.training import checkpoint


class SecondRank(Ranks):
    """One that has what the first has found, and does none of its work."""

    def on_first(self, work: Any, help: Any = None) -> Any:
        return "step-000002"


@pytest.mark.parametrize("first", [True, False])
def test_the_first_rank_alone_compares_the_save_with_its_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Once; all of them load it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    world, read = World(tmp_path), Counter[str]()
    assert world.train("first", 2) == 0

    def counting(path: Path) -> str:
        if "first" in path.parts:
            read[path.name] += 1
        return file_hash(path)

    monkeypatch.setattr(checkpoint, "file_hash", counting)
    if not first:
        monkeypatch.setattr("ditkit_core.run.init_from.current_ranks", SecondRank)
    assert world.train("second", 0, "--init-from", "~/first") == 0
    assert len(read) >= 2 * first and set(read.values()) == ({1} if first else set())
    assert equal(world.adapter("first"), world.adapter("second"))
