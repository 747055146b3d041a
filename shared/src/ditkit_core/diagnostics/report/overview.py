"""The top of a run's page: whether training lowered the loss, what was trained, and on what."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ditkit_core.adapters.config import METHOD_NAMES
from ditkit_core.config.sizes import GIB
from ditkit_core.diagnostics.report.data import RANDOM_BASE, Section
from ditkit_core.diagnostics.report.words import (
    Verdict,
    format_duration,
    format_number,
    judge_change,
    plural,
)
from ditkit_core.io.files import dicts_of


def overview(section: Section) -> dict[str, Any]:
    """The top of a section as values of its template: its state, the verdict, and what was trained,
    by title."""
    verdict, details = section_verdict(section)
    facts = {
        "Model": _model(section),
        "Data": _data(section),
        "Training": _training(section),
        "Device": _device(section),
        **({"Exports": _exports(section.verified)} if section.verified else {}),
    }
    if section.model.get(RANDOM_BASE):
        details = [*details, RANDOM_SAMPLES]
    headline = verdict.headline[0].upper() + verdict.headline[1:] + "."
    return {
        "name": section.name,
        "state": _state(section),
        "kind": verdict.kind,
        "headline": headline,
        "details": details,
        "facts": facts,
    }


def section_verdict(section: Section) -> tuple[Verdict, list[str]]:
    """The verdict on the validation loss, and sentences about it."""
    measured = section.series.get("held_out")
    if measured is None:
        words = "validation loss was not measured"
        why = "No clips are held out (held_out.clips = 0), and the training loss alone does not show whether a run gets better."
        return Verdict(words, "unclear", f"nothing tells whether it learns: {words}"), [
            f"{why} {_COMPARE}"
        ]
    first, last = measured.values[0], measured.last
    if len(measured.steps) == 1 or measured.steps[0] or not first:
        words = f"validation loss is {format_number(last)} at step {measured.steps[-1]}"
        why = "It was not measured before and after training."
        why_unclear = (
            "nothing to compare with"
            if measured.steps[0] or len(measured.steps) > 1
            else "too early to tell"
        )
        return Verdict(words, "unclear", f"{why_unclear}: {words}"), [why]
    ends = [
        section.series[name] for name in ("held_out_low", "held_out_high") if name in section.series
    ]
    # The grid of noise levels may have changed since an interval was measured.
    interval = (
        [end.last for end in ends]
        if {end.steps[-1] for end in ends[1:]} == {measured.steps[-1]}
        else None
    )
    lowest = min(range(len(measured.values)), key=measured.values.__getitem__)
    values = f"{format_number(first)} before training, {format_number(last)} at step {measured.steps[-1]}"
    details = f"Validation loss: {values}"
    is_past = measured.values[lowest] < last
    if is_past:
        details += (
            f"; lowest at step {measured.steps[lowest]}: {format_number(measured.values[lowest])}"
        )
    noun = "clip" if _of_clips(section) else "image"
    verdict = judge_change(first, last, interval, len(section.held_out), noun)
    advice = (
        LOOK if verdict.kind == "fell" and not section.model.get(RANDOM_BASE) else verdict.advice
    )
    if verdict.kind == "rose" and is_past and measured.steps[lowest]:
        advice += " The best save is exported by the export command with --step best."
    return verdict, [line for line in (f"{verdict.certainty} {details}.".strip(), advice) if line]


_COMPARE = "Compare the samples, and hold out 4 to 8 clips in the next run."
LOOK = "The loss does not tell what is learnt: compare samples from before training with those after it."
RANDOM_SAMPLES = "The base has random weights, so samples are noise before training and after it."


def _state(section: Section) -> str:
    steps = section.config.get("train.steps")
    if section.completed is not None and section.completed >= section.step:
        return f"Complete at step {section.completed}."
    return f"At step {section.step}" + (f" of {steps}." if isinstance(steps, int) else ".")


def _model(section: Section) -> list[str]:
    config, model = section.config, section.model
    name = " ".join(str(model[key]) for key in ("family", "preset") if model.get(key))
    base = str(config.get("model.base") or config.get("model.transformer") or "")
    if base.count("/") != 1 or base[0] in "./~":  # a path; a name on the hub has one slash
        base = Path(base).name
    trained = model.get("trained_parameters")
    count = f"{trained:,} trained parameters" if isinstance(trained, int) else ""
    method = config.get("adapter.method", "")
    if name_of := METHOD_NAMES.get(str(method)):
        method = f"{'DoRA' if config.get('adapter.use_dora') else name_of}, rank {config.get('adapter.rank')}"
        method += _in_brackets(config.get("adapter.rank_pattern"))
    elif method == "full":
        method = "all weights"
    return _said(name or base, base if name else "", str(method), count, *_files(config))


def _files(config: Mapping[str, Any]) -> Iterator[str]:
    """A line for each setting that names adapter files."""
    for key, use in {
        "base.merge": "merged into the base",
        "base.merge_low": "merged into the base of the low-noise expert",
        "base.assistant": "in training alone, as an assistant",
        "base.assistant_low": "in training of the low-noise expert alone, as an assistant",
        "sample.adapter": "in samples alone",
        "sample.adapter_low": "in samples of the low-noise expert alone",
    }.items():
        entries = config.get(key) or []
        if names := [
            Path(str(entry)).name for entry in (entries if isinstance(entries, list) else [entries])
        ]:
            yield f"{', '.join(names)}: {use}"


def _data(section: Section) -> list[str]:
    config, folder = section.config, Path(str(section.config.get("data.folder", ""))).name
    data, shapes = section.data, dicts_of(section.data.get("shapes"))
    frames = _frames(section)
    sizes = {f"{shape.get('height')} × {shape.get('width')}" for shape in shapes}
    of_clips = _of_clips(section)
    parts = [min(sizes) if len(sizes) == 1 else f"{len(sizes)} sizes"] if sizes else []
    if of_clips:
        parts.insert(0, f"{' to '.join(map(str, dict.fromkeys((frames[0], frames[-1]))))} frames")
        parts += [f"{fps:g} fps"] if isinstance(fps := data.get("fps"), int | float) else []
    excluded = data.get("num_excluded")
    masks = f"{data.get('masks')} with loss masks (weight {config.get('train.mask_weight', 0):g} outside)"
    return _said(
        plural(data["samples"], "clip" if of_clips else "image") if "samples" in data else "",
        f"folder {folder}" if folder else "",
        ", ".join(parts),
        masks if data.get("masks") else "",
        "mirrored in half of their uses" if config.get("data.flip") else "",
        f"{len(section.held_out)} held out for validation" if section.held_out else "",
        f"{excluded} left out" if excluded else "",
    )


def _frames(section: Section) -> list[int]:
    """The numbers of frames in the data, ascending."""
    return sorted(
        {
            shape["frames"]
            for shape in dicts_of(section.data.get("shapes"))
            if isinstance(shape.get("frames"), int)
        }
    )


def _of_clips(section: Section) -> bool:
    return max(_frames(section), default=1) > 1


def _training(section: Section) -> list[str]:
    config, seconds = section.config, section.series.get("seconds")
    lr, batch, times = (
        config.get(key) for key in ("optim.lr", "train.batch_size", "train.accumulation")
    )
    share = config.get("prior.match_base")
    samples = batch * times if isinstance(batch, int) and isinstance(times, int) else 0
    per_step = fmean(seconds.values) if seconds else 0.0
    return _said(
        plural(section.step, "step"),
        f"learning rate {lr:g}{_other_rates(config)}, {config.get('optim.name')}"
        if isinstance(lr, float)
        else "",
        f"{plural(samples, 'sample')} per step"
        if samples and not config.get("train.batch_tokens")
        else "",
        f"{share:.0%} of the steps match the base's own prediction"
        if isinstance(share, float) and share
        else "",
        f"about {format_duration(per_step * section.step)}, {format_duration(per_step)} per step"
        if seconds
        else "",
    )


def _other_rates(config: Mapping[str, Any]) -> str:
    """The learning rates besides `optim.lr`."""
    ratio = config.get("optim.loraplus_lr_ratio", 1)
    plus = [f"{ratio:g} times for B"] if isinstance(ratio, int | float) and ratio != 1 else []
    return _in_brackets([*(config.get("optim.lr_pattern") or ()), *plus])


def _in_brackets(entries: Any) -> str:
    return f" ({', '.join(map(str, entries))})" if isinstance(entries, list) and entries else ""


def _device(section: Section) -> list[str]:
    environment: Any = section.environments[-1] if section.environments else {}
    device, threads = str(environment.get("devices", "")), environment.get("CPU threads")
    peak = section.series.get("peak_memory_bytes")
    return _said(
        f"CPU, {threads} threads" if device == "cpu" and threads else device,
        f"peak memory {format_number(peak.last / GIB)} GiB" if peak else "",
        f"torch {environment['torch']}" if "torch" in environment else "",
    )


def _exports(verified: Mapping[str, bool]) -> list[str]:
    wrong = [name for name, agrees in verified.items() if not agrees]
    return _said(
        f"{len(verified) - len(wrong)} of {len(verified)} verified",
        *(
            f"{name} does not work in the program that reads it: verified.json says how"
            for name in wrong
        ),
    )


def _said(first: str, *lines: str) -> list[str]:
    """A headline and the lines below it that say something."""
    return [first or "not known", *filter(None, lines)]
