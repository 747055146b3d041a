"""Model files that a recipe needs and this machine lacks: named with their sizes, and fetched."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from nicegui import ui

from ditkit_ui import texts
from ditkit_ui.job_view import JobView
from ditkit_ui.workbench import Workbench, errors_shown


class FetchDialog:
    """The dialog about the files of a recipe or run file, of one reader.

    Args:
        of: The `name` of a recipe, or the `file`, as `work.missing` takes them.
        use: Called with the files of ComfyUI that do instead, by key, if the reader wants them.
    """

    def __init__(
        self,
        bench: Workbench,
        page: ui.element,
        family: str,
        of: Mapping[str, str],
        use: Callable[[Mapping[str, str]], Awaitable[None]] | None = None,
    ):
        self._bench, self._page = bench, page
        self._run = {"family": family, **of}
        with page, ui.dialog(value=True) as dialog, ui.card().classes("larger"):
            (called,) = of.values()
            ui.label(texts.FILES_OF.format(recipe=Path(called).name)).classes("title")
            self._comfyui = ui.input(texts.COMFYUI, value=bench.comfyui).props(
                f'debounce=600 hint="{texts.COMFYUI_HELP}"'
            )
            self._comfyui.on_value_change(self._read).classes("wide")
            self._there = ui.label().classes("lines")
            self._missing = ui.label(texts.LOOKING).classes("lines")
            with ui.element("div").classes("titled"):
                self._use = ui.button(texts.USE_FILES, on_click=lambda: use and use(self._files))
                self._use.set_visibility(use is not None)
                self._fetch = ui.button(texts.FETCH, on_click=self._begin)
                ui.button(texts.CLOSE, on_click=dialog.close).props("flat")
            self._files: dict[str, str] = {}
            self._use.disable()
            self._fetch.disable()
            self._view = JobView(bench.fetcher, texts.FETCH_STATES, self._look)
            ui.timer(0, self._read, once=True)

    async def _read(self) -> None:
        """Name what ComfyUI has, and what is missing."""
        with errors_shown(self._page):
            self._bench.comfyui, self._files = "", {}
            if typed := self._comfyui.value.strip():
                files = await self._bench.worker.ask("in_comfyui", comfyui=typed, **self._run)
                self._bench.comfyui, self._files = typed, files
            more = {"comfyui": self._bench.comfyui}
            lines = await self._bench.worker.ask("missing", **self._run, **more)
            if not self._missing.is_deleted:
                self._use.set_enabled(bool(self._files))
                self._there.text = "\n".join(f"{key}: {file}" for key, file in self._files.items())
                self._missing.text = "\n".join(lines) or texts.NOTHING_MISSING
                self._fetch.set_enabled(bool(lines) and not self._bench.fetcher.is_running)

    def _begin(self) -> None:
        self._fetch.disable()
        self._view.start("fetch", **self._run, comfyui=self._bench.comfyui)

    async def _look(self, has_ended: bool) -> None:
        if has_ended:
            await self._read()
