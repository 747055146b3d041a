"""Captions by a model: the part of the page Data that plans and starts the caption command."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from nicegui import ui

from ditkit_core.commands.options import CaptionOptions, command_line
from ditkit_core.families.caption_prompts import GOALS
from ditkit_ui import texts
from ditkit_ui.job_view import JobView
from ditkit_ui.workbench import Subject, Workbench, errors_shown


class CaptionSection:
    """The part of the page, of one reader.

    Args:
        files: The files that the command may write.
        on_look: Called while captions are written, and with True after the last.
    """

    def __init__(
        self,
        bench: Workbench,
        subject: Subject,
        page: ui.element,
        files: Callable[[], Collection[str]],
        on_look: Callable[[bool], Awaitable[None]],
    ):
        self._bench, self._subject, self._page = bench, subject, page
        self._files, self._on_look = files, on_look
        self._planned: list[str] = []
        with ui.expansion(texts.BY_MODEL, value=bench.captioner.is_running).classes("wide"):
            ui.label(texts.BY_MODEL_ABOUT).classes("note")
            with ui.element("div").classes("fields"):
                goals = {"": texts.GOAL_BY_DATA} | {goal: goal for goal in GOALS}
                self._fields = {
                    "model": ui.input(texts.CAPTIONER, value=CaptionOptions.model),
                    "goal": ui.select(goals, value="", label=texts.CAPTION_GOAL),
                    "trigger": ui.input(texts.TRIGGER, value=subject.file.config.data.trigger),
                    "instruction": ui.input(texts.INSTRUCTION),
                    "replace": ui.select(texts.REPLACES, value="", label=texts.PRESENT_CAPTIONS),
                }
            for field in self._fields.values():
                field.on_value_change(self._forget)
            with ui.element("div").classes("titled"):
                self._plan = ui.button(texts.PLAN_CAPTIONS, on_click=self._look_ahead)
                self._start = ui.button(texts.START_CAPTIONS, on_click=self._begin)
            self._command = ui.label().classes("note")
            self._view = JobView(bench.captioner, texts.CAPTION_STATES, self._look)
        self._enable()

    def _forget(self) -> None:
        """What was planned was for other options."""
        self._planned = []
        self._enable()

    def _enable(self) -> None:
        is_running = self._bench.captioner.is_running
        self._plan.set_enabled(not is_running)
        self._start.set_enabled(bool(self._planned) and not is_running)

    async def _look_ahead(self) -> list[str]:
        """Say memory, downloads and the number of captions, before anything starts."""
        self._planned, lines = [], list[str]()
        options = {name: field.value.strip() for name, field in self._fields.items()}
        arguments = [f"--{name}={value}" for name, value in options.items() if value]
        arguments = [str(self._subject.file.path), *arguments]
        family = self._subject.family
        self._plan.disable()
        self._view.show([texts.PLANNING])
        with errors_shown(self._page):
            printed = await self._bench.worker.ask(
                "command", family=family, name="caption", arguments=[*arguments, "--plan"]
            )
            if self._start.is_deleted:
                return lines
            lines = [*printed["out"].splitlines(), *printed["err"].splitlines()]
            self._view.show(lines)
            self._planned = arguments * (not printed["status"])
            command = command_line(f"{family}-caption", *arguments)
            self._command.text = f"{texts.COMMAND}: {command}"
        self._enable()
        return lines

    async def _begin(self) -> None:
        self._start.disable()
        if not self._fields["replace"].value or await self._is_confirmed():
            with errors_shown(self._page):
                await asyncio.to_thread(self._bench.captions.watch, self._files())
                self._view.start("caption", family=self._subject.family, arguments=self._planned)
                return
        self._enable()

    async def _is_confirmed(self) -> bool:
        """Plan again, as captions may have been edited since, and ask with what that says."""
        lines = await self._look_ahead()
        if not self._planned:
            return False
        with self._page, ui.dialog() as dialog, ui.card().classes("larger"):
            ui.label(texts.REPLACES_ASK).classes("title")
            ui.label("\n".join(lines)).classes("lines")
            with ui.element("div").classes("titled"):
                ui.button(texts.REPLACES_START, on_click=lambda: dialog.submit(True))
                ui.button(texts.CANCEL, on_click=dialog.close).props("flat autofocus")
        return bool(await dialog)

    async def _look(self, has_ended: bool) -> None:
        self._enable()
        await self._on_look(has_ended)
