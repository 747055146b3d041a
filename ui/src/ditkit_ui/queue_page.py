"""Queue: the runs of this machine in the order in which they are trained, and their workers."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nicegui import ui

from ditkit_core.commands.queue import progress_of
from ditkit_core.diagnostics.report.server import last_lines
from ditkit_core.errors import UserError
from ditkit_core.io.run_queue import RunQueue
from ditkit_ui import texts
from ditkit_ui.families import installed_families
from ditkit_ui.runs import leave_to_queue, run_program
from ditkit_ui.workbench import Subject, Workbench, errors_shown, page_frame, tell

_SECONDS = 1.0
_LOG_LINES = 8


class QueueRow(NamedTuple):
    """A run in the queue, as the page shows it."""

    run: str
    state: str
    error: str
    log: tuple[str, ...]
    """The last lines of a run that failed."""
    position: int
    """Among those that wait, from 1; 0 if it does not wait."""


class QueuePage:
    """The queue, of one reader."""

    def __init__(self, bench: Workbench, subject: Subject | None):
        self._subject, self._queue = subject, RunQueue.of_machine()
        self._rows: list[QueueRow] | None = None
        self._progress: dict[str, ui.label] = {}
        with page_frame("queue", subject) as self._page:
            self._workers = ui.label().classes("verdict").props("role=status")
            with ui.element("div").classes("titled"):
                if subject:
                    ui.button(
                        texts.QUEUE_ADD.format(file=subject.file.path.name), on_click=self._add
                    )
                self._gpu = ui.input(texts.QUEUE_GPU, value="0").props("dense")
                ui.button(texts.QUEUE_START, on_click=self._start).props("flat")
                self._ends = [
                    ui.button(words, on_click=partial(self._end, request)).props("flat")
                    for request, words in texts.QUEUE_END.items()
                ]
                ui.button(texts.QUEUE_CLEAR, on_click=self._clear).props("flat")
            self._list = ui.element("ol").classes("queue")
            ui.label(texts.QUEUE_ABOUT).classes("note")
        self._look()
        ui.timer(_SECONDS, self._look)

    def _look(self) -> None:
        """Show what the queue's files say now; the list is written again only where it changed, so
        that it keeps the focus of a keyboard."""
        with errors_shown(self._page):
            rows, progress = self._read()
            workers = self._queue.workers()
            waits = any(row.position for row in rows)
            none = texts.QUEUE_NO_WORKER if waits else texts.QUEUE_IDLE
            names = ", ".join(workers)
            self._workers.text = texts.QUEUE_WORKERS.format(gpus=names) if workers else none
            for button in self._ends:
                button.set_enabled(bool(workers))
            if rows != self._rows:
                self._rows = rows
                self._show(rows)
            for run, words in progress.items():
                self._progress[run].text = words

    def _read(self) -> tuple[list[QueueRow], dict[str, str]]:
        """The runs, and of each what changes with every step."""
        rows, progress, waiting = list[QueueRow](), dict[str, str](), 0
        for run in self._queue.runs():
            state = self._queue.state_of(run)
            waiting += state == "waiting"
            log = Path(run.log)
            is_shown = state == "failed" and log.parent == self._queue.folder / "logs"
            lines = tuple(last_lines(log, _LOG_LINES)) if is_shown else ()
            rows.append(QueueRow(run.run, state, run.error, lines, waiting * (state == "waiting")))
            steps, left = progress_of(run, state)
            words = texts.QUEUE_STEPS.format(steps=steps)
            progress[run.run] = f"{words}, {texts.QUEUE_LEFT.format(left=left)}" if left else words
        return rows, progress

    def _show(self, rows: list[QueueRow]) -> None:
        self._list.clear()
        self._progress = {}
        with self._list:
            if not rows:
                ui.label(texts.QUEUE_EMPTY)
            for row in rows:
                with ui.element("li"):
                    self._show_row(row, is_last=row.position == max(r.position for r in rows))

    def _show_row(self, row: QueueRow, *, is_last: bool) -> None:
        name = Path(row.run).name
        kind = {"running": "good", "complete": "good", "failed": "bad"}.get(row.state, "")
        with ui.element("div").classes("titled"):
            ui.label(name).classes("name").tooltip(row.run)
            ui.label(texts.QUEUE_STATES[row.state]).classes(kind)
            self._progress[row.run] = ui.label().classes("note")
            if row.position:
                moves = ((-1, row.position > 1), (1, not is_last))
                for by, can in moves:
                    self._button(
                        texts.QUEUE_MOVES[by],
                        name,
                        partial(self._queue.move, row.run, row.position + by),
                    ).set_enabled(can)
            if row.state != "running":
                self._button(texts.QUEUE_REMOVE, name, lambda: self._queue.remove(row.run))
        if row.error:
            ui.label(row.error).classes("bad" if row.state == "failed" else "note")
        if row.log:
            ui.label("\n".join(row.log)).classes("lines log")

    def _button(self, words: str, name: str, change: Callable[[], object]) -> ui.button:
        """A button that changes the queue."""

        def press() -> None:
            with errors_shown(self._page):
                change()
            self._look()

        button = ui.button(words, on_click=press).props("flat dense")
        button.props["aria-label"] = f"{words}: {name}"  # a text of props would be read: quotes
        return button

    async def _add(self) -> None:
        """Add the run as the command does, which checks it first."""
        assert self._subject is not None
        file = self._subject.file
        if await self._call(self._subject.family, [str(file.path), "--queue=add"]):
            leave_to_queue(file.config.run_folder)

    async def _start(self) -> None:
        arguments = ["--queue=start", "--detach", f"--worker={self._gpu.value.strip() or '0'}"]
        await self._call(next(iter(installed_families())), arguments)

    async def _call(self, family: str, arguments: list[str]) -> bool:
        """Call the train command, and say what it printed; whether it did what it was asked."""
        status = 1
        with errors_shown(self._page):
            status, lines = await asyncio.to_thread(run_program, family, "train", arguments)
            if status:
                raise UserError(lines[-1].removeprefix("error: "))
            tell(self._page, "\n".join(lines), type="positive")
        if not self._page.is_deleted:
            self._look()
        return not status

    def _end(self, request: str) -> None:
        with errors_shown(self._page):
            workers = self._queue.ask_workers(request)
            tell(self._page, texts.QUEUE_ENDS[request] if workers else texts.QUEUE_IDLE)

    def _clear(self) -> None:
        with errors_shown(self._page):
            self._queue.remove_complete()
        self._look()
