"""The data of a report: the files of one or more run folders as plain values."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ditkit_core.config.schema import config_fields
from ditkit_core.config.toml import flatten, read_toml
from ditkit_core.diagnostics.verification.exported import current_results
from ditkit_core.errors import UserError
from ditkit_core.io.files import dicts_of, json_part
from ditkit_core.io.run_dir import (
    ListedSample,
    RunFolder,
    is_changed_list,
    listed_samples,
    sample_number,
)
from ditkit_core.run.config import RunConfig

MOST_POINTS = 2000
"""Largest number of points of a curve in a page."""
MOST_TIMES = 12
"""Largest number of steps whose samples a page shows, and of calls of the sample command."""
RANDOM_BASE = "random_base"
"""In the model's part of `about.json`: the base is a demo's that was never trained."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A number over the steps of a run."""

    steps: Sequence[int]
    """Optimizer steps, ascending."""
    values: Sequence[float]

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]

    @property
    def is_flat(self) -> bool:
        """Whether a curve of it would show nothing: all values are within a hundredth of the
        largest."""
        low, high = min(self.values), max(self.values)
        return high - low <= 0.01 * max(abs(low), abs(high))

    def downsampled(self, at_most: int = MOST_POINTS) -> "Series":
        """At most this many of its points: the lowest and highest of each interval, so that no
        spike is lost, and both ends."""
        count = len(self.steps)
        if count <= at_most:
            return self
        intervals = max((at_most - 2) // 2, 1)
        indices = {0, count - 1}
        for i in range(intervals):
            # Lowest and highest, not an average: readers look for spikes.
            span = range(i * count // intervals, (i + 1) * count // intervals)
            indices |= {
                min(span, key=self.values.__getitem__),
                max(span, key=self.values.__getitem__),
            }
        chosen = sorted(indices)
        return Series(
            steps=[self.steps[i] for i in chosen], values=[self.values[i] for i in chosen]
        )

    def smoothed(self, points: int) -> "Series":
        """The exponential average over about this many points, corrected for the start as Adam
        corrects its averages."""
        keep = 1 - 1 / max(points, 1)
        total, weight, averaged = 0.0, 0.0, list[float]()
        for value in self.values:
            total, weight = keep * total + value, keep * weight + 1
            averaged.append(total / weight)
        return Series(steps=self.steps, values=averaged)


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """The samples of one step, or of one call of the sample command."""

    title: str
    """`step 250`, or the first part of the file names."""
    samples: Sequence[ListedSample]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One run, or one expert of a run with several."""

    name: str
    """Name of its folder; empty for the run itself."""
    series: Mapping[str, Series]
    """Numbers by their name in the metrics file."""
    texts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Texts of the metrics file by name, each with the step of its last value."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Values by dotted key."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What is trained, as `environment.py` writes it; so are the next two."""
    data: Mapping[str, Any] = field(default_factory=dict)
    environments: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[SampleSet] = ()
    """Samples of training, by step."""
    by_command: Sequence[SampleSet] = ()
    """Samples of the sample command, in the order of its calls."""
    verified: Mapping[str, bool] = field(default_factory=dict)
    """Whether the program that reads an export agreed with the trained model, by name of the
    export."""
    completed: int | None = None
    """Step at which the run was completed; None if it is not complete."""

    @property
    def step(self) -> int:
        """The last step with a logged number; 0 if there is none."""
        return max((series.steps[-1] for series in self.series.values()), default=0)

    @property
    def held_out(self) -> list[Any]:
        """The samples that are held out for validation."""
        listed = self.data.get("held_out")
        return listed if isinstance(listed, list) else []

    @property
    def sigmas(self) -> list[float]:
        """The noise levels of the held-out loss, ascending."""
        names = (name.removeprefix(PER_SIGMA) for name in self.series if name.startswith(PER_SIGMA))
        return sorted(float(name) for name in names if not name.endswith(("_low", "_high")))

    def to_json(self) -> dict[str, Any]:
        """The numbers for the page's script."""
        series = {name: curve.downsampled() for name, curve in self.series.items()}
        return {
            "name": self.name,
            "series": {
                name: {"steps": list(s.steps), "values": list(s.values)}
                for name, s in series.items()
            },
        }


PER_SIGMA = "held_out/sigma_"
"""Prefix of the name of the held-out loss at one noise level."""


def read_sections(folder: Path) -> list[Section]:
    """The run in a folder, and the runs in the folders directly below it (of experts).

    Without metrics of its own, a folder with such runs comes last: it contains the samples of all
    experts.
    """
    folder = Path(folder)
    below = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    folders = (
        [folder, *below]
        if RunFolder(folder).metrics.is_file()
        else [*below, *([folder] if below else [])]
    )
    if not folders:
        raise UserError(
            f"{folder} has no metrics.jsonl; name the folder of a run that has begun to train "
            f"(--run RUN)"
        )
    return [_read_section(path, "" if path == folder else path.name) for path in folders]


def _read_section(path: Path, name: str) -> Section:
    run = RunFolder(path)
    series, texts = read_metrics(run.metrics) if run.metrics.is_file() else ({}, {})
    return Section(
        name=name,
        series=series,
        texts=texts,
        config=_public(flatten(read_toml(run.config_file))) if run.config_file.is_file() else {},
        model=json_part(run.about, "model"),
        data=json_part(run.about, "data"),
        environments=dicts_of(json_part(run.about).get("environments")),
        samples=_training_samples(run.samples),
        by_command=_by_command(run.samples),
        verified={name: result.agrees for name, result in current_results(run).items()},
        completed=run.completed_step(),
    )


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key without those that may hold a secret: people send the page to others."""
    private = {key for key, field in config_fields(RunConfig).items() if field.holds == "private"}
    return {key: value for key, value in values.items() if key not in private}


def read_metrics(path: Path) -> tuple[dict[str, Series], dict[str, tuple[int, str]]]:
    """The numbers of a metrics file by name, and the last value of each text.

    Lines that are incomplete after a crash, and values that are neither finite numbers nor text,
    are skipped.
    """
    points: dict[str, tuple[list[int], list[float]]] = {}
    texts: dict[str, tuple[int, str]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
            step = int(row.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue  # the last line may be incomplete while the run writes
        if not 0 <= step < 2**53:  # no number of steps, and not exact on an axis
            continue
        for name, value in row.items():
            if isinstance(value, str):
                texts[name] = (step, value)
            # An int may be larger than any float.
            elif isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                steps, values = points.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))
    return {
        name: Series(steps=steps, values=values) for name, (steps, values) in points.items()
    }, texts


def _training_samples(folder: Path) -> list[SampleSet]:
    """The samples of training: evenly spaced steps, including the first and the last."""
    names = ((path.stem.removeprefix("step-"), path) for path in folder.glob("step-*.json"))
    steps = sorted((int(step), path) for step, path in names if step.isdecimal())
    sample_sets = [
        sample_set for step, path in steps if (sample_set := _listed(path, f"step {step}"))
    ]
    if len(sample_sets) <= MOST_TIMES:
        return sample_sets
    return [
        sample_sets[round(i * (len(sample_sets) - 1) / (MOST_TIMES - 1))] for i in range(MOST_TIMES)
    ]


def _by_command(folder: Path) -> list[SampleSet]:
    """The newest samples of the sample command."""
    listed = sorted(
        filter(sample_number, folder.glob("*.json")),
        key=lambda path: (sample_number(path), path.name),
    )
    return [sample_set for path in listed if (sample_set := _listed(path, path.stem))][-MOST_TIMES:]


def _listed(path: Path, title: str) -> SampleSet | None:
    """The samples in a JSON list; None if there are none."""
    samples = listed_samples(path)
    # Its prompts and seeds may then belong to other samples.
    changed = (
        f" ({path.name} was changed or damaged since it was written)"
        if is_changed_list(path)
        else ""
    )
    return SampleSet(title=f"{title}{changed}", samples=samples) if samples else None
