"""The sheet of a run's saves: prompts × saves × strengths, of several runs if wanted, next to the
base; the sample command makes it."""

from pathlib import Path

from nicegui import ui

from ditkit_core.diagnostics.report.server import last_lines
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder
from ditkit_ui import texts
from ditkit_ui.families import family_of
from ditkit_ui.guard import signature
from ditkit_ui.runs import SHEET_OUTPUT, runs_below, saved_steps, sheet_status, start_sheet
from ditkit_ui.workbench import Subject, Workbench, errors_shown, folder_key

_SECONDS = 1.0


class SheetPanel:
    """What is to be on the sheet, and the sheet, of one reader. It is written again with each
    sample."""

    def __init__(self, bench: Workbench, subject: Subject, page: ui.element):
        config = subject.file.config
        self._bench, self._subject, self._page = bench, subject, page
        self._folder = config.run_folder
        self._shown = 0.0
        steps = saved_steps(self._folder)
        ui.label(texts.SHEET).classes("title")
        if not steps:
            ui.label(texts.NO_SAVES).classes("note")
        with ui.element("div").classes("fields"):
            options = {"best": texts.BEST_SAVE} | {str(step): str(step) for step in steps}
            self._steps = ui.select(
                options,
                value=[str(step) for step in steps[-2:]],
                label=texts.SHEET_STEPS,
                multiple=True,
            )
            self._strengths = ui.input(texts.SHEET_STRENGTHS, value="1")
            others = {str(run.path): run.name for run in self._other_runs(bench)}
            self._others = ui.select(others, value=[], label=texts.SHEET_RUNS, multiple=True)
            self._others.set_visibility(bool(others))
        prompts = "\n".join(config.sample.prompts)
        self._prompts = ui.textarea(texts.SHEET_PROMPTS, value=prompts).props("autogrow")
        self._prompts.classes("wide")
        with ui.element("div").classes("titled"):
            self._button = ui.button(texts.SHEET_MAKE, on_click=self._make)
            self._link = ui.link(texts.OWN_PAGE, self._source(), new_tab=True)
        self._lines = ui.label().classes("lines log").props("role=status")
        self._frame = ui.element("iframe").classes("report")
        self._frame.props["title"], self._frame.props["sandbox"] = texts.SHEET, "allow-scripts"
        self._has_saves = bool(steps)
        self._look()
        ui.timer(_SECONDS, self._look)

    def _other_runs(self, bench: Workbench) -> list[RunFolder]:
        """The other runs of this family next to it, that have saves."""
        runs = runs_below([Path.cwd()])
        return [
            run
            for run in runs
            if run.path.resolve() != self._folder.path.resolve()
            and bench.opened.contains(run.path)
            and family_of(run, {}) == self._subject.family
            and saved_steps(run)
        ]

    def _source(self) -> str:
        key = folder_key(self._folder.path)
        return f"/sheet/{key}/{signature(self._bench.token, key)}/"

    def _look(self) -> None:
        """Show what the command says, and the sheet where it was written again."""
        status = sheet_status(self._folder)
        lines = last_lines(self._folder.path / SHEET_OUTPUT, 6) if status != "none" else []
        self._lines.text = "\n".join(lines) or texts.SHEET_MAKING
        self._lines.classes("bad" if status == "failed" else "", remove="bad")
        self._lines.set_visibility(status != "none")
        self._button.set_enabled(self._has_saves and status != "running")
        file = self._folder.sheet_page
        written = file.stat().st_mtime if file.exists() else 0.0
        self._frame.set_visibility(bool(written))
        self._link.set_visibility(bool(written))
        if written != self._shown:
            self._shown = written
            self._frame.props["src"] = f"{self._source()}?{written}"
            self._frame.update()

    def _make(self) -> None:
        with errors_shown(self._page):
            if not self._steps.value:
                raise UserError(texts.SHEET_NO_STEP)
            runs = [str(self._folder.path), *self._others.value]
            prompts = [line.strip() for line in self._prompts.value.splitlines() if line.strip()]
            arguments = [f"--run={run}" for run in runs]
            arguments += [f"--steps={','.join(self._steps.value)}"]
            arguments += [f"--strengths={self._strengths.value.strip() or '1'}"]
            arguments += [f"--prompt={prompt}" for prompt in prompts]
            start_sheet(self._subject.family, self._folder, arguments)
        self._look()
