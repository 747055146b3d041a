"""Run: start and continue a run, tell it what to do, and see its page."""

import asyncio

from nicegui import ui

from ditkit_core.commands.launch import num_processes, train_line
from ditkit_core.io.nvidia import num_listed_gpus
from ditkit_core.io.run_requests import ask
from ditkit_ui import texts
from ditkit_ui.runs import (
    RunState,
    last_output,
    run_state,
    start_run,
)
from ditkit_ui.workbench import (
    Subject,
    Workbench,
    errors_shown,
    folder_key,
    page_frame,
    short_path,
    tell,
)

_SECONDS = 1.0


class RunPage:
    """A run, of one reader."""

    def __init__(self, bench: Workbench, subject: Subject):
        self._bench, self._subject = bench, subject
        self._folder = subject.file.config.run_folder
        self._shown = ""
        with page_frame("run", subject) as self._page:
            with ui.element("div").classes("titled"):
                self._state = ui.label().classes("verdict").props("role=status")
                self._start = ui.button(texts.START, on_click=self._begin)
                self._requests = {
                    name: ui.button(title, on_click=lambda _, name=name: self._ask(name)).props(
                        "flat"
                    )
                    for name, title in texts.REQUESTS.items()
                }
            group_size = subject.file.config.ranks.group_size
            self._processes = num_processes(group_size, num_listed_gpus())
            command = train_line(subject.family, short_path(subject.file.path), self._processes)
            ui.label(f"{texts.COMMAND}: {command}").classes("note")
            with ui.element("div").classes("titled") as self._longer:
                steps = subject.file.config.train.steps
                self._steps = ui.number(texts.LONGER, value=2 * steps, min=steps + 1, precision=0)
                ui.button(texts.GO_ON, on_click=self._go_on)
            title = ui.label(texts.LOG).classes("title")
            self._log = ui.label().classes("lines log")
            title.bind_visibility_from(self._log, "visible")
            with ui.element("div").classes("titled"):
                ui.label(texts.REPORT).classes("title")
                report = f"/report/{folder_key(self._folder.path)}/"
                self._link = ui.link(texts.OWN_PAGE, report, new_tab=True)
            self._no_report = ui.label(texts.NO_REPORT).classes("note")
            self._frame = ui.element("iframe").classes("report")
            self._frame.props["title"] = texts.REPORT
            self._source = report
        self._show(run_state(self._folder))
        ui.timer(_SECONDS, self._look)

    async def _look(self) -> None:
        """Show what the run's folder says now."""
        state = await asyncio.to_thread(run_state, self._folder)
        lines = await asyncio.to_thread(last_output, self._folder)
        if self._state.is_deleted:
            return
        self._log.text = "\n".join(lines)
        self._log.set_visibility(bool(lines))
        self._show(state)

    def _show(self, state: RunState) -> None:
        self._state.text = state.text
        kind = {"running": "good", "complete": "good", "killed": "bad", "failed": "bad"}
        self._state.classes(kind.get(state.kind, ""), remove="good bad")
        self._start.text = texts.START if state.kind == "new" else texts.CONTINUE
        steps = self._subject.file.config.train.steps
        is_done = state.kind == "complete" and state.step >= steps
        self._start.set_enabled(not state.is_alive and not is_done)
        if is_done and not self._longer.visible:
            self._steps.value = 2 * steps
        self._longer.set_visibility(is_done and not self._subject.file.config.experts.steps)
        for button in self._requests.values():
            button.set_enabled(state.kind == "running")
        has_report = self._folder.metrics.exists() or any(self._folder.path.glob("*/metrics.jsonl"))
        self._no_report.set_visibility(not has_report)
        self._frame.set_visibility(has_report)
        self._link.set_visibility(has_report)
        # The page of a run that trains loads itself again; after a change of state it is told.
        if has_report and self._shown != state.kind:
            self._frame.props["src"] = f"{self._source}?{state.kind}"
            self._frame.update()
            self._shown = state.kind

    async def _begin(self) -> None:
        with errors_shown(self._page):
            subject = self._subject
            await asyncio.to_thread(
                start_run, subject.family, subject.file.path, self._folder, self._processes
            )
            tell(self._page, texts.STARTED_RUN, type="positive")
        await self._look()

    async def _go_on(self) -> None:
        """Have a complete run train on: more steps in its file, and the same command again."""
        with errors_shown(self._page):
            self._subject.file.set({"train.steps": int(self._steps.value or 0)})
            await self._begin()

    def _ask(self, name: str) -> None:
        with errors_shown(self._page):
            tell(self._page, ask(self._folder, name))
