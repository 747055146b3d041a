"""Model files that a recipe needs and this machine lacks: named with their sizes, and fetched."""

from nicegui import ui

from ditkit_ui import texts
from ditkit_ui.job_view import JobView
from ditkit_ui.workbench import Workbench, errors_shown


class FetchDialog:
    """The dialog about the files of a recipe, of one reader."""

    def __init__(self, bench: Workbench, page: ui.element, family: str, recipe: str):
        self._bench, self._page = bench, page
        self._recipe = {"family": family, "name": recipe}
        with page, ui.dialog(value=True) as dialog, ui.card().classes("larger"):
            ui.label(texts.FILES_OF.format(recipe=recipe)).classes("title")
            self._missing = ui.label(texts.LOOKING).classes("lines")
            with ui.element("div").classes("titled"):
                self._fetch = ui.button(texts.FETCH, on_click=self._begin)
                ui.button(texts.CLOSE, on_click=dialog.close).props("flat")
            self._fetch.disable()
            self._view = JobView(bench.fetcher, texts.FETCH_STATES, self._look)
            ui.timer(0, self._read, once=True)

    async def _read(self) -> None:
        """Name what is missing."""
        with errors_shown(self._page):
            lines = await self._bench.worker.ask("missing", **self._recipe)
            if not self._missing.is_deleted:
                self._missing.text = "\n".join(lines) or texts.NOTHING_MISSING
                self._fetch.set_enabled(bool(lines) and not self._bench.fetcher.is_running)

    def _begin(self) -> None:
        self._fetch.disable()
        self._view.start("fetch", **self._recipe)

    async def _look(self, has_ended: bool) -> None:
        if has_ended:
            await self._read()
