"""What a report is made of: the files of a run folder, or of several, as plain values."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditkit_core.config.toml import flatten, read_toml
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import DRAWN, RunFolder

MOST_POINTS = 2000
"""Points of a curve that a page holds."""
MOST_DRAWINGS = 12
"""Steps whose samples a page shows, and as many drawings by hand."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A number over the steps of a run."""

    steps: Sequence[int]
    """Ascending."""
    values: Sequence[float]

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    def thinned(self, at_most: int = MOST_POINTS) -> "Series":
        """At most so many of its points, as they are: of each stretch the lowest and the highest, so that no spike is lost; and both ends."""
        count = len(self.steps)
        if count <= at_most:
            return self
        stretches = max((at_most - 2) // 2, 1)
        kept = {0, count - 1}
        for i in range(stretches):
            # Lowest and highest, not an average: a spike is what a reader looks for.
            places = range(i * count // stretches, (i + 1) * count // stretches)
            kept |= {min(places, key=self.values.__getitem__), max(places, key=self.values.__getitem__)}
        chosen = sorted(kept)
        return Series(steps=[self.steps[i] for i in chosen], values=[self.values[i] for i in chosen])

    def smoothed(self, points: int) -> "Series":
        """The exponential average with a memory of about so many points; the first values weigh no more than others."""
        keep = 1 - 1 / max(points, 1)
        total, weight, averaged = 0.0, 0.0, list[float]()
        for value in self.values:
            total, weight = keep * total + value, keep * weight + 1
            averaged.append(total / weight)
        return Series(steps=self.steps, values=averaged)


@dataclass(frozen=True, kw_only=True)
class GeneratedSheet:
    """The samples of one step, or of one drawing by hand."""

    title: str
    """Which step, or the beginning of the files' names."""
    picture: Path
    """Shows all of them."""
    samples: Sequence[Mapping[str, Any]]
    """Of each `file`, `prompt` and `seed`."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One run; of a run with several experts, one of them."""

    name: str
    """Its folder, or empty for the run itself."""
    series: Mapping[str, Series]
    """By the name that the metrics file gives it."""
    texts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """What is no number, with the step at which it was last said."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """By dotted key."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """As `environment.py` writes it."""
    drawings: Sequence[GeneratedSheet] = ()
    """By step."""
    by_hand: Sequence[GeneratedSheet] = ()
    """In the order in which they were drawn."""
    completed: int | None = None
    """The step at which the run was completed; None while it is not."""

    @property
    def step(self) -> int:
        """The last step of which something is known."""
        return max((series.steps[-1] for series in self.series.values()), default=0)

    @property
    def sigmas(self) -> list[float]:
        """The noise levels of the held-out loss, ascending."""
        names = (name.removeprefix(PER_SIGMA) for name in self.series if name.startswith(PER_SIGMA))
        return sorted(float(name) for name in names if not name.endswith(("_low", "_high")))

    def to_json(self) -> dict[str, Any]:
        """The numbers that the page holds."""
        thinned = {name: series.thinned() for name, series in self.series.items()}
        return {
            "name": self.name,
            "series": {name: {"steps": list(s.steps), "values": list(s.values)} for name, s in thinned.items()},
        }


PER_SIGMA = "held_out/sigma_"
"""Before a noise level: the name of its held-out loss."""


def read_sections(folder: Path) -> list[Section]:
    """The run in a folder, and the runs in the folders directly below it. What was only drawn with all of these comes last.

    Raises:
        UserError: If there is none.
    """
    folder = Path(folder)
    below = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    found = [folder, *below] if RunFolder(folder).metrics.is_file() else [*below, *([folder] if below else [])]
    if not found:
        raise UserError(f"{folder} has no metrics.jsonl; name the folder of a run that has begun to train (--run RUN)")
    return [_read_section(path, "" if path == folder else path.name) for path in found]


def _read_section(path: Path, name: str) -> Section:
    run = RunFolder(path)
    series, texts = read_metrics(run.metrics) if run.metrics.is_file() else ({}, {})
    return Section(
        name=name,
        series=series,
        texts=texts,
        config=flatten(read_toml(run.config_file)) if run.config_file.is_file() else {},
        about=_json(run.about) or {},
        drawings=_drawings(run.samples),
        by_hand=_by_hand(run.samples),
        completed=run.completed_step(),
    )


def read_metrics(path: Path) -> tuple[dict[str, Series], dict[str, tuple[int, str]]]:
    """The numbers of a metrics file by name, and the newest of what is text. What no run writes is passed over: a line that was torn by a
    crash, and what is neither a finite number nor text."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    texts: dict[str, tuple[int, str]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
            step = int(row.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        for name, value in row.items():
            if isinstance(value, str):
                texts[name] = (step, value)
            elif isinstance(value, int | float) and math.isfinite(value):
                steps, values = points.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))
    return {name: Series(steps=steps, values=values) for name, (steps, values) in points.items()}, texts


def _drawings(folder: Path) -> list[GeneratedSheet]:
    """What was drawn while training went on and at its end: evenly spaced steps, the first and the last with them."""
    names = ((path.stem.removeprefix("step-"), path) for path in folder.glob("step-*.json"))
    steps = sorted((int(step), path) for step, path in names if step.isdecimal())
    found = [drawing for step, path in steps if (drawing := _drawing(path, f"Step {step}"))]
    if len(found) <= MOST_DRAWINGS:
        return found
    return [found[round(i * (len(found) - 1) / (MOST_DRAWINGS - 1))] for i in range(MOST_DRAWINGS)]


def _by_hand(folder: Path) -> list[GeneratedSheet]:
    """What the sample command drew: the newest."""
    listed = sorted(folder.glob(f"{DRAWN}*.json"), key=lambda path: (len(path.name.split("-")[1]), path.name))
    return [drawing for path in listed if (drawing := _drawing(path, path.stem))][-MOST_DRAWINGS:]


def _drawing(path: Path, title: str) -> GeneratedSheet | None:
    """What a list of samples names; None if it is torn, or its picture is gone."""
    listed = _json(path)
    if listed is None or not (picture := path.parent / Path(str(listed.get("shown", ""))).name).is_file():
        return None
    return GeneratedSheet(title=title, picture=picture, samples=listed.get("samples", []))


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
