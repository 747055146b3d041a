"""The page is written while a run trains, seldom enough, and never the reason that a run ends."""

from pathlib import Path

import pytest
from made_runs import write_run

from ditkit_core.diagnostics.report import live_page
from ditkit_core.diagnostics.report.live_page import EVERY_SECONDS, SHARE, LivePage
from ditkit_core.errors import UserError


class Clock:
    """A clock that the test sets, and on which a page takes some seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: float):
        self.now, self.takes, self.written = 1000.0, takes, list[Path]()
        monkeypatch.setattr(live_page.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(live_page, "write_report", self.write)

    def write(self, folder: Path) -> Path:
        self.now += self.takes
        self.written.append(folder)
        return folder

    def train(self, page: LivePage, seconds: float) -> None:
        """Steps of a second each."""
        for step in range(round(seconds)):
            self.now += 1
            page.after_step(step, {})


@pytest.mark.parametrize(("takes", "pages"), [(0.01, 59), (5.0, 8)])
def test_a_page_is_written_each_minute_and_takes_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, takes: float, pages: int
) -> None:
    clock = Clock(monkeypatch, takes)
    page = LivePage([Path("run")])
    clock.train(page, EVERY_SECONDS - 1)
    assert clock.written == []
    clock.train(page, 3600 - EVERY_SECONDS)
    assert len(clock.written) == pages
    assert len(clock.written) * takes <= (clock.now - 1000) * SHARE + takes


def test_an_expert_has_its_page_and_the_page_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.1)
    clock.train(LivePage([Path("run/high_noise"), Path("run")]), EVERY_SECONDS)
    assert clock.written == [Path("run/high_noise"), Path("run")]
    alone = Clock(monkeypatch, 0.1)
    alone.train(LivePage([Path("run"), Path("run")]), EVERY_SECONDS)
    assert alone.written == [Path("run")]


def test_a_page_that_cannot_be_written_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch, 0.1)

    def refuse(folder: Path) -> Path:
        raise UserError("run/report.html cannot be written (No space left on device)")

    monkeypatch.setattr(live_page, "write_report", refuse)
    clock.train(LivePage([Path("run")]), 5 * EVERY_SECONDS)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_the_page_has_the_steps_between_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "EVERY_SECONDS", 0.0)
    run = write_run(tmp_path / "run")
    LivePage([run]).after_step(40, {})
    before = (run / "report.html").read_text()
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 41, "loss": 0.125}\n')
    page = LivePage([run])
    page.after_step(41, {})
    assert (run / "report.html").read_text() != before and "0.125" in (
        run / "report.html"
    ).read_text()
    assert not list(run.glob(".*.tmp"))
