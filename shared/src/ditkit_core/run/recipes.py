"""Recipes: complete run files that a family's package ships, and what each promises. Read without
torch."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.config.nearest import nearest_word
from ditkit_core.errors import UserError

GOALS = {
    "character": "a character",
    "style": "a style",
    "edit": "an edit",
    "motion": "a motion",
    "long": "clips of three seconds",
    "start_image": "a start image that moves",
    "control": "a video that follows another",
    "speech": "a speaking person",
    "replace": "a person put into a video",
    "full": "all weights trained",
}
"""What recipes are for: the word that `--recipe` takes, and what a person wants, in the order of
the page."""
LIST = "list"
"""The word of `--recipe` that prints the table."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run file with its promise."""

    name: str
    path: Path
    """The run file."""
    goal: str
    """One of `GOALS`."""
    model: str
    """The model in a person's words."""
    gpus: str
    """The GPUs that it promises to fit, as `--gpus` takes them."""
    processes: int = 1
    """Processes that train it, with a GPU each; a single one has all of its GPUs."""
    link: str = ""
    """How the GPUs of several processes are connected, as `--link` takes it."""
    host: str = ""
    """Memory of the host that it promises to fit, as `--host` takes it; empty where hardly any is
    used."""
    hours: int
    """Promised: the whole run takes at most this long on the slowest known GPUs of these sizes."""
    section: str
    """The heading of docs/recipes/README.md that is about it."""

    @property
    def machine(self) -> str:
        """The machine that it is for, in a few words."""
        gpus = self.gpus.replace("GiB", " GB").replace(",", " + ")
        if self.processes > 1:
            number, _, name = gpus.partition("x")
            gpus = f"{number} × {name.upper()}"
        return f"{gpus}, {self.host.replace('GiB', ' GB')} host" if self.host else gpus


def read_recipes(folder: Path) -> tuple[Recipe, ...]:
    """The recipes of a folder, in the order of its index.toml; none where there is no such
    folder."""
    index = folder / "index.toml"
    promises = tomllib.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
    return tuple(
        Recipe(name=name, path=folder / f"{name}.toml", **promise)
        for name, promise in promises.items()
    )


def recipes_called(word: str, recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """The recipes of a goal, or the one of a name; all of them for `list`."""
    if called := tuple(recipe for recipe in recipes if word in (LIST, recipe.goal, recipe.name)):
        return called
    words = [
        LIST,
        *dict.fromkeys(recipe.goal for recipe in recipes),
        *(recipe.name for recipe in recipes),
    ]
    if not recipes:
        raise UserError(f"--recipe {word}: this family has no recipes; give a run file")
    near = nearest_word(word, words)
    goals = ", ".join(dict.fromkeys(recipe.goal for recipe in recipes))
    hint = f"did you mean {near}?" if near else f"give a goal ({goals}) or a name."
    raise UserError(f"--recipe {word} is unknown; {hint} All of them: --recipe {LIST}")
