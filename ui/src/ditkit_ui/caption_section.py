"""Captions by a model: the part of the page Data that starts, shows and stops the caption
command."""

import asyncio
from collections.abc import Awaitable, Callable

from nicegui import background_tasks, ui

from ditkit_core.commands.options import CaptionOptions, command_line
from ditkit_core.errors import UserError
from ditkit_core.families.caption_prompts import GOALS
from ditkit_ui import texts
from ditkit_ui.workbench import Subject, Workbench, errors_shown

_SECONDS = 2.0


class CaptionSection:
    """The part of the page."""

    def __init__(
        self,
        bench: Workbench,
        subject: Subject,
        page: ui.element,
        *,
        on_progress: Callable[[], Awaitable[None]],
        on_end: Callable[[], Awaitable[None]],
    ):
        self._bench, self._subject, self._page = bench, subject, page
        self._job = bench.captioner
        self._on_progress, self._on_end = on_progress, on_end
        self._planned: list[str] = []
        self._was_running = False
        with ui.expansion(texts.BY_MODEL, value=self._job.is_running).classes("wide"):
            ui.label(texts.BY_MODEL_ABOUT).classes("note")
            with ui.element("div").classes("fields"):
                self._fields = {
                    "model": ui.input(texts.CAPTIONER, value=CaptionOptions.model),
                    "goal": ui.select(
                        {"": texts.GOAL_BY_DATA} | {goal: goal for goal in GOALS},
                        value="",
                        label=texts.CAPTION_GOAL,
                    ),
                    "trigger": ui.input(texts.TRIGGER, value=subject.file.config.data.trigger),
                    "instruction": ui.input(texts.INSTRUCTION),
                }
            for field in self._fields.values():
                field.on_value_change(self._forget)
            with ui.element("div").classes("titled"):
                self._plan = ui.button(texts.PLAN_CAPTIONS, on_click=self._look_ahead)
                self._start = ui.button(texts.START_CAPTIONS, on_click=self._begin)
                self._stop = ui.button(texts.STOP_CAPTIONS, on_click=self._job.stop).props("flat")
                self._state = ui.label(self._job.state).props("role=status")
            self._command = ui.label().classes("note")
            self._lines = ui.label().classes("lines log")
        self._lines.set_visibility(False)
        self._enable()
        ui.timer(_SECONDS, self._look)

    def _forget(self) -> None:
        """What was planned was for other options."""
        self._planned = []
        self._enable()

    def _enable(self) -> None:
        self._plan.set_enabled(not self._job.is_running)
        self._start.set_enabled(bool(self._planned) and not self._job.is_running)
        self._stop.set_enabled(self._job.is_running)

    async def _look_ahead(self) -> None:
        """Say memory, downloads and the number of captions, before anything starts."""
        options = {name: field.value.strip() for name, field in self._fields.items()}
        arguments = [f"--{name}={value}" for name, value in options.items() if value]
        arguments = [str(self._subject.file.path), *arguments]
        self._plan.disable()
        self._show([texts.PLANNING])
        with errors_shown(self._page):
            printed = await self._bench.worker.ask(
                "command",
                family=self._subject.family,
                name="caption",
                arguments=[*arguments, "--plan"],
            )
            if self._lines.is_deleted:
                return
            self._show([*printed["out"].splitlines(), *printed["err"].splitlines()])
            self._planned = [] if printed["status"] else arguments
            command = command_line(f"{self._subject.family}-caption", *arguments)
            self._command.text = f"{texts.COMMAND}: {command}"
        self._enable()

    def _begin(self) -> None:
        with errors_shown(self._page):
            if self._job.is_running:
                raise UserError(texts.CAPTIONS_RUN)
            background_tasks.create(self._job.run(self._subject.family, self._planned))
            self._was_running = True
            self._start.disable()

    async def _look(self) -> None:
        """Show what the command does now."""
        is_running = self._job.is_running
        if not (is_running or self._was_running):
            return
        self._show(await asyncio.to_thread(lambda: self._job.lines))
        self._state.text = self._job.state
        self._enable()
        await (self._on_progress if is_running else self._on_end)()
        self._was_running = is_running

    def _show(self, lines: list[str]) -> None:
        self._lines.text = "\n".join(lines)
        self._lines.set_visibility(bool(lines))
