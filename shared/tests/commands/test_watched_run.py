"""The log and the page of a run while it trains."""

from pathlib import Path

import pytest
from toy_world import World

from ditkit_core.diagnostics.report import live_page
from ditkit_core.diagnostics.report.page import write_report


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, captions=0)


def test_a_run_keeps_what_it_prints_also_when_it_continues_or_fails(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    log = world.folder / "run" / "train.log"

    def logged() -> list[str]:
        return [line[27:] for line in log.read_text().splitlines()]

    assert world.train("run", 2) == 0
    said = capsys.readouterr()
    first = logged()
    assert (
        sorted(first) == sorted(said.out.splitlines() + said.err.splitlines())
        and "[4/5] train" in first
    )
    assert world.train("run", 4) == 0
    again = capsys.readouterr()
    assert sorted(logged()) == sorted([*first, *again.out.splitlines(), *again.err.splitlines()])
    before = log.read_text()
    assert world.train("run", 5, "--adapter.rank", "4") == 1
    assert log.read_text() == before, "another run is refused before its folder is locked"
    (world.folder / "clips" / "0.txt").unlink()
    assert world.train("run", 6) == 1
    assert (
        logged()[-1] == capsys.readouterr().err.splitlines()[-1]
        and "0.png has no caption" in logged()[-1]
    )


def test_the_page_is_written_at_steps_without_a_save(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def count(folder: Path) -> Path:
        written.append(len((folder / "metrics.jsonl").read_text().splitlines()))
        return write_report(folder)

    monkeypatch.setattr(live_page, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(live_page, "SHARE", float("inf"))
    monkeypatch.setattr(live_page, "write_report", count)
    assert world.train("run", 5, "--save.every_steps", "0") == 0
    assert written == [1, 2, 3, 4, 5], "with the sentinels of the first step"
