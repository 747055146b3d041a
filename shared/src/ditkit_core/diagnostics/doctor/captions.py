"""The rules about captions: too long, empty, alike, with leftovers of the program that wrote them,
or without the trigger word."""

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from ditkit_core.api.auxiliary import Auxiliary
from ditkit_core.data.captions import has_trigger
from ditkit_core.data.dataset import Sample
from ditkit_core.diagnostics.doctor.findings import (
    CaptionRow,
    CutCaption,
    CutsCaptions,
    Finding,
    listed,
)
from ditkit_core.diagnostics.report.words import plural
from ditkit_core.errors import UserError
from ditkit_core.run.config import RunConfig

SAME_CAPTION_SHARE = 0.5
"""Share of the files that may share one caption."""
COMMON_WORD_SHARE = 0.9
"""A word counts as one of all captions if this share of the files has it."""
ALIKE_SHARE = 0.8
"""Captions hardly differ if this share of their words is in all of them."""
FEWEST_FILES = 5
"""Fewer captions are not compared with each other."""
OPENING_SHARE = 0.8
"""A word that opens this share of the captions is probably meant as a trigger word."""
FEWEST_OPENINGS = 10
"""Fewer captions may begin with one word by chance."""
LONG_WORDS = 40
"""A caption with fewer words that ends without a full stop is probably complete."""

LEFTOVERS: Mapping[str, tuple[str, str]] = {
    r"\[(trigger|name)\]|\{(trigger|name)\}|<trigger>": (
        "a placeholder of another trainer, which is trained as it is written",
        "write the trigger word instead, or remove it and set data.trigger",
    ),
    r"<(lora|lyco|hypernet|embedding):[^>]*>": (
        "a prompt's call of a file, which is trained as text",
        "remove it",
    ),
    r"\([^()\d:][^()]*:\d\.\d+\)": (
        "a weight of another program's prompts, which is trained as text",
        "remove it",
    ),
    r"^\W*(i('m| am) (sorry|unable|not able)|sorry,|as an ai\b|i (cannot|can't|can not)\b)": (
        "the refusal of a chat model",
        "write a caption",
    ),
    r"^\W*((sure|certainly|of course|absolutely|okay)\b[,.!:]|here('s| is| are) "
    r"(a|an|the|your)\b[^.]{0,60}"
    r"\b(captions?|descriptions?|prompts?)\b|(caption|description|prompt|answer|assistant)\s*:)": (
        "the opening of a chat model's answer",
        "remove it, and keep the description",
    ),
    r"\*\*\w|^#+ |```|</?(b|i|br|p|s|think)>": (
        "marks of a text's layout, which are trained as text",
        "remove them",
    ),
}
"""What programs leave in captions: the pattern, what it is, and what to do about it."""

WHOLE_SENTENCES = re.compile(r".*[.!?…。！？][\"”’)]*(?=\s|$)", re.DOTALL)
"""A text up to the end of its last sentence."""

_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)\]*]*$")
_OPENING = frozenset(
    word
    for line in (
        (
            "a an the this that in of on at with and by for from to one two some his her their photo "
            "photograph"
        ),
        (
            "photography image picture video clip footage shot still frame scene view portrait "
            "painting illustration"
        ),
        (
            "drawing sketch render close closeup close-up up wide medium full body style woman man "
            "girl boy child person"
        ),
        (
            "people lady guy dog cat animal young old beautiful small large big black white red blue "
            "green"
        ),
    )
    for word in line.split()
)
"""Words that open captions and are no trigger words."""


def count_captions(samples: Sequence[Sample], cut: Sequence[CutCaption] | None) -> CaptionRow:
    """Count all captions, those that are empty, and those that are cut."""
    captions = [caption for sample in samples for caption in sample.captions]
    empty = sum(not caption.strip() for caption in captions)
    cut = None if cut is None else tuple(cut)
    return CaptionRow(count=len(captions), distinct=len(set(captions)), empty=empty, cut=cut)


def cut_captions(auxiliary: Auxiliary, samples: Sequence[Sample]) -> list[CutCaption] | None:
    """Captions that the text encoder would truncate; None if it cannot tell without its weights."""
    if any(map(auxiliary.paths.is_to_be_fetched, ("text_encoder", "tokenizer", "vae"))):
        return None
    try:
        encoder = auxiliary.encoders[1]
        if not isinstance(encoder, CutsCaptions):
            return None
        cut_of = cache(encoder.cut_of)
        sample_cuts = [
            (sample.id, cut_of(caption, len(sample.references)))
            for sample in samples
            for caption in sample.captions
        ]
    except UserError:  # the trial of the model reports it
        return None
    return [
        CutCaption(sample=id, tokens=cut[0], kept=cut[1])
        for id, cut in sample_cuts
        if cut is not None
    ]


def shortened_caption(text: str, is_read: Callable[[str], bool]) -> str:
    """The longest beginning of a caption that a text encoder reads: up to the end of a sentence if
    that is more than half of it, else of a word.

    Args:
        is_read: Whether all of a text is read.
    """
    if is_read(text):
        return text
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    if not is_read(text[: ends[0]]):  # writing without spaces
        ends = list(range(ends[0] + 1))
    count = bisect.bisect(ends, False, key=lambda end: not is_read(text[:end]))
    for end in reversed(ends[:count]):  # a beginning may have more tokens than the same text has
        sentences = WHOLE_SENTENCES.match(text[:end])
        longer = sentences[0] if sentences and 2 * sentences.end() > end else text[:end]
        if is_read(longer):
            return longer.rstrip(" ,;:")
    return ""


def check_captions(
    samples: Sequence[Sample],
    row: CaptionRow,
    config: RunConfig,
    class_images: Sequence[Sample] = (),
) -> Iterator[Finding]:
    """Findings about captions. Class images may share one: it names their class.

    Args:
        config: Its trigger word and prompts are compared with the captions.
    """
    for cut in row.cut or ():
        read = _short(cut.kept, 40, keep_end=True)
        observation = f"the text encoder does not read the last {plural(cut.tokens, 'token')} of its caption, after {read}"
        yield Finding("D14", cut.sample, observation, "shorten the caption")
    all_samples = (*samples, *class_images)
    if empty := [
        sample.id for sample in all_samples for text in sample.captions if not text.strip()
    ]:
        observation = "its caption is empty" if len(empty) == 1 else "their captions are empty"
        yield Finding(
            "D16",
            listed(empty),
            observation,
            "write one; for training without captions set train.caption_dropout",
        )
    # files, because the windows of one file always share its caption
    using: dict[str, set[Path]] = defaultdict(set)
    for sample in samples:
        for caption in filter(None, map(str.strip, sample.captions)):
            using[caption].add(sample.media)
    files = len({sample.media for sample in samples})
    shared = {
        caption: len(its)
        for caption, its in using.items()
        if len(its) > max(1, SAME_CAPTION_SHARE * files)
    }
    for caption, count in shared.items():
        observation = f"they share the caption {_short(caption, 60)}"
        yield Finding(
            "D15", f"{count} of {files} files", observation, "describe what differs between them"
        )
    if not shared:
        yield from _check_alike(_caption_by_file(samples))
    yield from _check_leftovers(all_samples, config.data.trigger.strip())
    if config.data.captions == "whole":
        yield from _check_lines(samples)
    yield from _check_trigger(samples, config, class_images)


def _check_trigger(
    samples: Sequence[Sample], config: RunConfig, class_images: Sequence[Sample] = ()
) -> Iterator[Finding]:
    """Findings about the trigger word: captions and prompts that lack it or spell it in another
    way, and class images that have it.

    Args:
        config: Its trigger word and prompts. Without a trigger word, the word that opens most
            captions is taken for one.
    """
    trigger = config.data.trigger.strip()
    if not trigger:
        yield from _check_opening_word(_caption_by_file(samples))
        return
    spelling = re.compile(rf"(?<!\w)(?:\w*_)?{re.escape(trigger)}(?:_\w*)?(?!\w)", re.IGNORECASE)
    spelt: dict[str, str] = {}
    for sample in samples:
        for caption in sample.captions:
            for way in set(spelling.findall(caption)) - {trigger}:
                spelt[sample.id] = way
    if spelt:
        first = next(iter(spelt.values()))
        observation = f"they write the trigger word {trigger!r} as {first!r} too, so it is put in front of them as another word"
        yield Finding(
            "D42", listed(list(spelt)), observation, "write it in the same way everywhere"
        )
    prompts = config.sample.prompts
    if prompts and not any(has_trigger(prompt, trigger) for prompt in prompts):
        observation = f"none of the prompts has the trigger word {trigger!r}: samples will hardly show what is learnt"
        yield Finding(
            "D42",
            "sample.prompts",
            observation,
            "write it in some of them; the others are controls",
        )
    named = [
        sample.id
        for sample in class_images
        for caption in sample.captions
        if has_trigger(caption, trigger)
    ]
    where = ["prior.prompt"] * has_trigger(config.prior.prompt, trigger) + named
    if where:
        observation = f"the class is described with the trigger word {trigger!r}, which then means the whole class"
        yield Finding("D43", listed(where), observation, "remove it there")


def _check_opening_word(captions: Mapping[Path, str]) -> Iterator[Finding]:
    """The note that a few captions lack the word that opens the others."""
    openings = Counter(_opening_word(caption) for caption in captions.values())
    word, count = max(openings.items(), key=lambda pair: (pair[0] != "", pair[1]), default=("", 0))
    if len(captions) < FEWEST_OPENINGS or not word or count < OPENING_SHARE * len(captions):
        return
    if names_without_word := [
        path.name for path, caption in captions.items() if word not in _words(caption)
    ]:
        observation = f"their captions lack {word!r}, which opens {count} of {len(captions)}"
        remedy = f"if it is your trigger word, write it there too, or set data.trigger = {word!r}"
        yield Finding(
            "D42",
            listed(names_without_word),
            observation,
            remedy,
            severity="note",
            settings=({"data.trigger": word},),
        )


def _check_alike(captions: Mapping[Path, str]) -> Iterator[Finding]:
    """The note that captions of different texts have nearly the same words."""
    words = [set(_words(caption)) for caption in captions.values() if caption.strip()]
    if len(words) < FEWEST_FILES:
        return
    counts = Counter(word for of_one in words for word in of_one)
    common = {word for word, count in counts.items() if count >= COMMON_WORD_SHARE * len(words)}
    total, shared = counts.total(), sum(counts[word] for word in common)
    if total and shared >= ALIKE_SHARE * total:
        mean, mean_shared = total / len(words), shared / len(words)
        first = _short(next(filter(str.strip, captions.values())), 60)
        observation = f"their captions hardly differ: of {mean:.1f} words {mean_shared:.1f} are in all, as in {first}"
        yield Finding(
            "D41", f"{len(words)} files", observation, "describe what differs between them"
        )


def _check_leftovers(samples: Sequence[Sample], trigger: str) -> Iterator[Finding]:
    """Warnings about captions with leftovers of the program that wrote them, one for each kind."""
    ids: dict[str, list[str]] = defaultdict(list)  # by text, because windows of a file share it
    for sample in samples:
        for caption in sample.captions:
            ids[caption.strip().removeprefix(trigger).strip(" ,")].append(sample.id)
    for pattern, (leftover, remedy) in LEFTOVERS.items():
        matches = {
            text: match[0] for text in ids if (match := re.search(pattern, text, re.IGNORECASE))
        }
        if matches:
            example = _short(next(iter(matches.values())), 40)
            where = listed([id for text in matches for id in ids[text]])
            yield Finding("D44", where, f"the caption has {leftover}: {example}", remedy)
    prose = (
        text for text in ids if len(text.split()) >= LONG_WORDS and re.search(r"\w[.!?] +\w", text)
    )
    if broken := [text for text in prose if not _SENTENCE_END.search(text)]:
        observation = (
            f"the caption ends in the middle of a sentence: {_short(broken[0], 40, keep_end=True)}"
        )
        remedy = "end it, or raise the limit of new tokens of the program that wrote it"
        yield Finding(
            "D44", listed([id for text in broken for id in ids[text]]), observation, remedy
        )


def _check_lines(samples: Sequence[Sample]) -> Iterator[Finding]:
    """The note that captions have several lines, which other trainers read as several captions."""
    several = {
        sample.id: None
        for sample in samples
        for text in sample.captions
        if len(text.strip().splitlines()) > 1
    }
    if several:
        observation = (
            "its lines are one caption"
            if len(several) == 1
            else "their lines are one caption for each file"
        )
        remedy = 'if each line is a caption of its own, as in OneTrainer and SimpleTuner, set data.captions = "lines"'
        settings = ({"data.captions": "lines"},)
        yield Finding("D45", listed(list(several)), observation, remedy, settings=settings)


def _caption_by_file(samples: Sequence[Sample]) -> dict[Path, str]:
    """The first caption of each file."""
    captions: dict[Path, str] = {}
    for sample in samples:
        captions.setdefault(sample.media, sample.captions[0])
    return captions


def _words(caption: str) -> Iterator[str]:
    """The words of a caption in lower case, without numbers; a hyphen or an underscore does not end
    one."""
    words = (match[0] for match in re.finditer(r"\w[\w-]*", caption.casefold()))
    return (word for word in words if not word.isdecimal())


def _opening_word(caption: str) -> str:
    """The first word of a caption that is none of the usual ones; empty if there is none."""
    return next((word for word in _words(caption) if word not in _OPENING), "")


def _short(text: str, most: int, *, keep_end: bool = False) -> str:
    """The quoted beginning of a text, or its end."""
    text = " ".join(text.split())
    shortened = "…" + text[-most:] if keep_end else text[:most] + "…"
    return repr(text if len(text) <= most else shortened)
