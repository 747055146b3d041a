"""The charts, numbers and tables of a run in its report."""

import json
from collections.abc import Mapping
from typing import Any

from ditkit_core.diagnostics.rendering import Html, element, html_table
from ditkit_core.diagnostics.report.charts import Chart, Line, format_number
from ditkit_core.diagnostics.report.data import PER_SIGMA, Section, Series
from ditkit_core.io.tables import Table

_NEW_LEVELS = "each step samples new noise levels"
_GROUPS: Mapping[str, Mapping[str, str]] = {
    "Optimization": {"lr": "learning rate", "grad_norm": "gradient norm"},
    "Speed and memory": {
        "seconds": "seconds per step",
        "tokens_per_second": "tokens per second",
        "peak_memory_bytes": "peak memory, GiB",
    },
    "Sentinels": {
        "activation_max": "largest activation",
        "activation_max_block": "block of the largest activation",
        "activation_drift": "largest growth of a block's activations since first seen",
        "nonfinite": "activations that are not finite",
        "grad_underflow": "share of gradients that underflow",
    },
}
_LOGARITHMIC = frozenset({"grad_norm", "activation_max", "activation_drift"})


def charts(section: Section) -> list[tuple[str, list[Chart]]]:
    """The charts by group; a group without numbers is left out."""
    series = section.series
    groups = [("Loss", [*_loss(series), *_held_out(series, "held_out", "held-out loss")])]
    by_level = [
        chart for s in section.sigmas for chart in _held_out(series, f"{PER_SIGMA}{s:g}", f"held-out loss, σ {s:g}")
    ]
    groups.append(("Held-out loss by noise level", by_level))
    known = {"loss", *(name for name in series if name.startswith("held_out"))}
    for title, names in _GROUPS.items():
        found = [_plain(name, words, series[name]) for name, words in names.items() if name in series]
        groups.append((title, found))
        known |= names.keys()
    groups.append(("Other numbers", [_plain(name, name, series[name]) for name in series if name not in known]))
    return [(title, found) for title, found in groups if found]


def _plain(name: str, title: str, series: Series) -> Chart:
    unit, logarithmic = _unit(name), name in _LOGARITHMIC
    return Chart(name=name, title=title, lines=[Line(series=series)], logarithmic=logarithmic, unit=unit)


def _unit(name: str) -> float:
    return 2.0**30 if name.endswith("_bytes") else 1.0


def _loss(series: Mapping[str, Series]) -> list[Chart]:
    if "loss" not in series:
        return []
    raw = series["loss"]
    # With one noise level per sample, the loss of single steps varies over nearly its whole range: only an average shows a trend.
    points = max(len(raw.steps) // 50, 1)
    smooth = Line(series=raw.smoothed(points))
    if points == 1:
        return [Chart(name="loss", title="training loss", lines=[Line(series=raw)], note=_NEW_LEVELS)]
    note = f"the line is an average over about {points} logged steps; {_NEW_LEVELS}"
    return [Chart(name="loss", title="training loss", lines=[Line(series=raw, look="faint"), smooth], note=note)]


def _held_out(series: Mapping[str, Series], name: str, title: str) -> list[Chart]:
    if name not in series:
        return []
    measured = series[name]
    ends = (series[f"{name}_low"], series[f"{name}_high"]) if {f"{name}_low", f"{name}_high"} <= series.keys() else None
    # Only a measurement at step 0 shows the model before training.
    level = measured.values[0] if measured.steps[0] == 0 else None
    notes = ["dashed: before training"] if level is not None else []
    if ends is not None:
        notes.append("band: 95 % interval of the change since before training")
    lines = [Line(series=measured)]
    return [Chart(name=name, title=title, lines=lines, band=ends, level=level, note="; ".join(notes))]


def key_numbers(section: Section) -> Html:
    """The newest value of each number, and the verdict of the held-out loss."""
    named = {name: words for names in _GROUPS.values() for name, words in names.items()}
    named = {"loss": "training loss", "held_out": "held-out loss"} | named
    rows = [
        [words, _cell(name, series.steps[-1], series.last), str(series.steps[-1])]
        for name, words in named.items()
        if (series := section.series.get(name)) is not None
    ]
    rows += [[name, text, str(step)] for name, (step, text) in section.texts.items()]
    verdict = element("ul", *(element("li", line) for line in validation_verdict(section)))
    return element("div", verdict, html_table(Table(head=["newest", "value", "step"], rows=rows), row_titles=True))


def validation_verdict(section: Section) -> list[str]:
    """Sentences about the held-out loss: its lowest value, its change, and whether the change may be chance."""
    measured = section.series.get("held_out")
    if measured is None:
        return [
            "No clips are held out (held_out.clips = 0): the training loss alone does not show whether a run gets better."
        ]
    if len(measured.steps) == 1:
        return [f"Held-out loss {format_number(measured.last)} at step {measured.steps[0]}; not measured again yet."]
    place = min(range(len(measured.values)), key=measured.values.__getitem__)
    step, lowest = measured.steps[place], measured.values[place]
    lines = [f"Held-out loss is lowest at step {step}: {format_number(lowest)}."]
    if measured.steps[0] == 0 and measured.values[0]:
        change = measured.last / measured.values[0] - 1
        lines.append(
            f"At step {measured.steps[-1]} it is {abs(change):.1%} {'lower' if change < 0 else 'higher'} than before training."
        )
        high, low = section.series.get("held_out_high"), section.series.get("held_out_low")
        if high is None or low is None:
            lines.append(
                "There is no confidence interval: clips of only one file are held out, or the grid was changed; hold out several files."
            )
        elif high.last < measured.values[0] or low.last > measured.values[0]:
            lines.append("The 95 % interval of that change does not contain 0.")
        else:
            lines.append("The 95 % interval of that change contains 0: it may be chance.")
    return lines


def tables(section: Section) -> list[Html]:
    """The tables that a reader can unfold: held-out numbers, data, environment, configuration."""
    config = {key: json.dumps(value, ensure_ascii=False, default=str) for key, value in section.config.items()}
    environments = section.about.get("environments")
    known = [_pairs(each) for each in environments if isinstance(each, dict)] if isinstance(environments, list) else []
    titled = {
        "Held-out loss in numbers": _measurements(section),
        "Data": _data(section.about.get("data")),
        "Environment": known,
        "Configuration": [_pairs(config)] if config else [],
    }
    return [element("details", element("summary", title), *parts) for title, parts in titled.items() if parts]


def _measurements(section: Section) -> list[Html]:
    """A table of the held-out measurements."""
    names = ["held_out", *(f"{PER_SIGMA}{s:g}" for s in section.sigmas)]
    columns = [f"{name}{end}" for name in names for end in ("", "_low", "_high") if f"{name}{end}" in section.series]
    if not columns:
        return []
    by_step: dict[int, dict[str, float]] = {}
    for name in columns:
        series = section.series[name].thinned(200)
        for step, value in zip(series.steps, series.values, strict=True):
            by_step.setdefault(step, {})[name] = value
    rows = [
        [str(step), *(_cell(name, step, values[name]) if name in values else "" for name in columns)]
        for step, values in sorted(by_step.items())
    ]
    return [html_table(Table(head=["step", *columns], rows=rows))]


def _cell(name: str, step: int, value: float) -> Html:
    """A rounded number, with the exact value, name and step of the metrics file as attributes for programs."""
    return element("data", format_number(value / _unit(name)), value=repr(value), data_key=name, data_step=step)


def _data(data: Any) -> list[Html]:
    if not isinstance(data, dict):
        return []
    held_out, excluded = data.get("held_out", []), data.get("excluded", [])
    facts = {
        "samples": data.get("samples"),
        "captions": data.get("captions"),
        "frames per second": data.get("fps"),
        "held out": ", ".join(map(str, held_out)) or "none",
        "left out": data.get("num_excluded", len(excluded)),
    }
    head = ["frames", "height", "width", "samples"]
    shapes = [[str(each.get(key, "")) for key in head] for each in data.get("shapes", [])]
    parts = [_pairs(facts), html_table(Table(head=head, rows=shapes))]
    if excluded:
        rows = [[str(each.get("file", "")), str(each.get("reason", ""))] for each in excluded]
        parts.append(html_table(Table(head=["left out", "why"], rows=rows)))
    return parts


def _pairs(values: Mapping[str, Any]) -> Html:
    return html_table(Table(rows=[[name, str(value)] for name, value in values.items()], num_left=2), row_titles=True)
