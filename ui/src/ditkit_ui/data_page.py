"""Data: the pictures and clips of a run as they are trained, their captions, and what the doctor
says about them."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from ditkit_core.data.list_text import RowEdit
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path
from ditkit_ui import texts
from ditkit_ui.caption_section import CaptionSection
from ditkit_ui.run_file import RunFile
from ditkit_ui.thumbnails import crop_frame, frame_style
from ditkit_ui.workbench import Subject, Workbench, errors_shown, page_frame, tell

_ROW = """
<q-tr :props="props" class="row-of-media">
  <q-td class="cell-of-picture">
    <button class="tile" :aria-label="props.row.larger" @click="$parent.$parent.$emit('larger', {path: props.row.path, name: props.row.name, kind: props.row.kind})">
      <span class="picture">
        <img loading="lazy" decoding="async" alt="" :src="props.row.thumbnail">
        <span v-if="props.row.frame" class="crop" :style="props.row.frame"></span>
      </span>
    </button>
  </q-td>
  <q-td class="cell-of-text">
    <div><b>{{ props.row.name }}</b> <span class="note">{{ props.row.size }}</span>
      <button class="remedy" :aria-label="props.row.use + ': ' + props.row.name" @click="$parent.$parent.$emit('use', {path: props.row.path})">{{ props.row.use }}</button></div>
    <textarea rows="3" :aria-label="props.row.label" :ref="shown => { if (shown && !shown.matches(':focus')) shown.value = props.row.text }" :readonly="props.row.fixed"
      @change="$parent.$parent.$emit('caption', {path: props.row.path, text: $event.target.value})"></textarea>
    <div v-for="badge in props.row.badges" :class="'badge ' + badge.severity">{{ badge.text }}
      <button v-for="remedy in badge.remedies" class="remedy" @click="$parent.$parent.$emit('remedy', {path: props.row.path, remedy: remedy})">{{ remedy.label }}</button>
    </div>
    <div v-if="props.row.extras.length" class="extras">
      <div v-for="extra in props.row.extras" class="extra">
        <button v-if="extra.thumbnail" class="tile" :aria-label="extra.larger" @click="$parent.$parent.$emit('larger', {path: extra.path, name: extra.name, kind: extra.kind})">
          <img loading="lazy" decoding="async" alt="" :src="extra.thumbnail">
        </button>
        <audio v-if="extra.sound" controls preload="none" :aria-label="extra.label" :src="extra.sound"></audio>
        <span class="note">{{ extra.label }}</span>
      </div>
    </div>
  </q-td>
</q-tr>
"""
"""A row of the table. Vue's braces and bindings escape: a caption is text wherever it is shown.
Events go to the table, which is around the part that scrolls: the parent of the parent. A text is
shown anew where nobody writes it."""


_SHOWN = (
    *("path", "name", "kind", "size", "thumbnail", "frame", "larger"),
    *("label", "text", "fixed", "badges", "extras", "use"),
)
"""What of a row the browser gets."""
_LEAST_CUT = 0.005
"""Share of a side from which on its crop can be moved: less is a rounding."""
_REFUSED = "D02"
"""The finding that a file cannot be trained."""
_TOO_LONG = "D14"
"""The finding that a caption is longer than is read."""


class DataPage:
    """The table of media files, of one reader."""

    def __init__(self, bench: Workbench, subject: Subject):
        self._bench, self._subject = bench, subject
        self._rows: dict[str, dict[str, Any]] = {}
        self._found: list[dict[str, Any]] | None = None
        """What the doctor found; None before it was asked."""
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
            CaptionSection(bench, subject, self._page, self._files, self._refresh)
            self._notes = ui.element("div")
            self._findings = ui.element("div")
            self._table = ui.table(
                columns=[{"name": "name", "label": "", "field": "name"}], rows=[], row_key="path"
            )
            self._table.props(
                "virtual-scroll virtual-scroll-item-size=150 hide-header hide-bottom flat"
            ).classes("media")
            self._table.props["rows-per-page-options"] = [0]
            self._table.add_slot("body", _ROW)
            self._table.on("caption", lambda event: self._edit(event.args))
            self._table.on("larger", lambda event: self._enlarge(**event.args))
            self._table.on("use", lambda event: self._exclude(**event.args))
            self._table.on("remedy", lambda event: self._apply(**event.args))
        ui.timer(0, self._read, once=True)

    async def _read(self) -> None:
        """Read the folder; where it was not opened yet, ask first."""
        config = self._subject.file.config.data
        controls = (entry.partition("=")[2] for entry in config.controls)
        named = (*config.folders, config.folder, config.references, config.masks, *controls)
        folders = [local_path(text) for text in named if text]
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
        # Not in the event loop, in which nobody else's page would answer: a file for each caption.
        rows = await asyncio.to_thread(lambda: list(map(self._row, read["rows"])))
        if self._count.is_deleted:
            return
        self._count.classes(remove="bad")
        self._rows = {row["path"]: row for row in rows}
        self._count.text = self._counted() or texts.NO_MEDIA.format(
            folder=", ".join(read["folders"])
        )
        self._notes.clear()
        with self._notes:
            for note in read["notes"]:
                ui.label(note).classes("note")
            if stale := read["stale"]:
                ui.label(stale["reason"]).classes("bad")
                remove = partial(self._set_and_read, stale["settings"])
                ui.button(texts.REMOVE_NAMES, on_click=remove).props("outline dense")
        self._show_findings()

    def _counted(self) -> str:
        """How many files there are, and what of them can be trained; empty without any."""
        rows = self._rows.values()
        excluded = sum(row["excluded"] for row in rows)
        usable = sum("trained" in row for row in rows)
        words = texts.COUNT.format(files=len(rows), usable=usable) if rows else ""
        if bad := len(rows) - usable - excluded:
            words += texts.NOT_USABLE.format(count=bad)
        return words + (texts.NUM_LEFT_OUT.format(count=excluded) if excluded else "")

    def _files(self) -> set[str]:
        """The files that have the captions, or get them."""
        return {row["caption"] for row in self._rows.values() if row["caption"]}

    async def _refresh(self, has_ended: bool) -> None:
        """Show captions that were written meanwhile; at the end, all anew."""
        if has_ended:
            await self._read()
            return
        rows = [row for row in self._rows.values() if not row["fixed"]]
        sources = [(row["caption"], row["row"]) for row in rows]
        with suppress(UserError):  # which the end shows
            now = await asyncio.to_thread(self._bench.captions.texts, sources)
            changed = [
                (row, text)
                for row, text in zip(rows, now, strict=True)
                if text is not None and text.strip() != row["text"].strip()
            ]
            for row, text in changed:
                row["text"] = text
                if row["row"] is None:
                    row["file text"] = text
            if changed:
                self._show()

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A media file as the table shows it."""
        shown, frame, stored, reason, cut = "", "", None, row["reason"], (0.0, 0.0)
        if row["caption"] and row["row"] is None:
            try:
                stored = self._bench.captions.text(row["caption"])
            except UserError as error:  # it leads elsewhere, or is no text
                reason = str(error)
        if "trained" in row:
            height, width = row["trained"]
            shown = texts.TRAINED_AS.format(width=width, height=height)
            if row["stored"]:
                tall, wide = crop_frame(tuple(row["stored"]), (height, width))
                cut, frame = (1 - wide, 1 - tall), frame_style((tall, wide), Crop(*row["crop"]))
                if tall * wide < 0.99:
                    shown = texts.CUT_AWAY.format(
                        share=round(100 * (1 - tall * wide)), width=width, height=height
                    )
        return {
            **row,
            "text": row["text"] if stored is None else stored,
            "file text": stored,
            "reason": reason,
            "size": shown,
            "frame": frame,
            "cut": cut,
            "fixed": not row["caption"] or reason != row["reason"],
            "use": texts.USE if row["excluded"] else texts.LEAVE_OUT,
            "label": texts.CAPTION_OF.format(name=row["name"]),
            "larger": texts.PICTURE_OF.format(name=row["name"]),
            "thumbnail": f"/thumbnail?{urlencode({'path': row['path']})}",
            "extras": list(map(_extra, row["extras"])),
            "badges": [],
        }

    def _show(self) -> None:
        rows = [row for row in self._rows.values() if row["badges"] or not self._only.value]
        self._table.rows = [{name: row[name] for name in _SHOWN} for row in rows]
        self._table.update()

    async def _edit(self, edit: Mapping[str, str]) -> None:
        """A caption was edited in its place."""
        row = self._rows[edit["path"]]
        with errors_shown(self._page):
            if await self._write([(row, edit["text"])]):
                tell(self._page, texts.CAPTION_SAVED.format(file=Path(row["caption"]).name))
        if row["reason"] or not edit["text"].strip():  # with a caption a file can be trained
            await self._read()
        else:
            self._show_findings()

    async def _replace(self) -> None:
        """Replace a text in all captions. Thousands take seconds, each file is written safely."""
        find, by = self._find.value, self._with.value
        with errors_shown(self._page):
            rows = [r for r in self._rows.values() if find and find in r["text"] and not r["fixed"]]
            count = await self._write([(row, row["text"].replace(find, by)) for row in rows])
            tell(self._page, texts.REPLACED.format(count=count) if count else texts.FOUND_NONE)
        self._show_findings()

    async def _write(self, edits: Sequence[tuple[dict[str, Any], str]]) -> int:
        """Write captions, all or none; how many differed."""
        captions, lists = {}, defaultdict(list)
        for row, text in edits:
            if row["row"] is None:
                captions[row["caption"]] = (row["file text"], text)
            else:
                edit = RowEdit(row["row"], row["item"], row["text"], text)
                lists[row["caption"]].append(edit)
        count = await asyncio.to_thread(self._bench.captions.write, captions, lists)
        for row, text in edits:
            if row["row"] is None and text != (row["file text"] or ""):
                row["file text"] = text
            row["text"] = text
        return count

    async def _undo(self) -> None:
        with errors_shown(self._page):
            is_undone = await self._bench.undo()
            tell(self._page, texts.UNDONE if is_undone else texts.NOTHING_TO_UNDO)
        await self._read()

    async def _examine(self) -> None:
        """Ask the doctor, and put each finding on its file."""
        self._check.disable()
        self._check.text = texts.CHECKING
        try:
            with errors_shown(self._page):
                self._found = await self._bench.worker.ask(
                    "findings", family=self._subject.family, file=str(self._subject.file.path)
                )
                if not self._check.is_deleted:
                    self._show_findings()
        finally:
            self._check.text = texts.CHECK
            self._check.enable()

    def _show_findings(self) -> None:
        """Show the findings, but those that were remedied since."""
        settings = self._subject.file.values()
        by_place = defaultdict(list)
        for finding in self._found or ():
            if not any(remedy.items() <= settings.items() for remedy in finding["settings"]):
                by_place[finding["where"]].append(finding)
        general = dict(by_place)
        for row in self._rows.values():
            row["badges"] = []
            of_row = () if row["excluded"] else row["names"]
            for finding in (f for name in of_row for f in by_place.get(name, ())):
                is_refused = "trained" not in row
                before = finding.setdefault("before", (is_refused, row["text"]))
                is_over = {
                    _REFUSED: before[0] and not is_refused,
                    _TOO_LONG: before[1] != row["text"],
                }
                if not is_over.get(finding["code"]):
                    badge = {name: finding[name] for name in ("severity", "text")}
                    row["badges"].append(badge | {"remedies": _remedies(finding, row)})
            if row["reason"] and not row["badges"]:
                row["badges"] = [{"severity": "warning", "text": row["reason"]}]
            for name in row["names"]:
                general.pop(name, None)
        self._findings.clear()
        with self._findings:
            if self._found == []:
                ui.label(texts.NO_FINDINGS).classes("good")
            for finding in (finding for findings in general.values() for finding in findings):
                with ui.element("div").classes(f"badge {finding['severity']}"):
                    ui.label(finding["text"])
                    for remedy in _remedies(finding):
                        act = partial(self._apply, remedy)
                        ui.button(remedy["label"], on_click=act).props("outline dense")
        self._show()

    async def _apply(self, remedy: Mapping[str, Any], path: str = "") -> None:
        """Do what a remedy says: in the run file, or to the caption of a file."""
        file, family = self._subject.file, self._subject.family
        with errors_shown(self._page):
            if "settings" not in remedy:
                row = self._rows[path]
                count = sum(extra["name"] == texts.REFERENCE for extra in row["extras"])
                shorter = await self._bench.worker.ask(
                    "shortened",
                    family=family,
                    file=str(file.path),
                    text=row["text"],
                    num_pictures=count,
                )
                await self._edit({"path": path, "text": shorter})
                return
            self._set(remedy["settings"])
            tell(self._page, texts.REMEDIED.format(settings=remedy["label"]))
        await self._read()

    async def _exclude(self, path: str) -> None:
        """Leave a file out, or use it again."""
        names, id = [*self._subject.file.config.data.exclude], self._rows[path]["id"]
        names = [name for name in names if name != id] if id in names else [*names, id]
        await self._set_and_read({"data.exclude": names or None})

    async def _set_and_read(self, settings: Mapping[str, Any]) -> None:
        with errors_shown(self._page):
            self._set(settings)
        await self._read()

    def _set(self, settings: Mapping[str, Any]) -> None:
        """Set keys of the run file, with a way to undo it; if that is refused, nothing changes."""
        file, before = self._subject.file, self._subject.file.text
        try:
            file.set(settings)
        except UserError:
            file.text = before
            raise
        self._bench.undos.append(partial(_undo_settings, file, file.text))

    def _enlarge(self, path: str, name: str, kind: str) -> None:
        source, row = f"/media?{urlencode({'path': path})}", self._rows.get(path, {})
        with ui.dialog() as dialog, ui.card().classes("larger"):
            with ui.element("div").classes("picture"):
                if kind == "video":
                    ui.video(source, autoplay=False)
                else:
                    ui.element("img").props["src"] = source
                frame = ui.element("span").classes("crop").style(row.get("frame", ""))
                frame.set_visibility(bool(row.get("frame")))
            ui.label(name)
            # A picture covers its size: at most one of its sides is cut.
            for axis, words in enumerate(texts.CROPS if row.get("movable") else ()):
                if row["cut"][axis] > _LEAST_CUT:
                    ui.label(words)
                    self._crop_slider(row, axis, frame).props["aria-label"] = words
            ui.button(texts.CLOSE, on_click=dialog.close)
        dialog.open()

    def _crop_slider(self, row: Mapping[str, Any], axis: int, frame: ui.element) -> ui.slider:
        """Moves the frame along an axis of a picture; where it is let go, the run file has it."""

        def crop_at(share: float) -> Crop:
            shares = list(row["crop"])
            shares[axis] = round(share, 2)
            return Crop(*shares)

        def move(event: Any) -> None:
            kept = (1 - row["cut"][1], 1 - row["cut"][0])
            frame.style(replace=frame_style(kept, crop_at(event.value)))

        async def keep(event: Any) -> None:  # has the last value, which may come after it else
            crop = crop_at(event.args)
            entries = (e for e in self._subject.file.config.data.crops)
            others = [e for e in entries if e.rpartition("=")[0] != row["id"]]
            entry = f"{row['id']}={crop.right:g},{crop.down:g}"
            with errors_shown(self._page):
                self._set({"data.crops": (others + [entry] * (crop != CENTRE)) or None})
            await self._read()

        slider = ui.slider(min=0, max=1, step=0.01, value=row["crop"][axis], on_change=move)
        return slider.on("change", keep)


def _remedies(finding: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> list[Any]:
    """The remedies of a finding that a button can do, each with its label."""
    remedies: list[Any] = []
    for settings in finding["settings"]:
        keys = (f"{key} = {json.dumps(v, ensure_ascii=False)}" for key, v in settings.items())
        label = f"{texts.REMEDIES.get(next(iter(settings)), texts.SET)}: {', '.join(keys)}"
        remedies.append({"label": label, "settings": settings})
    if finding["code"] == _TOO_LONG and row and not row["fixed"]:
        # Of a row with several captions it is not known which is too long.
        has_one = row["row"] is None or "\n" not in row["text"]
        remedies += [{"label": texts.SHORTEN}] if has_one else []
    return remedies


def _undo_settings(file: RunFile, text: str) -> bool:
    """Undo a remedy in a run file, if nobody has edited the file since."""
    return file.text == text and file.undo()


def _extra(extra: Mapping[str, str]) -> dict[str, str]:
    """Another file of a sample as the table shows it."""
    query = urlencode({"path": extra["path"]})
    name = Path(extra["path"]).name
    shown = {"label": f"{extra['name']}: {extra['text'] or name}"}
    shown["larger"] = texts.PICTURE_OF.format(name=shown["label"])
    if extra["kind"] in ("image", "video"):
        shown["thumbnail"] = f"/thumbnail?{query}"
    elif extra["kind"] == "audio":
        shown["sound"] = f"/media?{query}"
    return {**extra, **shown}
