"""The caption command: a vision-language model writes the captions that a dataset lacks."""

import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from ditkit_core.commands.options import CaptionOptions, parse_words
from ditkit_core.data.caption_files import CaptionFiles, CaptionItem, caption_folders
from ditkit_core.data.captions import has_trigger
from ditkit_core.data.media.clip import spread_images
from ditkit_core.diagnostics.doctor.captions import LEFTOVERS, WHOLE_SENTENCES
from ditkit_core.diagnostics.doctor.findings import listed
from ditkit_core.diagnostics.report.words import format_duration, plural
from ditkit_core.errors import EnvironmentFault, UserError
from ditkit_core.families.caption_prompts import caption_prompt
from ditkit_core.families.captioner import Answer, Captioner, CaptionRequest
from ditkit_core.io.console import progress, say, warn
from ditkit_core.io.files import json_hash
from ditkit_core.models.paths import locate_model, model_to_fetch, nothing_fetched
from ditkit_core.models.precision import parse_dtype
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run

STREAMED_BATCH = 8
"""Media files at once where layers are streamed: each token reads all of them, however many."""

_CHAT_TOKENS = re.compile(r"<\|[^|<>]{1,40}\|>|\[/?INST\]|</?s>|<(image|pad|unk|eos|bos)>")

_RUN_WORDS, _FEWEST_RUNS = 4, 12
"""Words of a run, and the fewest runs that are counted. A model that only takes the likeliest token
may never leave a loop: then less than half of all runs differ."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What all captions of a command have in common."""

    options: CaptionOptions
    trigger: str
    words: tuple[int, int]

    @property
    def settings(self) -> str:
        """Digest of all that a caption depends on besides its file."""
        names = ("model", "template", "goal", "instruction", "max_tokens", "frames", "side")
        settings = {name: getattr(self.options, name) for name in names}
        return json_hash({**settings, "trigger": self.trigger, "words": self.words})


@dataclass(kw_only=True)
class _Outcome:
    """What became of the media files, by name."""

    written: list[str] = field(default_factory=list)
    shortened: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Each with the reason."""


def caption(spec: ModelSpec, config: RunConfig, options: CaptionOptions) -> int:
    """Write captions for the media files of a dataset that have none.

    Returns:
        0; 1 if a file could not be captioned.

    Raises:
        UserError: If the dataset, the model or the options cannot be used.
    """
    run = create_run(spec, config)
    trigger = options.trigger.strip() or config.data.trigger.strip()
    if "{trigger}" in options.template + options.instruction and not trigger:
        raise UserError(
            "--template or --instruction has {trigger}, and no trigger word is set; add --trigger "
            "WORD"
        )
    datasets = caption_folders(
        config.data, run.auxiliary.columns, edits=run.spec.data.reference_size is not None
    )
    words = parse_words(options.words) or run.spec.data.caption_words
    task = _Task(options=options, trigger=trigger, words=words)
    outcome = _Outcome()
    todo = [(files, item) for files in datasets for item in _wanted(files, task, outcome)]
    if options.preview:
        todo = todo[: options.preview]
    if options.plan:
        for line in outcome.failed:
            warn(line)
    if todo:
        try:
            with nothing_fetched() if options.plan else nullcontext():
                captioner = _captioner(config, options, run.auxiliary.device, spec.name)
        except UserError:
            download = model_to_fetch(options.model, "captioner") if options.plan else ""
            if not download:
                raise
            say(f"to be fetched: {download}; whether it fits is known when it is here")
            return 1 if outcome.failed else 0
        at_once = options.batch or (STREAMED_BATCH if captioner.streams else 1)
        say(
            f"captions by {options.model}: {captioner.needed_bytes / 2**30:.1f} GiB of weights in "
            f"{config.encode.text_dtype}; {at_once} at once, up to {options.max_tokens} tokens each"
        )
        if options.plan:
            say(f"captioner: to be {captioner.way}")
            return 1 if outcome.failed else 0
        captioner.load()
        _caption_all(captioner, todo, at_once, task, outcome)
    if options.plan:
        return 1 if outcome.failed else 0
    return _summary(outcome, options)


def _captioner(
    config: RunConfig, options: CaptionOptions, device: torch.device, family: str
) -> Captioner:
    """The model, without its weights yet."""
    captioner = Captioner(
        locate_model(options.model, "--model", "captioner"),
        device=device,
        dtype=parse_dtype(config.encode.text_dtype),
        streaming=config.encode.streaming,
        side=options.side,
        most_tokens=options.max_tokens,
        package=f"ditkit-{family}",
    )
    captioner.check_prompt(options.instruction)
    return captioner


def _wanted(files: CaptionFiles, task: _Task, outcome: _Outcome) -> list[CaptionItem]:
    """The media files that are to be captioned; those that cannot be are noted as failed."""
    wanted, replaced = [], task.options.replace
    for item in files.items:
        if item.problem is not None:
            outcome.failed.append(f"{item.name}: {item.problem}")
            continue
        ours = files.is_ours(item)
        is_current = ours and files.written[item.name].settings == task.settings
        if not item.text or (
            not is_current and (replaced == "all" or (replaced == "model" and ours))
        ):
            wanted.append(item)
    captioned = sum(bool(item.text) for item in files.items)
    by_us = sum(map(files.is_ours, files.items))
    line = (
        f"{files.folder}: {plural(len(files.items), 'file')}, {captioned} with a caption "
        f"({by_us} by this command); {len(wanted)} to be written"
    )
    if present := [item for item in wanted if item.text]:
        others = sum(not files.is_ours(item) for item in present)
        line += f", replacing {len(present)} that are there ({others} not by this command)"
    say(line)
    return wanted


def _caption_all(
    captioner: Captioner,
    todo: Sequence[tuple[CaptionFiles, CaptionItem]],
    at_once: int,
    task: _Task,
    outcome: _Outcome,
) -> None:
    """Caption batch after batch; what is written stays, whatever ends the command."""
    with progress("captions", len(todo)) as bar:
        for start in range(0, len(todo), at_once):
            began, readable, requests = time.monotonic(), [], []
            for files, item in todo[start : start + at_once]:
                try:
                    requests.append(_request(item, task))
                    readable.append((files, item))
                except EnvironmentFault:
                    raise
                except UserError as error:
                    outcome.failed.append(f"{item.name}: {error}")
            answers = captioner.answers(requests) if requests else []
            for (files, item), answer in zip(readable, answers, strict=True):
                text, problem = _checked(answer)
                if problem:
                    outcome.failed.append(f"{item.name}: {problem}")
                    continue
                if answer.is_cut:
                    outcome.shortened.append(item.name)
                text = _in_template(text, task.trigger, task.options.template)
                if task.options.preview:
                    say(f"{item.name}: {text}")
                elif files.write([(item, text)], task.settings):
                    outcome.changed.append(item.name)
                else:
                    outcome.written.append(item.name)
            bar.advance(min(at_once, len(todo) - start))
            left = len(todo) - start - at_once
            if start == 0 and left > 0:
                seconds = (time.monotonic() - began) / at_once
                say(
                    f"captions: the first took {seconds:.1f} s each; {left} more take about "
                    f"{format_duration(seconds * left)} at that rate"
                )


def _request(item: CaptionItem, task: _Task) -> CaptionRequest:
    """What the model is shown and asked of a media file."""
    options = task.options
    goal = options.goal or ("edit" if item.references else "scene")
    if goal == "edit" and not item.references:
        raise UserError(
            "it has no references, and --goal edit describes how they become this image; set "
            "data.references, or choose another goal"
        )
    references = item.references if goal == "edit" else ()
    before = [image for path in references for image in spread_images(path, 1)]
    images = spread_images(item.media, options.frames)
    prompt = caption_prompt(
        goal,
        num_images=len(images),
        num_references=len(before),
        words=task.words,
        trigger=task.trigger,
        instruction=options.instruction,
    )
    return CaptionRequest(images=[*before, *images], prompt=prompt)


def _checked(answer: Answer) -> tuple[str, str]:
    """An answer as a caption of one line, and why it is none, or an empty text."""
    words = answer.text.split()
    text = " ".join(words)
    runs = list(zip(*(words[offset:] for offset in range(_RUN_WORDS)), strict=False))
    if len(runs) >= _FEWEST_RUNS and len(set(runs)) < len(runs) / 2:
        return text, f"the answer says the same again and again: {text[-60:]!r}"
    if answer.is_cut:
        sentences = WHOLE_SENTENCES.match(text)
        if sentences is None:
            return text, f"cut at the limit of tokens before a sentence ended: {text[-60:]!r}"
        text = sentences[0]
    if not text:
        return text, "the model's answer is empty"
    if match := _CHAT_TOKENS.search(text):
        return text, f"the answer has a token of the model's chat: {match[0]!r}"
    for pattern, (leftover, _) in LEFTOVERS.items():
        # In the answer as it is: marks of layout stand at the beginning of its lines.
        if match := re.search(pattern, answer.text, re.IGNORECASE | re.MULTILINE):
            return text, f"the answer has {leftover}: {text[:60]!r}"
    return text, ""


def _in_template(text: str, trigger: str, template: str) -> str:
    """A caption with the trigger word where it belongs."""
    if template:
        return template.replace("{trigger}", trigger).replace("{caption}", text)
    return text if not trigger or has_trigger(text, trigger) else f"{trigger}, {text}"


def _summary(outcome: _Outcome, options: CaptionOptions) -> int:
    """Say what became of all files; the exit status."""
    if not options.preview:
        say(f"captions: {len(outcome.written)} written")
    if outcome.shortened:
        warn(
            f"cut at --max-tokens {options.max_tokens}, and written up to the last whole sentence: "
            f"{listed(outcome.shortened)}; raise it if they end too early"
        )
    if outcome.changed:
        warn(f"left alone, since somebody has changed them meanwhile: {listed(outcome.changed)}")
    for line in outcome.failed:
        warn(f"not written: {line}")
    if outcome.failed:
        warn(
            f"error: {plural(len(outcome.failed), 'file')} got no caption, for the reasons above; "
            f"write them yourself, ask otherwise with --instruction, or raise --max-tokens"
        )
    return 1 if outcome.failed else 0
