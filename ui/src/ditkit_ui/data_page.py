"""Data: the pictures and clips of a run as they are trained, their captions, and what the doctor
says about them."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path
from ditkit_ui import texts
from ditkit_ui.thumbnails import crop_frame
from ditkit_ui.workbench import Subject, Workbench, errors_shown, page_frame, tell

_ROW = """
<q-tr :props="props" class="row-of-media">
  <q-td class="cell-of-picture">
    <button class="tile" :aria-label="props.row.larger" @click="$parent.$parent.$emit('larger', props.row.path)">
      <span class="picture">
        <img loading="lazy" decoding="async" alt="" :src="props.row.thumbnail">
        <span v-if="props.row.frame" class="crop" :style="props.row.frame"></span>
      </span>
    </button>
  </q-td>
  <q-td class="cell-of-text">
    <div><b>{{ props.row.name }}</b> <span class="note">{{ props.row.size }}</span></div>
    <textarea rows="3" :aria-label="props.row.label" :value="props.row.text" :readonly="props.row.fixed"
      @change="$parent.$parent.$emit('caption', {path: props.row.path, text: $event.target.value})"></textarea>
    <div v-for="badge in props.row.badges" :class="'badge ' + badge.severity">{{ badge.text }}</div>
  </q-td>
</q-tr>
"""
"""A row of the table. Vue's braces and bindings escape: a caption is text wherever it is shown.
Events go to the table, which is around the part that scrolls: the parent of the parent."""


class DataPage:
    """The table of media files, of one reader."""

    def __init__(self, bench: Workbench, subject: Subject):
        self._bench, self._subject = bench, subject
        self._rows: dict[str, dict[str, Any]] = {}
        self._general: list[dict[str, str]] = []
        with page_frame("data", subject) as self._page:
            with ui.element("div").classes("titled"):
                self._count = ui.label(texts.READING).classes("verdict").props("role=status")
                self._check = ui.button(texts.CHECK, on_click=self._examine)
                ui.button(texts.UNDO, on_click=self._undo).props("flat")
                self._only = ui.switch(texts.FILTER, on_change=self._show)
            with ui.element("div").classes("fields"):
                self._find = ui.input(texts.FIND)
                self._with = ui.input(texts.WITH)
                ui.button(texts.REPLACE, on_click=self._replace).props("flat")
            self._notes = ui.element("div")
            self._table = ui.table(
                columns=[{"name": "name", "label": "", "field": "name"}], rows=[], row_key="path"
            )
            self._table.props(
                "virtual-scroll virtual-scroll-item-size=150 hide-header hide-bottom flat"
            ).classes("media")
            self._table.props["rows-per-page-options"] = [0]
            self._table.add_slot("body", _ROW)
            self._table.on("caption", lambda event: self._edit(event.args))
            self._table.on("larger", lambda event: self._enlarge(event.args))
        ui.timer(0, self._read, once=True)

    async def _read(self) -> None:
        """Read the folder; where it was not opened yet, ask first."""
        config = self._subject.file.config.data
        folders = [local_path(text) for text in config.folders or (config.folder,) if text]
        if closed := [path for path in folders if not self._bench.opened.contains(path)]:
            self._count.text = texts.NOT_OPENED.format(path=closed[0])

            def open_folders() -> None:
                with errors_shown(self._page):
                    for path in closed:
                        self._bench.opened.open(str(path))
                    ui.navigate.reload()

            with self._notes:
                for path in closed:
                    ui.button(texts.OPEN_FOLDER.format(folder=path), on_click=open_folders)
            return
        try:
            read = await self._bench.worker.ask(
                "dataset", family=self._subject.family, file=str(self._subject.file.path)
            )
        except UserError as error:
            self._count.text = str(error)
            self._count.classes("bad")
            return
        if self._count.is_deleted:
            return
        with errors_shown(self._page):
            self._rows = {row["path"]: self._row(row, read["list"]) for row in read["rows"]}
        trained = sum(not row["reason"] for row in self._rows.values())
        self._count.text = (
            texts.COUNT.format(
                files=len(self._rows), samples=trained, without=len(self._rows) - trained
            )
            if self._rows
            else texts.NO_MEDIA.format(folder=", ".join(read["folders"]))
        )
        if read["list"]:
            with self._notes:
                ui.label(texts.IN_A_LIST.format(file=read["list"])).classes("note")
        self._show()

    def _row(self, row: Mapping[str, Any], listed: str) -> dict[str, Any]:
        """A media file as the table shows it."""
        shown, frame = "", ""
        if "trained" in row:
            height, width = row["trained"]
            shown = texts.TRAINED_AS.format(width=width, height=height)
            if row["stored"]:
                tall, wide = crop_frame(tuple(row["stored"]), (height, width))
                frame = f"width: {100 * wide:.2f}%; height: {100 * tall:.2f}%"
                if tall * wide < 0.99:
                    shown = texts.CUT_AWAY.format(
                        share=round(100 * (1 - tall * wide)), width=width, height=height
                    )
        text = row.get("text", "") if listed else self._bench.captions.text(row["caption"])
        return {
            **row,
            "text": text,
            "size": shown,
            "frame": frame,
            "fixed": bool(listed),
            "label": texts.CAPTION_OF.format(name=row["name"]),
            "larger": texts.PICTURE_OF.format(name=row["name"]),
            "thumbnail": f"/thumbnail?{urlencode({'path': row['path']})}",
            "badges": [{"severity": "warning", "text": row["reason"]}] if row["reason"] else [],
        }

    def _show(self) -> None:
        rows = [row for row in self._rows.values() if row["badges"] or not self._only.value]
        self._table.rows = rows
        self._table.update()

    async def _edit(self, edit: Mapping[str, str]) -> None:
        """A caption was edited in its place."""
        row = self._rows[edit["path"]]
        with errors_shown(self._page):
            edits = {row["caption"]: (row["text"], edit["text"])}
            if await asyncio.to_thread(self._bench.captions.write, edits):
                row["text"] = edit["text"]
                tell(self._page, texts.CAPTION_SAVED.format(file=Path(row["caption"]).name))
        self._show()

    async def _replace(self) -> None:
        """Replace a text in all captions. Thousands take seconds, each file is written safely."""
        find, by = self._find.value, self._with.value
        with errors_shown(self._page):
            rows = [
                r
                for r in self._rows.values()
                if find and find in (r["text"] or "") and not r["fixed"]
            ]
            edits = {r["caption"]: (r["text"], r["text"].replace(find, by)) for r in rows}
            count = await asyncio.to_thread(self._bench.captions.write, edits)
            for row in rows:
                row["text"] = edits[row["caption"]][1]
            tell(self._page, texts.REPLACED.format(count=count) if count else texts.FOUND_NONE)
        self._show()

    async def _undo(self) -> None:
        with errors_shown(self._page):
            is_undone = await asyncio.to_thread(self._bench.captions.undo)
            tell(self._page, texts.UNDONE if is_undone else texts.NOTHING_TO_UNDO)
        await self._read()

    async def _examine(self) -> None:
        """Ask the doctor, and put each finding on its file."""
        self._check.disable()
        self._check.text = texts.CHECKING
        try:
            with errors_shown(self._page):
                found = await self._bench.worker.ask(
                    "findings", family=self._subject.family, file=str(self._subject.file.path)
                )
                if not self._check.is_deleted:
                    self._show_findings(found)
        finally:
            self._check.text = texts.CHECK
            self._check.enable()

    def _show_findings(self, found: list[dict[str, str]]) -> None:
        by_place = defaultdict(list)
        for finding in found:
            by_place[finding["where"]].append(finding)
        general = dict(by_place)
        for row in self._rows.values():
            places = {row["path"], row["name"], *row.get("ids", ())}
            row["badges"] = [finding for place in places for finding in by_place.get(place, ())]
            for place in places:
                general.pop(place, None)
        self._notes.clear()
        with self._notes:
            if not found:
                ui.label(texts.NO_FINDINGS).classes("good")
            for findings in general.values():
                for finding in findings:
                    ui.label(finding["text"]).classes(f"badge {finding['severity']}")
        self._show()

    def _enlarge(self, path: str) -> None:
        row = self._rows[path]
        source = f"/media?{urlencode({'path': path})}"
        with ui.dialog() as dialog, ui.card().classes("larger"):
            if row["kind"] == "video":
                ui.video(source, autoplay=False)
            else:
                ui.element("img").props["src"] = source
            ui.label(row["name"])
            ui.button(texts.CLOSE, on_click=dialog.close)
        dialog.open()
