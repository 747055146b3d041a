"""What the pages share."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from ditkit_ui.captions import CaptionEdits
from ditkit_ui.folders import OpenedFolders
from ditkit_ui.job import Job
from ditkit_ui.workbench import Workbench
from ditkit_ui.worker import Worker


def test_one_edit_after_the_other_is_undone(tmp_path: Path) -> None:
    """Undoing an edit needs the state that undoing the later one leaves."""
    opened, undos = OpenedFolders([tmp_path]), list[Callable[[], bool]]()
    bench = Workbench(
        opened=opened,
        token="",
        worker=Worker(),
        planner=Worker(),
        captions=CaptionEdits(opened, undos),
        undos=undos,
        captioner=Job(tmp_path / "captions"),
        fetcher=Job(tmp_path / "fetched"),
    )
    has_begun, overlaps = threading.Event(), list[bool]()

    def undo_first() -> bool:
        has_begun.set()
        return True

    def undo_second() -> bool:
        overlaps.append(has_begun.wait(0.3))
        return True

    undos += [undo_first, lambda: False, undo_second]

    async def press_twice() -> list[bool]:
        return await asyncio.gather(bench.undo(), bench.undo())

    assert asyncio.run(press_twice()) == [True, True] and overlaps == [False]
    assert not asyncio.run(bench.undo())
