"""Settings: a form made of the schema, the run file next to it, and the plan after each change."""

import asyncio
import html
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nicegui import ui

from ditkit_core.config.sizes import GIB
from ditkit_core.diagnostics.report.words import format_duration
from ditkit_core.errors import UserError
from ditkit_core.io.files import read_text
from ditkit_core.run.config import KEYS_THAT_MATTER
from ditkit_ui import texts
from ditkit_ui.families import installed_families
from ditkit_ui.fetch_dialog import FetchDialog
from ditkit_ui.run_file import changed_values, checked, schema, text_of, value_of
from ditkit_ui.workbench import Subject, Workbench, address, errors_shown, page_frame, tell

_PAUSE_SECONDS = 0.4
"""Who types on is not done."""
_MOST_FOUND = 24


class SettingsPage:
    """The form, the run file and its plan, of one reader."""

    def __init__(self, bench: Workbench, subject: Subject):
        self._bench, self._subject, self._file = bench, subject, subject.file
        presets = installed_families()[subject.family].presets
        self._schema = schema(presets)
        self._fields: dict[str, ui.element] = {}
        self._number = 0
        """Counts changes: plans of earlier ones are not begun."""
        with page_frame("settings", subject) as self._page, ui.element("div").classes("columns"):
            with ui.element("section").classes("form"):
                names = {name: f"{name}-train" for name in installed_families()}
                family = ui.select(names, value=subject.family, label=texts.FAMILY_OF)
                family.on_value_change(lambda event: self._read_by(event.value))
                ui.button(texts.FILES, on_click=self._model_files).props("flat")
                search = ui.input(texts.SEARCH_KEYS.format(count=len(self._schema)))
                search.props("clearable debounce=250 type=search")
                search.on_value_change(lambda event: self._show_form(event.value or ""))
                self._form = ui.element("div")
            with ui.element("section").classes("side"):
                self._plan_panel()
                self._text_panel()
        self._show_form("")
        ui.timer(0, self._plan, once=True)

    def _read_by(self, family: str) -> None:
        """Have the file read by the commands of another family."""
        ui.navigate.to(address("settings", {"file": str(self._file.path), "family": family}))

    def _model_files(self) -> None:
        """What of the model is missing here, and what ComfyUI has of it."""

        async def use(files: Mapping[str, str]) -> None:
            await self._changed(lambda: self._file.set(files))
            self._refresh_fields()

        of = {"file": str(self._file.path)}
        FetchDialog(self._bench, self._page, self._subject.family, of, use)

    def _show_form(self, words: str) -> None:
        """The keys that matter, or those that have the words."""
        self._form.clear()
        self._fields = {}
        groups: Mapping[str, Any] = KEYS_THAT_MATTER["train"]
        if words.strip():
            wanted = words.lower().split()
            matches = [
                key
                for key, described in self._schema.items()
                if all(word in f"{key} {described['description']}".lower() for word in wanted)
            ]
            matches.sort(key=lambda key: not all(word in key for word in wanted))
            groups = {"": matches[:_MOST_FOUND]}
        with self._form:
            if not any(groups.values()):
                ui.label(texts.NO_KEY)
            for title, keys in groups.items():
                if title:
                    ui.label(title).classes("title")
                for key in keys:
                    self._fields[key] = self._field(key)

    def _field(self, key: str) -> ui.element:
        """The input of a key, with its help."""
        described = self._schema[key]
        default = described.get("default")
        accepted = _choices(described)
        with ui.element("div").classes("field"):
            value = text_of(self._file.values().get(key))
            if accepted:
                options = {"": texts.UNSET} | {
                    text_of(choice): text_of(choice) for choice in accepted
                }
                field: Any = ui.select(options, label=key, value=value if value in options else "")
            else:
                shown = (
                    texts.DEFAULT.format(value=text_of(default))
                    if default not in (None, "", [])
                    else ""
                )
                field = ui.input(key, value=value, placeholder=shown)
                field.props("stack-label debounce=300")
            ui.html(help_as_html(described["description"]), sanitize=False).classes("note")
        field.on_value_change(lambda event: self._set(key, event.value or ""))
        return field

    async def _set(self, key: str, text: str) -> None:
        """A key was changed in the form."""
        described = self._schema[key]
        value: Any = text
        if _choices(described) and text:
            value = next(choice for choice in _choices(described) if text_of(choice) == text)
        else:
            value = value_of(text, described)
        await self._changed(lambda: self._file.set({key: value}))

    async def _changed(self, change: Any) -> None:
        """Change the run file, show both forms of it, and plan."""
        try:
            change()
            self._message.text, kind = texts.SAVED, "good"
        except UserError as error:
            self._message.text, kind = texts.NOT_SAVED.format(error=error), "bad"
        self._message.classes(kind, remove="good bad")
        if self._text.value != self._file.text:
            self._text.value = self._file.text
        if kind == "good":
            await self._plan()

    def _text_panel(self) -> None:
        with ui.element("div").classes("titled"):
            ui.label(texts.RUN_FILE).classes("title")
            ui.button(texts.UNDO, on_click=self._undo).props("flat")
            ui.button(texts.RELOAD, on_click=self._load).props("flat")
        self._message = ui.label().classes("message").props("role=status")
        self._text = ui.textarea(value=self._file.text).classes("toml")
        self._text.props(f'debounce=600 aria-label="{texts.RUN_FILE}" spellcheck=false')
        self._text.on_value_change(lambda event: self._typed(event.value))
        ui.label(texts.RUN_FILE_HELP).classes("note")

    async def _typed(self, text: str) -> None:
        if text != self._file.text:
            await self._changed(lambda: self._file.edit(text))
            self._refresh_fields()

    async def _undo(self) -> None:
        with errors_shown(self._page):
            tell(self._page, texts.UNDONE if self._file.undo() else texts.NOTHING_TO_UNDO)
        await self._reshow()

    async def _load(self) -> None:
        with errors_shown(self._page):
            self._file.load()
        await self._reshow()

    async def _reshow(self) -> None:
        self._text.value = self._file.text
        self._refresh_fields()
        await self._plan()

    def _refresh_fields(self) -> None:
        """Show in the form what the file says."""
        values = self._file.values()
        for key, field in self._fields.items():
            text = text_of(values.get(key))
            if field.value != text:  # type: ignore[attr-defined]
                field.set_value(text)  # type: ignore[attr-defined]

    def _plan_panel(self) -> None:
        with ui.element("div").classes("titled"):
            ui.label(texts.PLAN).classes("title")
            self._gpus = ui.input(texts.PLAN_FOR, value=self._bench.gpus).props(
                f'debounce=600 dense placeholder="{texts.THIS_MACHINE}"'
            )
            self._gpus.on_value_change(self._plan)
            ui.button(texts.FIT, on_click=self._fit).tooltip(texts.FIT_ABOUT)
        self._verdict = ui.label(texts.PLANNING).classes("verdict").props("role=status")
        self._plan_body = ui.element("div").classes("plan")
        self._fit_body = ui.element("div")

    async def _plan(self) -> None:
        """Plan the file as it is saved; of several changes in a row the last one."""
        self._number += 1
        number = self._number
        self._bench.gpus = self._gpus.value.strip()
        await asyncio.sleep(_PAUSE_SECONDS)
        if number != self._number or self._verdict.is_deleted:
            return
        self._verdict.text = texts.PLANNING
        self._verdict.classes(remove="good bad")
        with errors_shown(self._page):
            planned = await self._bench.plan(self._subject, gpus=self._gpus.value.strip())
            if number == self._number and not self._verdict.is_deleted:
                self._show_plan(planned)

    def _show_plan(self, planned: Mapping[str, Any]) -> None:
        self._plan_body.clear()
        if planned["status"] not in (0, 3):  # 3: it does not fit
            self._verdict.text = planned["err"].splitlines()[-1].removeprefix("error: ")
            self._verdict.classes("bad")
            return
        plan = json.loads(planned["out"])
        self._verdict.text = texts.FITS if plan["fits"] else texts.FITS_NOT
        self._verdict.classes("good" if plan["fits"] else "bad")
        with self._plan_body:
            for device in plan["devices"]:
                _show_device(device)
            if (seconds := plan["seconds_per_step"]) is None:
                ui.label(texts.NO_TIME)
            else:
                step, time = f"{seconds:.2g}", format_duration(3600 * plan["hours"])
                ui.label(texts.STEP.format(step=step, time=time, steps=plan["steps"]))
            if streamed := plan["host"]["streamed_weights"]:
                ui.label(texts.STREAMED.format(size=f"{streamed / GIB:.1f}"))
            for row in plan["auxiliary"]:
                if row["fits"] is False:
                    ui.label(f"{row['stage']}: {row['name']}: {row['remedy']}").classes("bad")
            for note in plan["notes"]:
                ui.label(note).classes("note")

    async def _fit(self) -> None:
        """Search settings that fit, and show what they would change."""
        self._fit_body.clear()
        with self._fit_body:
            status = ui.label(texts.SEARCHING).props("role=status")
        with errors_shown(self._page), TemporaryDirectory() as folder:
            out = Path(folder) / self._file.path.name  # stdout has notes besides
            gpus = self._gpus.value.strip()  # of this tab
            fitted = await self._bench.plan(self._subject, "--fit", f"--write={out}", gpus=gpus)
            if status.is_deleted:
                return
            lines = fitted["err"].splitlines()
            status.text = "\n".join(line for line in lines if folder not in line)
            status.classes("lines")
            if not out.exists():  # nothing fits, and the lines say what lacks
                return
            after = checked(read_text(out), self._file.path)
            changes = changed_values(self._file.config, after)
            with self._fit_body:
                ui.label(texts.FIT_CHANGES if changes else texts.FIT_NOTHING).classes("title")
                for key, (old, new) in changes.items():
                    ui.label(f"{key}: {text_of(old)} → {text_of(new)}").classes("lines")
                if changes:
                    values = {key: new for key, (_, new) in changes.items()}
                    ui.button(texts.APPLY, on_click=lambda: self._apply(values))

    async def _apply(self, values: Mapping[str, Any]) -> None:
        self._fit_body.clear()
        await self._changed(lambda: self._file.set(values))
        self._refresh_fields()


def _choices(described: Mapping[str, Any]) -> list[Any]:
    """The values of a key that has few."""
    kinds = described.get("anyOf", [described])
    choices: list[Any] = []
    for kind in kinds:
        if "enum" in kind:
            choices += [choice for choice in kind["enum"] if choice != ""]
        elif kind.get("type") == "boolean":
            choices += [True, False]
        else:
            return []
    return choices


def help_as_html(text: str) -> str:
    """The help of a key, in which backticks are around code. Nothing else in it is markup."""
    parts = [html.escape(part) for part in text.split("`")]
    code = (f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
    return "".join(code)


def _show_device(device: Mapping[str, Any]) -> None:
    """A bar of what fills a device, and its parts in GiB."""
    total = device["total"] - device["reserve"]
    ui.label(
        texts.PEAK.format(
            peak=f"{device['peak'] / GIB:.1f}", total=f"{total / GIB:.1f}", name=device["name"]
        )
    ).classes("peak")
    scale = max(total, device["peak"])
    with ui.element("div").classes("bar").props("aria-hidden=true"):
        for purpose in texts.BYTES_OF:
            share = 100 * device[purpose] / scale
            ui.element("span").classes(f"part {purpose}").style(f"width: {share:.2f}%")
    with ui.element("dl").classes("parts"):
        for purpose, words in texts.BYTES_OF.items():
            if device[purpose] >= GIB / 1024:
                with ui.element("div"):
                    ui.element("span").classes(f"swatch {purpose}")
                    ui.label(f"{words} {device[purpose] / GIB:.2f}")
