"""Begin: what a person wants × a model × a GPU → recipes with memory and hours → a run file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nicegui import ui

from ditkit_core.config.schema import config_sections
from ditkit_core.config.toml import read_toml
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text
from ditkit_core.run.config import RunConfig
from ditkit_core.run.recipes import GOALS, Recipe, read_recipes
from ditkit_ui import texts
from ditkit_ui.families import installed_families
from ditkit_ui.fetch_dialog import FetchDialog
from ditkit_ui.runs import run_state
from ditkit_ui.workbench import (
    Workbench,
    address,
    errors_shown,
    page_frame,
    short_path,
    subject_of,
    tell,
)

EXAMPLE_GPU = "24GiB"
"""What is planned for where a machine has no GPU and nobody named one."""
_MOST_FILES = 40


class BeginPage:
    """The first page, of one reader."""

    def __init__(self, bench: Workbench):
        self._bench = bench
        self._gpu_here = ""
        self._filled = 0
        """Counts how often the cards were filled: plans for earlier ones stop."""
        recipes = [
            r for family in installed_families().values() for r in read_recipes(family.recipes)
        ]
        goals = [goal for goal in GOALS if goal in {recipe.goal for recipe in recipes}]
        with page_frame("", None) as self._page:
            ui.label(texts.WHAT).classes("title")
            self._goal = (
                ui.radio(
                    {goal: GOALS[goal] for goal in goals}, value=goals[0], on_change=self._fill
                )
                .props("inline")
                .classes("goals")
            )
            with ui.element("div").classes("fields"):
                self._folder = ui.input(texts.FOLDER).props(f'hint="{texts.FOLDER_HELP}"')
                self._model = ui.select(
                    {"": texts.EVERY_MODEL} | {name: name for name in installed_families()},
                    value="",
                    label=texts.MODEL,
                    on_change=self._fill,
                )
                self._gpu = ui.input(texts.GPU, autocomplete=[]).props(
                    f'hint="{texts.GPU_HELP}" debounce=600'
                )
                self._gpu.on_value_change(self._fill)
            self._note = ui.label().classes("note")
            self._cards = ui.element("div").classes("cards")
            with ui.element("div").classes("cards"):  # not filled again: a click is never lost
                self._demo_card()
            self._list_files()
        self._show_cards()  # before the worker has imported torch, which takes seconds
        ui.timer(0, self._start, once=True)

    async def _start(self) -> None:
        machine = await self._bench.worker.ask("machine")
        self._gpu_here = machine["gpus"]
        self._gpu.set_autocomplete(machine["names"])
        self._note.text = (
            texts.GPU_HERE.format(gpus=self._gpu_here) if self._gpu_here else texts.NO_GPU
        )
        if not self._gpu_here and not self._gpu.value:
            self._gpu.value = EXAMPLE_GPU  # which fills the cards
        elif not self._filled:
            await self._fill()

    async def _fill(self) -> None:
        """Show the recipes, and plan one after the other."""
        self._filled += 1
        number, gpus = self._filled, self._gpu.value.strip()
        self._bench.gpus = gpus
        for name, recipe, label in self._show_cards():
            if number != self._filled or label.is_deleted:
                return
            label.text = texts.PLANNING
            try:
                cost = await self._bench.planner.ask(
                    "recipe", family=name, name=recipe.name, gpus=gpus
                )
                words, kind = _in_words(cost), "good" if cost.get("fits") else "bad"
            except UserError as error:
                words, kind = str(error), "bad"
            if number == self._filled and not label.is_deleted:
                label.text = words
                label.classes(kind)

    def _show_cards(self) -> list[tuple[str, Recipe, ui.label]]:
        """A card for each recipe of the goal; its family, and the label for its costs."""
        self._cards.clear()
        cards = []
        with self._cards:
            for name, family in installed_families().items():
                if self._model.value not in ("", name):
                    continue
                for recipe in read_recipes(family.recipes):
                    if recipe.goal == self._goal.value:
                        cards.append((name, recipe, self._card(name, recipe)))
            if not cards:
                ui.label(texts.NO_RECIPE)
        return cards

    def _card(self, family: str, recipe: Recipe) -> ui.label:
        with ui.card().classes("recipe"):
            ui.label(recipe.model).classes("name")
            ui.label(recipe.name).classes("note")
            ui.label(texts.PROMISED.format(machine=recipe.machine, hours=recipe.hours))
            cost = ui.label().props("role=status")

            async def choose() -> None:
                await self._chosen(family, recipe.name, ["--recipe", recipe.name])

            with ui.element("div").classes("titled"):
                ui.button(texts.CHOOSE, on_click=choose).props(
                    f'aria-label="{texts.CHOOSE} {recipe.name}"'
                )
                ui.button(
                    texts.FILES,
                    on_click=lambda: FetchDialog(
                        self._bench, self._page, family, {"name": recipe.name}
                    ),
                ).props(f'flat aria-label="{texts.FILES} {recipe.name}"')
        return cost

    def _demo_card(self) -> None:
        with ui.card().classes("recipe"):
            ui.label(texts.DEMO).classes("name")
            ui.label(texts.DEMO_ABOUT)

            async def choose() -> None:
                name = self._model.value or list(installed_families())[-1]
                await self._chosen(name, "demo", ["--demo"])

            ui.button(texts.DEMO_CHOOSE, on_click=choose)

    async def _chosen(self, family: str, recipe: str, arguments: list[str]) -> None:
        self._filled += 1  # plans of other cards would only keep the next page's plan waiting
        with errors_shown(self._page):
            await self._write(family, recipe, arguments)

    async def _write(self, family: str, recipe: str, arguments: list[str]) -> None:
        """Write the run file that the command prints for a choice, and go on to its data."""
        is_demo = recipe == "demo"
        name = f"{family}-demo"
        if self._folder.value.strip() or not is_demo:
            if not self._folder.value.strip():
                raise UserError(texts.FOLDER_FIRST)
            folder = self._bench.opened.open(self._folder.value)
            arguments = [*arguments, f"--data.folder={short_path(folder)}"]
            name = f"{folder.name}-demo" if is_demo else folder.name
        file = Path.cwd() / f"{name}.toml"
        if file.exists():
            raise UserError(texts.EXISTS.format(file=file.name))
        run = f"runs/{name}"
        if not is_demo and self._gpu.value.strip():
            arguments = [*arguments, f"--gpus={self._gpu.value.strip()}"]
        if self._bench.comfyui and not is_demo:
            arguments = [*arguments, f"--comfyui={self._bench.comfyui}"]
        # Not by the planner: a choice plans nothing, and would wait for the card of another.
        printed = await self._bench.worker.ask(
            "command",
            family=family,
            name="train",
            arguments=[*arguments, f"--run.folder={run}", "--changed"],
        )
        if printed["status"]:
            raise UserError(printed["err"].splitlines()[-1])
        if is_demo:
            self._bench.gpus = ""  # it runs here
            await self._bench.worker.ask("write_demo", family=family, folder=run)
        head = f"# {recipe}, for {family}-train\n\n"
        write_text(file, head + printed["out"])
        tell(self._page, texts.WRITTEN.format(file=file.name), type="positive")
        with self._page:
            ui.navigate.to(address("data", {"file": str(file), "family": family}))

    def _list_files(self) -> None:
        ui.label(texts.EXISTING).classes("title")
        files = list(_run_files(Path.cwd()))
        if not files:
            ui.label(texts.NO_EXISTING).classes("note")
        with ui.element("ul").classes("files"):
            for file in files:
                with ui.element("li"):
                    try:
                        subject = subject_of(self._bench, str(file), "")
                    except UserError as error:
                        ui.label(f"{file.name}: {error}").classes("bad")
                        continue
                    ui.link(file.name, address("settings", subject.query))
                    state = run_state(subject.file.config.run_folder)
                    ui.label(f"{subject.family} · {state.text}").classes("note")


def _in_words(cost: Mapping[str, Any]) -> str:
    if not cost:
        return texts.FITS_NOT
    peaks = " + ".join(f"{peak:.1f}" for peak in cost["peaks"])
    words = texts.COSTS.format(peaks=peaks, host=cost["host"], hours=cost["hours"])
    return f"{texts.FITS if cost['fits'] else texts.FITS_NOT}: {words}"


def _run_files(folder: Path) -> list[Path]:
    """The files of a folder that look like run files."""
    files = []
    for file in sorted(folder.glob("*.toml"))[:_MOST_FILES]:
        try:
            file.name.encode()
            tables = read_toml(file)
        except (UserError, UnicodeEncodeError):  # a name that no browser can ask for
            continue
        if tables and tables.keys() <= config_sections(RunConfig).keys():
            files.append(file)
    return files
