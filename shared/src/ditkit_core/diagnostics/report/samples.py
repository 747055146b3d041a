"""The samples of a run on its page: for each prompt a strip over the steps, with videos that
play."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ditkit_core.diagnostics.report.data import SampleSet, Section
from ditkit_core.documents.document import Media, Medium, Strip
from ditkit_core.io.run_dir import ListedSample

_MOST_STRIPS = 24
_IN_FOLDER = "in the run's folder"


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
        occurrences = Counter[
            tuple[str, str]
        ]()  # one prompt may be listed twice, with other conditions
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
