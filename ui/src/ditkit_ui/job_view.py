"""What a page shows of long work in the background: its state, its last lines, and a way to stop
it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nicegui import background_tasks, ui

from ditkit_ui import texts
from ditkit_ui.job import Job

_SECONDS = 2.0


class JobView:
    """Elements for a job, below the buttons of its page: one that starts it comes first.

    Args:
        states: A text for each state of a job.
        on_look: Called while it works, and with True once it has ended.
    """

    def __init__(
        self, job: Job, states: Mapping[str, str], on_look: Callable[[bool], Awaitable[None]]
    ):
        self._job, self._states, self._on_look = job, states, on_look
        self._was_running = job.is_running
        with ui.element("div").classes("titled"):
            self._stop = ui.button(texts.STOP, on_click=job.stop).props("flat")
            self._state = ui.label().props("role=status")
        self._lines = ui.label().classes("lines log")
        self._enable()
        self.show([])
        ui.timer(_SECONDS, self._look)

    def start(self, name: str, /, **arguments: Any) -> None:
        """Have the job call a function, if it does not work already."""
        if not self._job.is_running:
            background_tasks.create(self._job.run(name, **arguments))
            self._was_running = True

    def show(self, lines: list[str]) -> None:
        """Show lines."""
        self._lines.text = "\n".join(lines)
        self._lines.set_visibility(bool(lines))

    def _enable(self) -> None:
        self._stop.set_enabled(self._job.is_running)
        self._state.text = self._states[self._job.state]

    async def _look(self) -> None:
        is_running = self._job.is_running
        if is_running or self._was_running:
            self._was_running = is_running
            self.show(await asyncio.to_thread(lambda: self._job.lines))
            self._enable()
            await self._on_look(not is_running)
