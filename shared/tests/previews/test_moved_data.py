"""Previews that wait while the run's data is moved."""

import json
import shutil
from pathlib import Path

import pytest
from preview_runs import pending, samples
from sampling_child import children
from toy_world import World

EVERY = ("--ema.decay", "0.9", "--sample.every_steps", "2", "--log.every_steps", "1")
ELSEWHERE = (*EVERY, "--sample.device", "cpu")


def test_previews_that_are_left_of_a_complete_run_use_its_data_where_it_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their prompts are captions of it. Other data is refused, as where a run goes on."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert world.train("whole", 4, *EVERY) == 0
    run = world.folder / "run"
    with children(world.spec, "is interrupted"):
        assert world.train("run", 4, *ELSEWHERE) == 130
    moved, edited = world.folder / "moved", world.folder / "edited"
    shutil.copytree(world.folder / "clips", edited)
    (edited / "3.txt").write_text("another caption")
    (world.folder / "clips").rename(moved)
    stored = (run / "config.toml").read_text()
    capsys.readouterr()
    with children(world.spec, "fails"):
        assert world.train("run", 4, *ELSEWHERE, "--data.folder", str(edited)) == 0
    said = capsys.readouterr().err
    assert (
        "was trained on something else (1 changed, first '3'" in said
        and "not used, because the run" in said
    )
    assert (run / "config.toml").read_text() == stored and len(pending(run)) == 2
    with children(world.spec, "draws"):
        assert (
            world.train("run", 4, *ELSEWHERE, "--data.folder", str(moved), "--sample.seed", "7")
            == 0
        )
    assert "not used" not in capsys.readouterr().err
    assert samples(run) == samples(world.folder / "whole") and pending(run) == []
    assert (run / "config.toml").read_text() == stored.replace(
        json.dumps(str(world.folder / "clips")), json.dumps(str(moved))
    )
