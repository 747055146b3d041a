"""Memory and hours of each recipe, planned: the table of docs/recipes/README.md. No GPU, no weights
and no data."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditkit_core.config.sizes import GIB
from ditkit_core.io.console import doing
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU, parse_gpus
from ditkit_core.run.context import RunContext
from ditkit_core.run.jobs import jobs_of
from ditkit_core.run.plans.hours import PlannedRun, hours_in_words, launch_of, run_of_recipe
from ditkit_core.run.recipes import GOALS, Recipe, read_recipes
from ditkit_flux2.spec import FLUX2
from ditkit_flux3.spec import FLUX3
from ditkit_krea2.spec import KREA2
from ditkit_ltx.spec import LTX
from ditkit_qwen.spec import QWEN
from ditkit_qwenimage.spec import QWENIMAGE
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import ZIMAGE

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
COLUMNS = {
    "3060": "rtx3060",
    "4060 Ti": "rtx4060ti-16",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
}
"""The GPUs whose hours the table has, by the head of their column; the 4060 Ti is that of 16 GB."""


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A recipe of a family."""

    spec: ModelSpec
    recipe: Recipe

    @property
    def file(self) -> str:
        """Its name."""
        return self.recipe.name

    def gpus_of(self, column: str) -> tuple[GPU, ...] | None:
        """The GPUs of a column of the table: its own first, then the others that the recipe names.
        None if it has less memory than promised."""
        (gpu,) = parse_gpus(COLUMNS[column])
        first, *others = parse_gpus(self.recipe.gpus)
        return (gpu, *others) if gpu.total >= first.total else None

    def run(self, **flags: Any) -> AbstractContextManager[RunContext]:
        """It as a run."""
        return run_of_recipe(
            self.spec, self.recipe, {key.replace("__", "."): value for key, value in flags.items()}
        )


def shipped(spec: ModelSpec) -> tuple[Shipped, ...]:
    """The recipes that a family's package ships."""
    folder = spec.demo.config.parent.parent / "recipes"
    return tuple(Shipped(spec=spec, recipe=recipe) for recipe in read_recipes(folder))


def _order(one: Shipped) -> tuple[int, int]:
    return list(GOALS).index(one.recipe.goal), parse_gpus(one.recipe.gpus)[0].total


ALL = tuple(
    sorted(
        (
            one
            for spec in (FLUX2, FLUX3, KREA2, LTX, QWEN, QWENIMAGE, WAN, ZIMAGE)
            for one in shipped(spec)
        ),
        key=_order,
    )
)
"""By goal, then by the GPU's memory, in the page's order."""


def recipes() -> Iterator[str]:
    """The tables, line by line: of one process, and of several."""
    yield f"| I want | of | I have | run file | GPU, GiB | host, GiB | {' | '.join(COLUMNS)} |"
    yield "|---|---|---|---|" + "---:|" * (2 + len(COLUMNS))
    yield from (row(one) for one in ALL if one.recipe.processes == 1)
    yield ""
    yield "| I want | of | I have | run file | each GPU, GiB | hours |"
    yield "|---|---|---|---|---:|---:|"
    yield from (row(one) for one in ALL if one.recipe.processes > 1)


def row(one: Shipped) -> str:
    """A recipe's line: peaks of each GPU and of the host, and hours by column."""
    recipe = one.recipe
    doing(f"planning {recipe.name}")
    with one.run() as run:
        planned = PlannedRun.of(jobs_of(run), launch_of(recipe))
    devices = planned.devices(parse_gpus(recipe.gpus))
    host = planned.host + sum(device.host for device in devices)
    path = recipe.path.relative_to(RECIPES.parents[1]).as_posix()
    peaks = " + ".join(f"{device.peak / GIB:.1f}" for device in devices)
    cells = [
        f"[{GOALS[recipe.goal]}](#{anchor(recipe.section)})",
        recipe.model,
        recipe.machine,
        f"[`{recipe.name}`](../../{path})",
        peaks,
    ]
    if recipe.processes > 1:
        cells.append(hours_in_words(planned.hours(parse_gpus(recipe.gpus))))
    else:
        cells.append(f"{host / GIB:.1f}" if host else "")
        cells += (_hours(planned, one.gpus_of(column)) for column in COLUMNS)
    return f"| {' | '.join(cells)} |"


def _hours(planned: PlannedRun, gpus: tuple[GPU, ...] | None) -> str:
    if gpus is None or not all(device.fits for device in planned.devices(gpus)):
        return "–"
    return hours_in_words(planned.hours(gpus))


def anchor(heading: str) -> str:
    """The link to a heading of a page."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")
