"""Compare: the samples of a run side by side over its steps, and the export of a save."""

import asyncio
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from ditkit_core.diagnostics.verification.exported import current_results
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import ListedSample
from ditkit_core.models.adapter_formats import ADAPTER_FORMS
from ditkit_ui import texts
from ditkit_ui.runs import best_step, run_program, samples_by_step, saved_steps
from ditkit_ui.sheet_panel import SheetPanel
from ditkit_ui.workbench import Subject, Workbench, errors_shown, page_frame


class ComparePage:
    """Samples and exports of a run, of one reader."""

    def __init__(self, bench: Workbench, subject: Subject):
        self._subject, self._folder = subject, subject.file.config.run_folder
        self._samples = samples_by_step(self._folder)
        self._best = best_step(self._folder) if self._folder.metrics.exists() else None
        with page_frame("compare", subject) as self._page:
            if any(self._samples.values()):
                self._compare()
            else:
                ui.label(texts.NO_SAMPLES)
            SheetPanel(bench, subject, self._page)
            self._export_panel()

    def _compare(self) -> None:
        """Two samples of one prompt, each with a slider over the steps."""
        steps = [step for step, samples in self._samples.items() if samples]
        prompts = [sample.prompt for sample in self._samples[steps[-1]]]
        self._prompt = ui.select(
            dict(enumerate(prompts)), value=0, label=texts.PROMPT, on_change=self._show
        ).classes("wide")
        self._sides: list[tuple[Any, Any, Any]] = []
        with ui.element("div").classes("pair"):
            for title, first in ((texts.LEFT, 0), (texts.RIGHT, len(steps) - 1)):
                with ui.element("figure"):
                    media = ui.element("div").classes("sample")
                    slider = ui.slider(min=0, max=len(steps) - 1, step=1, value=first)
                    slider.props["aria-label"] = f"{title}: {texts.STEP_OF}"
                    slider.on_value_change(self._show)
                    caption = ui.label().props("role=status")
                self._sides.append((media, slider, caption))
        self._steps = steps
        self._show()

    def _show(self) -> None:
        for media, slider, caption in self._sides:
            step = self._steps[int(slider.value)]
            samples = self._samples[step]
            sample = samples[min(self._prompt.value, len(samples) - 1)]
            words = texts.SAMPLE_AT.format(prompt=sample.prompt, step=step)
            caption.text = f"{words}, {texts.BEST}" if step == self._best else words
            media.clear()
            with media:
                _show_sample(sample)

    def _export_panel(self) -> None:
        ui.label(texts.EXPORT).classes("title")
        saves = saved_steps(self._folder)
        with ui.element("div").classes("fields"):
            options = {"": texts.LATEST, "best": texts.BEST_SAVE} | {str(s): str(s) for s in saves}
            self._step = ui.select(options, value="", label=texts.EXPORT_STEP)
            forms = {"": texts.AS_CONFIGURED} | {form: form for form in ADAPTER_FORMS}
            self._form = ui.select(forms, value="", label=texts.EXPORT_FORM)
            self._button = ui.button(texts.EXPORT, on_click=self._export)
            self._button.set_enabled(bool(saves))
        with ui.element("div").classes("fields"):
            self._push = ui.input(texts.PUSH_TO).props(f'hint="{texts.PUSH_HELP}"')
            self._private = ui.switch(texts.PUSH_PRIVATE, value=True)
            self._upload = ui.button(texts.PUSH, on_click=lambda: self._export(uploads=True))
            self._upload.set_enabled(bool(saves))
        self._lines = ui.label().classes("lines log").props("role=status")
        self._lines.set_visibility(False)
        self._verified = ui.element("ul").classes("files")
        self._show_verified()

    def _show_verified(self) -> None:
        self._verified.clear()
        with self._verified:
            for name, result in sorted(current_results(self._folder).items()):
                with ui.element("li"):
                    kind = ("good", texts.VERIFIED) if result.agrees else ("bad", texts.DIFFERS)
                    ui.label(f"{name}: {kind[1]}").classes(kind[0])
                    ui.label(result.line).classes("note")

    async def _export(self, *, uploads: bool = False) -> None:
        """Export a save, and upload it to the hub if wanted; the command logs in there by itself,
        and its token is not read here."""
        arguments = [f"--run={self._folder.path}"]
        arguments += [f"--step={self._step.value}"] if self._step.value else []
        arguments += [f"--to={self._form.value}"] if self._form.value else []
        buttons = (self._button, self._upload)
        for button in buttons:
            button.disable()
        self._lines.set_visibility(True)
        self._lines.text = texts.EXPORTING
        try:
            with errors_shown(self._page):
                if uploads:
                    if not self._push.value.strip():
                        raise UserError(texts.PUSH_WHERE)
                    arguments.append(f"--push={self._push.value.strip()}")
                    arguments += ["--private"] * self._private.value
                status, lines = await asyncio.to_thread(
                    run_program, self._subject.family, "export", arguments
                )
                if not self._lines.is_deleted:
                    self._lines.text = "\n".join(lines)
                    self._lines.classes("bad" if status else "", remove="bad")
                    self._show_verified()
        finally:
            for button in buttons:
                button.enable()


def _show_sample(sample: ListedSample) -> None:
    source = f"/sample?{urlencode({'path': str(sample.file)})}"
    if sample.file.suffix == ".mp4":
        ui.video(source, autoplay=False, loop=True)
    else:
        image = ui.element("img")
        image.props["src"], image.props["alt"] = source, sample.prompt
