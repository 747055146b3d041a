"""Captions by a model: the part of the page Data that plans and starts the caption command."""

from collections.abc import Awaitable, Callable

from nicegui import ui

from ditkit_core.commands.options import CaptionOptions, command_line
from ditkit_core.families.caption_prompts import GOALS
from ditkit_ui import texts
from ditkit_ui.job_view import JobView
from ditkit_ui.workbench import Subject, Workbench, errors_shown


class CaptionSection:
    """The part of the page, of one reader.

    Args:
        on_look: Called while captions are written, and with True after the last.
    """

    def __init__(
        self,
        bench: Workbench,
        subject: Subject,
        page: ui.element,
        on_look: Callable[[bool], Awaitable[None]],
    ):
        self._bench, self._subject, self._page, self._on_look = bench, subject, page, on_look
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

    async def _look_ahead(self) -> None:
        """Say memory, downloads and the number of captions, before anything starts."""
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
                return
            self._view.show([*printed["out"].splitlines(), *printed["err"].splitlines()])
            self._planned = [] if printed["status"] else arguments
            command = command_line(f"{family}-caption", *arguments)
            self._command.text = f"{texts.COMMAND}: {command}"
        self._enable()

    def _begin(self) -> None:
        self._view.start("caption", family=self._subject.family, arguments=self._planned)
        self._start.disable()

    async def _look(self, has_ended: bool) -> None:
        self._enable()
        await self._on_look(has_ended)
