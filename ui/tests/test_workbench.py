"""What the pages share."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
from worker_here import WorkerHere

from ditkit_ui.begin_page import BeginPage
from ditkit_ui.captions import CaptionEdits
from ditkit_ui.data_page import DataPage
from ditkit_ui.folders import OpenedFolders
from ditkit_ui.job import Job
from ditkit_ui.workbench import Workbench
from ditkit_ui.worker import Worker


def bench_of(folder: Path) -> Workbench:
    opened, undos = OpenedFolders([folder]), list[Callable[[], bool]]()
    return Workbench(
        opened=opened,
        token="",
        worker=Worker(),
        planner=Worker(),
        captions=CaptionEdits(opened, undos),
        undos=undos,
        captioner=Job(folder / "captions"),
        fetcher=Job(folder / "fetched"),
    )


def test_one_edit_after_the_other_is_undone(tmp_path: Path) -> None:
    """Undoing an edit needs the state that undoing the later one leaves."""
    bench = bench_of(tmp_path)
    has_begun, overlaps = threading.Event(), list[bool]()

    def undo_first() -> bool:
        has_begun.set()
        return True

    def undo_second() -> bool:
        overlaps.append(has_begun.wait(0.3))
        return True

    bench.undos += [undo_first, lambda: False, undo_second]

    async def press_twice() -> list[bool]:
        return await asyncio.gather(bench.undo(), bench.undo())

    assert asyncio.run(press_twice()) == [True, True] and overlaps == [False]
    assert not asyncio.run(bench.undo())


def test_a_choice_does_not_wait_for_a_card_that_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that writes the run file of a recipe plans nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    bench, page = bench_of(tmp_path), object.__new__(BeginPage)
    bench.worker = WorkerHere()
    page._bench, page._page, page._filled = bench, MagicMock(is_deleted=True), 0
    page._folder, page._gpu = Mock(value=str(tmp_path / "photos")), Mock(value="24GiB")
    monkeypatch.setattr("ditkit_ui.begin_page.ui", MagicMock())
    bench.planner = Mock(ask=AsyncMock(side_effect=AssertionError("waits for a card")))
    arguments = ["--recipe", "zimage_character_8gb"]
    asyncio.run(page._chosen("zimage", "zimage_character_8gb", arguments))
    assert 'base = "Tongyi-MAI/Z-Image"' in (tmp_path / "photos.toml").read_text()


def test_the_captions_of_all_files_are_not_read_where_other_readers_wait(tmp_path: Path) -> None:
    """Thousands take seconds: in the event loop no page would answer meanwhile."""
    row = {"path": "a.png", "name": "a.png", "caption": "a.txt", "row": None, "reason": ""}
    row |= {"text": "", "excluded": False, "extras": [], "names": ["a.png"], "kind": "image"}
    page, readers = object.__new__(DataPage), list[threading.Thread]()

    async def ask(name: str, **arguments: str) -> dict[str, Any]:
        return {"rows": [row], "notes": [], "stale": None, "folders": ["photos"]}

    def text(file: str) -> str:
        readers.append(threading.current_thread())
        return "a cat"

    page._bench = Mock(worker=Mock(ask=ask), captions=Mock(text=text))
    config = Mock(folders=(), folder="", references="", masks="", controls=())
    page._subject = Mock(**{"file.config.data": config, "file.values.return_value": {}})
    page._count, page._notes, page._findings = Mock(is_deleted=False), MagicMock(), MagicMock()
    page._table, page._only, page._found = Mock(), Mock(value=False), None
    asyncio.run(page._read())
    assert page._rows["a.png"]["text"] == "a cat" and len(readers) == 1
    assert readers[0] is not threading.main_thread()
