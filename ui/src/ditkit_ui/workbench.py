"""What all pages share: the opened folders, the worker process, the run files that are edited, and
the frame around a page."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import ui

from ditkit_core.config.toml import read_toml
from ditkit_core.errors import UserError
from ditkit_ui import texts
from ditkit_ui.captions import CaptionEdits
from ditkit_ui.families import family_of, installed_families
from ditkit_ui.folders import OpenedFolders
from ditkit_ui.job import Job
from ditkit_ui.run_file import RunFile
from ditkit_ui.worker import Worker

_CLOSING = [{"label": texts.CLOSE, "color": "white"}]
"""The button of a message that stays: white on red, where the page's own colour is not readable."""
_STYLE = Path(__file__).with_name("page.css")


@dataclass(kw_only=True)
class Workbench:
    """The values that the pages of one process share."""

    opened: OpenedFolders
    token: str
    """The secret of the page's address."""
    worker: Worker
    """Reads data."""
    planner: Worker
    """Plans; its process keeps what it measured, and no check of data holds it up."""
    captions: CaptionEdits
    undos: list[Callable[[], bool]]
    """How to undo each edit of the page Data, the last one last; False where it is undone or lost
    already."""
    undo_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One edit after the other is undone: each needs the state that the later one has left."""
    captioner: Job
    fetcher: Job
    files: dict[Path, RunFile] = field(default_factory=dict)
    """Run files that were opened, so that an undo outlives a change of the page."""
    comfyui: str = ""
    """The folder of ComfyUI that was last looked into; empty for none."""
    gpus: str = ""
    """What was last planned for, as `--gpus` takes it; empty for this machine."""

    async def plan(self, subject: "Subject", *verb: str, gpus: str | None = None) -> Any:
        """What the command prints with `--plan --json`, or other options: status, `out` and `err`;
        for GPUs as `--gpus` takes them, by default those of the last plan.

        Raises:
            UserError: If the process that plans ended.
        """
        gpus = self.gpus if gpus is None else gpus
        arguments = [str(subject.file.path), *(verb or ("--plan", "--json"))]
        arguments += [f"--gpus={gpus}"] if gpus else []
        return await self.planner.ask(
            "command", family=subject.family, name="train", arguments=arguments
        )

    async def undo(self) -> bool:
        """Undo the last edit of the page Data that is not undone or lost already; False if there is
        none."""
        async with self.undo_lock:
            await asyncio.to_thread(self.captions.note_changes)
            while self.undos:
                if await asyncio.to_thread(self.undos.pop()):
                    return True
        return False

    async def plan_ahead(self, subject: "Subject") -> None:
        """Plan a run before its plan is asked for, so that the process has what it needs by then;
        what is wrong with the run is shown where it is asked for."""
        with suppress(UserError):
            await self.plan(subject)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a page is about: a run file, and the family whose commands read it."""

    file: RunFile
    family: str

    @property
    def query(self) -> dict[str, str]:
        """It as part of an address."""
        return {"file": str(self.file.path), "family": self.family}


def address(path: str, query: dict[str, str]) -> str:
    """The address of a page."""
    return f"/{path}?{urlencode(query)}" if query else f"/{path}"


def short_path(path: Path) -> str:
    """A path as a person would write it in the folder where the page was started."""
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)


def folder_key(folder: Path) -> str:
    """A folder as a part of an address, below which its files are."""
    return base64.urlsafe_b64encode(str(folder.resolve()).encode()).decode()


def subject_of(bench: Workbench, file: str, family: str) -> Subject:
    """The run file that an address names.

    Raises:
        UserError: If it is in no opened folder, or the command would not read it.
    """
    path = bench.opened.checked(file)
    if path not in bench.files:
        bench.files[path] = RunFile(path)
    run_file = bench.files[path]
    if family not in installed_families():
        family = family_of(run_file.config.run_folder, read_toml(path))
    return Subject(file=run_file, family=family)


@contextmanager
def errors_shown(page: ui.element) -> Iterator[None]:
    """Inside the block a mistake of the user is shown as a message on the page."""
    try:
        yield
    except UserError as error:
        tell(page, str(error), type="negative", timeout=0, actions=_CLOSING)


def tell(page: ui.element, message: str, **options: Any) -> None:
    """Show a message on a page, if its reader has not gone on; the button that was pressed may be
    gone."""
    if not page.is_deleted:
        with page:
            ui.notify(message, multi_line=True, **options)


@contextmanager
def page_frame(path: str, subject: Subject | None) -> Iterator[ui.element]:
    """The head of a page with the way to the others; inside the block is its content, which is
    yielded."""
    ui.colors(primary="#1257a8")  # white on it has a contrast of 7
    ui.add_css(_STYLE.read_text(encoding="utf-8"))
    ui.page_title(f"{texts.TABS[path]} · {texts.TITLE}")
    query = subject.query if subject else {}
    with ui.header().classes("head"):
        ui.link(texts.SKIP, "#content").classes("skip")
        with ui.element("nav"):
            for name, title in texts.TABS.items():
                link = ui.link(title, address(name, query if name else {}))
                if name == path:
                    link.props["aria-current"] = "page"
        if subject:
            ui.label(f"{subject.file.path.name} · {subject.family}").classes("subject")
    with ui.element("div").classes("content").props("id=content") as content:
        yield content
