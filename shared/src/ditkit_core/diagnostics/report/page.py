"""report.html: a run on one page, with its charts, numbers and tables, and its samples, whose
videos play."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from ditkit_core.config.sizes import GIB
from ditkit_core.diagnostics.embedded import MEDIA_BYTES, PageMedia
from ditkit_core.diagnostics.report.charts import Chart
from ditkit_core.diagnostics.report.data import PER_SIGMA, SampleSet, Section, Series, read_sections
from ditkit_core.diagnostics.report.overview import overview
from ditkit_core.diagnostics.report.words import format_number
from ditkit_core.documents.document import Media, Medium, Strip
from ditkit_core.documents.html import html_page, json_script, markup, page_text
from ditkit_core.documents.tables import Table
from ditkit_core.io.files import dicts_of, write_text
from ditkit_core.io.run_dir import ListedSample, RunFolder
from ditkit_core.io.trackers import TIMES

RELOAD_SECONDS = 20
"""Time after which a page is loaded again while its run trains; reading one of 20 MB from a disk
takes much less."""
_MOST_STRIPS = 24
_IN_FOLDER = "in the run's folder"
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


def write_report(folder: Path) -> Path:
    """Write the report of a run's folder atomically, replacing an older one."""
    path = RunFolder(Path(folder)).report
    write_text(path, report_page(path.parent, read_sections(folder)))
    return path


def report_page(
    folder: Path, sections: Sequence[Section], logs: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Build the page.

    Args:
        folder: The folder that it is written into; its name is the title.
        sections: The sections of the run, at least one.
        logs: Last lines by name, which a page shows that is sent by a server; it loads its samples
            from there. None for a file.
    """
    name, now = folder.resolve().name, datetime.now(UTC)
    by_name = sorted(sections, key=lambda section: bool(section.name))
    media = PageMedia(folder, at_most=MEDIA_BYTES, embeds=logs is None)
    for file in files_by_importance(by_name):
        media.add(file)
    return html_page(
        "diagnostics/report/page.html",
        title=f"{name}: report",
        script=page_text("documents/strips.js", "diagnostics/report/report.js"),
        is_served=logs is not None,
        name=name,
        now=now,
        reload=RELOAD_SECONDS if _is_training(folder, is_served=logs is not None) else None,
        overviews=[overview(section) for section in sections if section.series],
        sections=[
            (section.name, drawn := groups(section), constants(section, drawn), tables(section))
            for section in sections
        ],
        logs=logs or {},
        samples=samples_parts(by_name, media),
        # A server sends no page that it did not make.
        sheet=_sheet(folder) if logs is None else "",
        numbers=json_script(
            {"sections": [section.to_json() for section in sections]}, id="numbers"
        ),
    )


def _sheet(folder: Path) -> str:
    """The address of the run's sheet in a page next to it; empty if there is none."""
    page = RunFolder(folder).sheet_page
    return page.relative_to(folder).as_posix() if page.is_file() else ""


def _is_training(folder: Path, *, is_served: bool) -> bool:
    """Whether a process trains in the folder, or was killed there, and the run is not complete. One
    that is watched may still begin to."""
    run = RunFolder(folder)
    return (is_served or bool(run.owner())) and run.completed_step() is None


def samples_parts(sections: Sequence[Section], media: Mapping[Path, Medium]) -> list[Media]:
    """The parts of the page with all samples; empty if there are none. `media` has how the page
    shows each file."""
    parts = []
    for section in sections:
        of = f" of {section.name}" if section.name else ""
        by_command = [_side_by_side(samples, media) for samples in section.by_command]
        for title, strips in {
            f"Samples{of}": _over_steps(section, media),
            f"Samples of the sample command{of}": by_command,
        }.items():
            if strips:
                more = f"{len(strips) - _MOST_STRIPS} more prompts are in the folder samples."
                lines = [more] if len(strips) > _MOST_STRIPS else []
                parts.append(Media(title=title, strips=strips[:_MOST_STRIPS], lines=lines))
    return parts


def files_by_importance(sections: Sequence[Section]) -> Iterator[Path]:
    """The newest samples, those before training, and then the others: the page may have no room for
    all."""
    ordered: list[SampleSet] = []
    for section in sections:
        ordered += [*section.samples[-1:], *section.samples[:1], *section.by_command[::-1]]
    ordered += [sample_set for section in sections for sample_set in section.samples[-2:0:-1]]
    return (sample.file for listed in ordered for sample in listed.samples[:_MOST_STRIPS])


def _over_steps(section: Section, media: Mapping[Path, Medium]) -> list[Strip]:
    """A strip for each prompt and seed, or one of all prompts if there are samples of one step
    only."""
    if len(section.samples) == 1:
        return [_side_by_side(section.samples[0], media)]
    strips: dict[tuple[str, str, int], list[Medium]] = {}
    for sample_set in section.samples:
        # one prompt may be listed twice, with other conditions
        occurrences = Counter[tuple[str, str]]()
        for sample in sample_set.samples:
            key = (sample.prompt, sample.seed)
            occurrences[key] += 1
            label = "before training" if sample_set.title == "step 0" else sample_set.title
            strips.setdefault((*key, occurrences[key]), []).append(_tile(sample, label, media))
    controls = _controls(section.config)
    return [
        Strip(heading=f"{prompt} (seed {seed})", tiles=tiles, control=controls.get(prompt, ""))
        for (prompt, seed, _), tiles in strips.items()
    ]


def _controls(config: Mapping[str, Any]) -> dict[str, str]:
    """Why prompts are controls: the last `sample.num_control_prompts`, and all without the trigger
    if some have it."""
    listed, count = config.get("sample.prompts"), config.get("sample.num_control_prompts")
    prompts = [str(prompt) for prompt in listed] if isinstance(listed, list) else []
    trigger = str(config.get("data.trigger") or "").strip().lower()
    without = [prompt for prompt in prompts if trigger and trigger not in prompt.lower()]
    controls = (
        dict.fromkeys(without, "control: without the trigger")
        if len(without) < len(prompts)
        else {}
    )
    # `--sample.prompts` may have replaced those that were counted.
    if isinstance(count, int) and 0 < count < len(prompts):
        controls |= dict.fromkeys(prompts[-count:], "control")
    return controls


def _side_by_side(sample_set: SampleSet, media: Mapping[Path, Medium]) -> Strip:
    samples = sample_set.samples[:_MOST_STRIPS]
    tiles = [_tile(sample, sample.prompt, media) for sample in samples]
    return Strip(heading=sample_set.title, tiles=tiles)


def _tile(sample: ListedSample, label: str, media: Mapping[Path, Medium]) -> Medium:
    medium = media.get(sample.file, Medium(problem=_IN_FOLDER))
    notes = [] if medium.is_embedded else [_IN_FOLDER]
    notes += [] if sample.decoded in ("", "whole") else [f"decoded {sample.decoded}"]
    return replace(medium, label=label, prompt=sample.prompt, notes=notes)


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
