"""A run that starts from another's weights."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from toy_world import World, equal

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.io.files import file_hash
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
        monkeypatch.setattr("ditkit_core.run.restore.current_ranks", SecondRank)
    assert world.train("second", 0, "--init-from", "~/first") == 0
    assert len(read) >= 2 * first and set(read.values()) == ({1} if first else set())
    assert equal(world.adapter("first"), world.adapter("second"))


def test_another_rank_is_answered_with_a_command_that_works_and_refused_before_anything_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert world.train("cats", 1) == 0
    other = ("--adapter.rank", "3")
    assert world.train("cats", 2, *other) == 1
    typed = capsys.readouterr().err.rpartition(" in a new run with ")[2].split()
    assert typed[:2] == ["--run.folder", "NEW"] and typed[2] == "--base.merge"
    assert world.train("new", 1, *other, "--init-from", "cats") == 1
    said = capsys.readouterr()
    assert (
        "[1/5]" in said.out and "[2/5]" not in said.out and "trained an adapter of rank" in said.err
    )
    assert world.train("new", 1, *other, *typed[2:]) == 0
    assert "base.merge: " in capsys.readouterr().out
