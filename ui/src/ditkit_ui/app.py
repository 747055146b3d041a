"""The application: its pages, and the files that they show, all of opened folders alone."""

import asyncio
import base64
import mimetypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from fastapi.responses import FileResponse, HTMLResponse, Response
from nicegui import app, ui
from werkzeug.exceptions import NotFound

from ditkit_core.data.media.image import SUFFIXES
from ditkit_core.diagnostics.report.data import read_sections
from ditkit_core.diagnostics.report.page import report_page
from ditkit_core.diagnostics.report.server import last_lines_of_logs, sample_file
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder
from ditkit_ui import texts
from ditkit_ui.begin_page import BeginPage
from ditkit_ui.compare_page import ComparePage
from ditkit_ui.data_page import DataPage
from ditkit_ui.guard import Guard
from ditkit_ui.queue_page import QueuePage
from ditkit_ui.run_page import RunPage
from ditkit_ui.settings_page import SettingsPage
from ditkit_ui.thumbnails import thumbnail
from ditkit_ui.workbench import Workbench, page_frame, subject_of

_PAGES: dict[str, Callable[..., Any]] = {
    "data": DataPage,
    "settings": SettingsPage,
    "run": RunPage,
    "queue": QueuePage,
    "compare": ComparePage,
}
_ALONE = "sandbox allow-scripts; default-src 'none'; img-src data: 'self'; media-src data: 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The policy of a page that was read from a folder: it is of no site, and loads nothing from
elsewhere."""


def add_pages(bench: Workbench, *, host: str, port: int) -> None:
    """Add the pages, the files that they show, and the guard in front of everything."""
    app.add_middleware(Guard, token=bench.token, host=host, port=port)
    app.on_shutdown(bench.worker.end)
    app.on_shutdown(bench.captioner.stop)
    app.on_shutdown(bench.fetcher.stop)
    app.on_shutdown(bench.planner.end)

    @ui.page("/")
    def begin() -> None:
        BeginPage(bench)

    for name, page in _PAGES.items():
        _add_page(bench, name, page)

    @app.get("/thumbnail")
    async def small(path: str) -> Response:
        file = _opened(bench, path)
        try:
            return FileResponse(await asyncio.to_thread(thumbnail, file), media_type="image/jpeg")
        except (UserError, OSError):
            return Response(status_code=204)  # its row says what is wrong with it

    @app.get("/media")
    def media(path: str) -> Response:
        return _media(_opened(bench, path))

    @app.get("/sample")
    def sample(path: str) -> Response:
        file = _opened(bench, path)
        return _media(_sample(file.parent.parent, f"/samples/{file.name}"))

    @app.get("/report/{key}/{rest:path}")
    def report(key: str, rest: str) -> Response:
        folder = _folder_of(bench, key)
        if rest:
            return _media(_sample(folder, f"/{rest}"))
        try:
            page = report_page(folder, read_sections(folder), last_lines_of_logs(folder))
        except UserError as error:
            raise HTTPException(404, str(error)) from error
        return HTMLResponse(page)

    @app.get("/sheet/{key}/{signed}/{rest:path}")
    def sheet(key: str, signed: str, rest: str) -> Response:
        page = RunFolder(_folder_of(bench, key)).sheet_page
        if rest:
            return _media(_opened(bench, str(page.parent / rest)))
        file = _opened(bench, str(page))
        if not file.is_file():
            raise HTTPException(404)
        # A run's folder may come from somebody else: its page gets neither the cookie nor these
        # pages.
        return FileResponse(
            file, media_type="text/html", headers={"Content-Security-Policy": _ALONE}
        )


def _add_page(bench: Workbench, name: str, page: Callable[..., Any]) -> None:
    @ui.page(f"/{name}")
    def build(file: str = "", family: str = "") -> None:
        try:
            if not file and name != "queue":  # which is of the machine
                raise UserError(texts.NO_FILE)
            subject = subject_of(bench, file, family) if file else None
        except UserError as error:
            with page_frame(name, None):
                ui.label(str(error)).classes("bad" if file else "note")
            return
        page(bench, subject)
        if subject and name == "data":  # from there a reader goes on to the settings
            ui.timer(0, lambda: bench.plan_ahead(subject), once=True)


def _folder_of(bench: Workbench, key: str) -> Path:
    """The folder that a part of an address stands for (`folder_key`), if it is opened."""
    try:
        return _opened(bench, base64.urlsafe_b64decode(key).decode())
    except ValueError as error:
        raise HTTPException(404) from error


def _opened(bench: Workbench, path: str) -> Path:
    """A file or folder that a browser asks for, if it is in an opened folder."""
    try:
        return bench.opened.checked(path)
    except UserError as error:
        raise HTTPException(404) from error


def _sample(folder: Path, path: str) -> Path:
    try:
        return sample_file(folder, path)
    except NotFound as error:
        raise HTTPException(404) from error


def _media(file: Path) -> Response:
    """A picture, a clip or a sound; no other file is sent, whatever folder it is in."""
    kind = mimetypes.guess_type(file.name)[0] or ""
    is_played = kind.startswith(("video/", "audio/"))
    if not (file.suffix.lower() in SUFFIXES or is_played) or not file.is_file():
        raise HTTPException(404)
    return FileResponse(file, media_type=kind or None)
