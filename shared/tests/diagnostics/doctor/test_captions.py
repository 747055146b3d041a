"""The doctor's findings about captions: alike, with leftovers of other programs, or without the
trigger word."""

from pathlib import Path

import pytest
from media_files import picture

from ditkit_core.config.resolve import resolve
from ditkit_core.data.captions import captions_of
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Sample
from ditkit_core.diagnostics.doctor.captions import (
    check_captions,
    count_captions,
    shortened_caption,
)
from ditkit_core.diagnostics.doctor.dataset import examine_dataset
from ditkit_core.diagnostics.doctor.findings import Finding
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.toy import TOY

THINGS = (
    "beach at noon",
    "street in the rain",
    "forest",
    "kitchen with two friends",
    "train",
    "mountain hut in winter",
)
LONG = " ".join(f"word{index}" for index in range(45))


def samples(
    captions: tuple[str, ...] | list[str], *, trigger: str = "", windows: int = 1
) -> list[Sample]:
    """Samples with these captions, as the dataset makes them."""
    return [
        Sample(
            id=f"{file}.png#{window}",
            media=Path(f"{file}.png"),
            captions=captions_of((caption,), DataConfig(trigger=trigger)),
            frames=1,
            height=16,
            width=16,
        )
        for file, caption in enumerate(captions)
        for window in range(windows)
    ]


def findings(
    data: list[Sample], class_images: list[Sample] | None = None, **flags: object
) -> list[Finding]:
    config = resolve(
        RunConfig, flags={key.replace("__", "."): value for key, value in flags.items()}
    )
    return list(check_captions(data, count_captions(data, None), config, class_images or []))


def said(*arguments: list[Sample], **flags: object) -> list[str]:
    return [f"{item.code} {item.where}" for item in findings(*arguments, **flags)]


def test_captions_that_hardly_differ_are_noted_in_one_line() -> None:
    alike = [f"A photo of ohwx woman, image {number}" for number in range(8)]
    assert said(samples(alike)) == ["D41 8 files"]
    (note,) = findings(samples(alike, windows=3))
    assert (
        note.severity == "note"
        and "of 6.0 words 6.0 are in all" in note.observation
        and "'A photo of ohwx woman" in note.observation
    )
    assert said(samples(alike[:4])) == [], "few files are not compared"
    assert said(samples([f"ohwx woman, {thing}" for thing in THINGS])) == []
    assert said(samples(["a photo of ohwx woman"] * 8)) == ["D15 8 of 8 files"], (
        "the same caption is one note only"
    )


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("[trigger] in the rain", "'[trigger]'"),
        ("a photo of {name}", "'{name}'"),
        ("a cat <lora:fluffy:0.8>", "call of a file"),
        ("a cat, (masterpiece:1.2)", "weight"),
        ("I'm sorry, but I can't describe this person.", "refusal"),
        ("I cannot assist with that request.", "refusal"),
        ("Sure! A cat on a sofa.", "opening"),
        ("Here is a detailed caption of the image: a cat.", "opening"),
        ("Caption: a cat", "opening"),
        ("A cat. **Style:** oil", "layout"),
        ("# A cat", "layout"),
        (f"A first sentence. {LONG} and then the", "ends in the middle of a sentence: '…"),
    ],
)
@pytest.mark.parametrize("trigger", ["", "ohwx"])
def test_what_programs_leave_in_captions_is_named(caption: str, words: str, trigger: str) -> None:
    data = samples([*THINGS, caption], trigger=trigger)
    (finding,) = findings(data, data__trigger=trigger)
    assert (finding.code, finding.severity, finding.where) == (
        "D44",
        "warning",
        "6.png#0",
    ) and words in finding.observation


@pytest.mark.parametrize(
    "caption",
    [
        "a cat (at 16:9)",
        "the word (left: 3) on a sign",
        "Here's a cat",
        "Surely a cat",
        "a sign that says 'sorry'",
        f"A first sentence. {LONG} and the end.",
        f"A first sentence. {LONG} and 'the end.'",
        ", ".join(f"tag {number}" for number in range(60)),
        "5 * 4 ** 2",
        "a < b",
    ],
)
def test_ordinary_captions_have_no_leftovers(caption: str) -> None:
    assert said(samples([*THINGS, caption])) == []


def test_another_spelling_of_the_trigger_word_is_named() -> None:
    data = samples(
        ["ohwx, beach", "Ohwx on a beach", "ohwx_woman reads", "OHWX", "fohwxy", "beach"],
        trigger="ohwx",
    )
    (finding,) = findings(data, data__trigger="ohwx")
    assert (finding.code, finding.where) == (
        "D42",
        "1.png#0, 2.png#0, 3.png#0",
    ) and "'Ohwx'" in finding.observation
    assert data[1].captions == ("ohwx Ohwx on a beach",), "both are trained"


def test_prompts_without_the_trigger_word_are_named_if_all_are() -> None:
    data = samples(THINGS, trigger="ohwx")
    flags = {"data__trigger": "ohwx"}
    assert said(data, **flags, sample__prompts=("a beach", "Ohwx")) == ["D42 sample.prompts"]
    assert said(data, **flags, sample__prompts=("a beach", "ohwx")) == said(data, **flags) == []


def test_class_images_with_the_trigger_word_are_named() -> None:
    data, images = samples(THINGS, trigger="ohwx"), samples(["a woman", "ohwx woman"])
    assert said(data, images, data__trigger="ohwx", prior__prompt="a photo of a woman") == [
        "D43 1.png#0"
    ]
    assert said(data, images, data__trigger="ohwx", prior__prompt="ohwx woman") == [
        "D43 prior.prompt, 1.png#0"
    ]
    assert said(data, images[:1], data__trigger="ohwx", prior__prompt="a woman") == []


def test_captions_that_lack_the_word_that_opens_the_others_are_noted() -> None:
    opened = [
        f"a photo of Ohwx woman, {thing}{more}" for thing in THINGS for more in ("", ", smiling")
    ]
    (note,) = findings(samples([*opened, "a woman on a roof"]))
    assert (note.code, note.severity, note.where) == ("D42", "note", "12.png")
    assert (
        "'ohwx', which opens 12 of 13" in note.observation
        and "data.trigger = 'ohwx'" in note.remedy
    )
    assert said(samples([*opened, "by a river, ohwx"])) == [], "it may be anywhere"
    assert said(samples([*opened[:6], *THINGS])) == [], "no word opens most"
    assert said(samples([*opened[:8], "a woman on a roof"])) == [], (
        "few files may begin alike by chance"
    )
    usual = [caption.replace("Ohwx", "young") for caption in opened]
    assert said(samples([*usual, "a roof"])) == [], "these are usual openings"


def test_captions_of_several_lines_are_noted_unless_each_line_is_one() -> None:
    data = samples([*THINGS, "a cat\n\na dog\n", "one line\n"])
    (note,) = findings(data)
    assert (note.code, note.severity, note.where) == (
        "D45",
        "note",
        "6.png#0",
    ) and '"lines"' in note.remedy
    assert said(data, data__captions="lines") == []


def test_a_check_and_the_summary_before_training_know_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for number, thing in enumerate(THINGS):
        picture(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"Ohwx, {thing}")
    flags = {
        "model.preset": "tiny",
        "data.folder": str(folder),
        "data.trigger": "ohwx",
        "data.height": 16,
        "data.width": 16,
    }
    run = create_run(
        TOY,
        resolve(
            RunConfig,
            flags={**flags, "run.folder": str(tmp_path / "run"), "sample.prompts": ("x",)},
        ),
    )
    checkup = examine_dataset(run.data).checkup
    assert [item.code for item in checkup.findings if item.code in ("D42", "D43")] == ["D42", "D42"]


@pytest.mark.parametrize(
    ("text", "limit", "shortened"),
    [
        ("a cat on a mat", 14, "a cat on a mat"),
        ("a cat on a mat", 13, "a cat on a"),
        ("a cat, on a mat", 8, "a cat"),
        ("One cat sits here. It is old.", 27, "One cat sits here."),
        ("It. One cat sits there and looks on", 30, "It. One cat sits there and"),
        ("猫がいる。犬もいる。", 7, "猫がいる。犬も"),
        ("a cat", 0, ""),
    ],
)
def test_a_caption_is_shortened_to_what_is_read(text: str, limit: int, shortened: str) -> None:
    assert shortened_caption(text, lambda part: len(part) <= limit) == shortened
