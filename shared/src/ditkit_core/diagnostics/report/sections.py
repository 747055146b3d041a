"""The charts, numbers and tables of a run in its report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from markupsafe import Markup

from ditkit_core.config.sizes import GIB
from ditkit_core.diagnostics.report.charts import Chart
from ditkit_core.diagnostics.report.data import PER_SIGMA, Section, Series
from ditkit_core.diagnostics.report.words import format_number
from ditkit_core.documents.html import markup
from ditkit_core.documents.tables import Table
from ditkit_core.io.files import dicts_of
from ditkit_core.io.trackers import TIMES

_TRAINING = {
    "prior_loss": "loss of the steps that match the base",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "seconds": "seconds per step",
    "data_seconds": "of these, waited for data",
    "tokens_per_second": "tokens per second",
    "mfu": "share of the GPUs' peak rate",
    "peak_memory_bytes": "peak memory, GiB",
    "peak_reserved_bytes": "peak memory with the allocator's gaps, GiB",
}
_SENTINELS = {
    "activation_max": "largest activation",
    "activation_max_block": "block of the largest activation",
    "activation_drift": "largest growth of a block's activations since first seen",
    "nonfinite": "activations that are not finite",
    "grad_underflow": "share of gradients that underflow",
}
_NAMES = {"loss": "training loss", "held_out": "validation loss"} | _TRAINING | _SENTINELS
_LOGARITHMIC = frozenset({"grad_norm", "activation_max", "activation_drift"})
_SMOOTHED_POINTS = 10
"""Fewest points of a training loss that is smoothed."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Charts below one title."""

    title: str
    charts: Sequence[Chart]
    is_folded: bool = True
    note: str = ""
    """Shown after the title of a folded group."""


def groups(section: Section) -> list[Group]:
    """The charts by group, the important ones first. A constant series has no chart, and a group
    without charts is left out."""
    series = section.series
    levels = {f"{PER_SIGMA}{sigma:g}": f"σ {sigma:g}" for sigma in section.sigmas}
    changes = (_change(series[name], title) for name, title in levels.items())
    account = {
        name: name.removeprefix(TIMES).replace("/", ": ")
        for name in series
        if name.startswith(TIMES)
    }
    others = {
        name: name
        for name in series
        if not (name in _NAMES or name in account or name.startswith("held_out"))
    }
    broken = max(series["nonfinite"].values) if "nonfinite" in series else None
    finite = "all activations are finite" if broken == 0 else ""
    by_level = [
        chart for name, title in levels.items() for chart in _validation(series, name, title)
    ]
    loss = [*_loss(series), *_validation(series, "held_out", "validation loss")]
    candidates = [
        Group(title="Loss", charts=loss, is_folded=False),
        Group(title="Training", charts=_curves(series, _TRAINING), is_folded=False),
        Group(
            title="Validation loss by noise level",
            charts=by_level,
            note=", ".join(filter(None, changes)),
        ),
        Group(
            title="Seconds of a step",
            charts=_curves(series, account),
            note=_shares(series, account),
        ),
        Group(
            title="Sentinels",
            charts=_curves(series, _SENTINELS),
            is_folded=not broken,
            note=f"up to {broken:g} activations are not finite" if broken else finite,
        ),
        Group(title="Other numbers", charts=_curves(series, others)),
    ]
    # Stable: what is folded comes after the others.
    return sorted(
        (group for group in candidates if group.charts), key=lambda group: group.is_folded
    )


def _shares(series: Mapping[str, Series], account: Mapping[str, str]) -> str:
    """The mean share of each part in the time of steps, the largest first."""
    means = {title: fmean(series[name].values) for name, title in account.items()}
    total = sum(means.values()) or 1.0
    longest = sorted(means.items(), key=lambda pair: -pair[1])
    return ", ".join(
        f"{title} {mean / total:.0%}" for title, mean in longest if mean / total >= 0.005
    )


def _curves(series: Mapping[str, Series], names: Mapping[str, str]) -> list[Chart]:
    return [
        Chart(
            name=name,
            title=title,
            series=series[name],
            logarithmic=name in _LOGARITHMIC,
            unit=_unit(name),
        )
        for name, title in names.items()
        if name in series and not series[name].is_flat
    ]


def _unit(name: str) -> float:
    return GIB if name.endswith("_bytes") else 1.0


def _loss(series: Mapping[str, Series]) -> list[Chart]:
    if "loss" not in series:
        return []
    raw, note = series["loss"], "each step samples new noise levels"
    if len(raw.steps) < _SMOOTHED_POINTS:
        return [Chart(name="loss", title="training loss", series=raw, note=note)]
    # With one noise level per sample, the loss of single steps varies over nearly its whole range:
    # only an average shows a trend.
    points = max(len(raw.steps) // 50, 3)
    note = f"the line is an average over about {points} logged steps; {note}"
    return [
        Chart(name="loss", title="training loss", series=raw.smoothed(points), raw=raw, note=note)
    ]


def _change(series: Series, title: str) -> str:
    if series.steps[0] or len(series.steps) == 1 or not series.values[0]:
        return ""
    return f"{title} {series.last / series.values[0] - 1:+.0%}".replace("-", "−")


def _validation(series: Mapping[str, Series], name: str, title: str) -> list[Chart]:
    if name not in series:
        return []
    measured = series[name]
    ends = (
        (series[f"{name}_low"], series[f"{name}_high"])
        if {f"{name}_low", f"{name}_high"} <= series.keys()
        else None
    )
    # Only a measurement at step 0 shows the model before training.
    level = measured.values[0] if measured.steps[0] == 0 else None
    notes = ["dashed: before training"] if level is not None else []
    if ends is not None:
        notes.append("band: 95 % confidence interval of the change since then")
    return [
        Chart(
            name=name, title=title, series=measured, band=ends, level=level, note="; ".join(notes)
        )
    ]


def constants(section: Section, section_groups: Sequence[Group]) -> list[tuple[str, Markup]]:
    """The numbers that have no chart in `section_groups`: they did not change, or were measured
    once."""
    names = {chart.name for group in section_groups for chart in group.charts}
    flat = [
        name
        for name in section.series
        if name not in names and not name.endswith(("_low", "_high"))
    ]
    return [(_NAMES.get(name, name), _newest(section, name)) for name in flat]


def _newest(section: Section, name: str) -> Markup:
    series = section.series[name]
    return _cell(name, series.steps[-1], series.last)


def tables(section: Section) -> dict[str, list[Table]]:
    """The tables that a reader can unfold, by title: newest numbers, validation losses, data,
    environment, configuration."""
    config = {
        key: json.dumps(value, ensure_ascii=False, default=str)
        for key, value in section.config.items()
    }
    titled = {
        "Newest numbers": _numbers(section),
        "Validation loss in numbers": _measurements(section),
        "Data": _data(section),
        "Environment": [_pairs(environment) for environment in section.environments],
        "Configuration": [_pairs(config)] if config else [],
    }
    return {title: parts for title, parts in titled.items() if parts}


def _numbers(section: Section) -> list[Table]:
    """A table of the newest value of each number."""
    rows = [
        [_NAMES.get(name, name), _newest(section, name), str(series.steps[-1])]
        for name, series in section.series.items()
        if not name.startswith("held_out/") and not name.endswith(("_low", "_high"))
    ]
    rows += [[name, text, str(step)] for name, (step, text) in section.texts.items()]
    return [Table(head=["", "newest value", "step"], rows=rows)] if rows else []


def _measurements(section: Section) -> list[Table]:
    """A table of the validation losses."""
    names = ["held_out", *(f"{PER_SIGMA}{s:g}" for s in section.sigmas)]
    columns = [
        f"{name}{end}"
        for name in names
        for end in ("", "_low", "_high")
        if f"{name}{end}" in section.series
    ]
    by_step: dict[int, dict[str, Markup]] = {}
    for name in columns:
        series = section.series[name].downsampled(200)
        for step, value in zip(series.steps, series.values, strict=True):
            by_step.setdefault(step, {})[name] = _cell(name, step, value)
    rows = [
        [str(step), *(cells.get(name, "") for name in columns)]
        for step, cells in sorted(by_step.items())
    ]
    return [Table(head=["step", *columns], rows=rows)] if columns else []


def _cell(name: str, step: int, value: float) -> Markup:
    """A rounded number, with the exact value, name and step of the metrics file as attributes for
    programs."""
    cell = '<data value="{}" data-key="{}" data-step="{}">{}</data>'
    return markup(cell, repr(value), name, step, format_number(value / _unit(name)))


def _data(section: Section) -> list[Table]:
    if not (data := section.data):
        return []
    excluded = dicts_of(data.get("excluded"))
    facts = {
        "samples": data.get("samples"),
        "captions": data.get("captions"),
        "with a loss mask": data.get("masks"),
        "frames per second": data.get("fps"),
        "held out": ", ".join(map(str, section.held_out)) or "none",
        "left out": data.get("num_excluded", len(excluded)),
    }
    listed = [_columns(dicts_of(data.get("shapes")), ["frames", "height", "width", "samples"])]
    return [_pairs(facts), *listed, *([_columns(excluded, ["file", "reason"])] if excluded else [])]


def _columns(rows: Sequence[Mapping[str, Any]], head: Sequence[str]) -> Table:
    return Table(head=head, rows=[[str(row.get(key, "")) for key in head] for row in rows])


def _pairs(values: Mapping[str, Any]) -> Table:
    return Table(rows=[[name, str(value)] for name, value in values.items()], num_left=2)
