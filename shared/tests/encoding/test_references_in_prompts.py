"""A text encoder that sees the references of a sample: keys, commands, and what is refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import picture
from PIL import Image
from safetensors.torch import load_file
from sampling_child import children
from torch import Tensor
from toy_world import World, equal

import ditkit_core
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Sample, scan
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import PromptFiles, SampleEncoders, encode
from ditkit_core.encoding.encoded_sample import SLIDER_PREFIXES, EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.models.encoders import Prompt
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, TOY_EDITS, ToyReader, ToyTextEncoder

NAMES = ("a", "b", "c")
SIZE = TOY_EDITS.data.reference_size
SEEN = TOY_EDITS.data.picture_size


class Reader(ToyReader):
    """Remembers its prompts."""

    def __init__(self, unreadable: str = "") -> None:
        super().__init__()
        self.prompts: list[tuple[str, int]] = []
        self.unreadable = unreadable

    def encode(self, items: Sequence[Prompt], *advance: Any) -> list[dict[str, Tensor]]:
        (prompt,) = items
        if self.unreadable and prompt.text == self.unreadable:
            raise UserError(f"{prompt.text} is too long; shorten it")
        self.prompts.append((prompt.text, len(prompt.pictures)))
        assert all(image.shape == (3, 8, 8) for image in prompt.pictures)
        return super().encode(items, *advance)


class Several(Reader):
    """Takes four prompts at once, as an encoder does that reads its layers from files."""

    items_at_once = 4

    def encode(self, items: Sequence[Prompt], *advance: Any) -> list[dict[str, Tensor]]:
        return [
            tensors for item in items for tensors in super(Several, self).encode([item], *advance)
        ]


class Edits(World):
    """Three images of one size; two have a reference each, and the last one has two."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.text, self.cache = Reader(), Cache(folder / "cache")
        self.spec = altered(
            TOY_EDITS,
            media_encoder=lambda *_: self.media,
            text_encoder=lambda *_: self.text,
            infer_arch=None,
        )
        for number in range(5):
            for suffix in (".png", ".txt"):
                (folder / f"clips/{number}{suffix}").unlink()
        for name, colour in zip(NAMES, ("teal", "red", "navy"), strict=True):
            self.add(f"clips/{name}.png", (16, 16), colour, f"make it {colour}")
        for name, colour in (("a", "gold"), ("b", "white"), ("c_0", "lime"), ("c_1", "pink")):
            halves = Image.open(picture(folder / f"refs/{name}.png", (16, 16), colour))
            halves.paste("black", (0, 0, 5, 16))
            halves.save(folder / f"refs/{name}.png")

    @property
    def common(self) -> list[str]:
        return [*super().common, "--data.references", str(self.folder / "refs")]

    def samples(self) -> Sequence[Sample]:
        config = DataConfig(
            folder=str(self.folder / "clips"), references=str(self.folder / "refs"), frames=1,
            height=16, width=16,
        )  # fmt: skip
        return scan(config, TOY_EDITS.data).samples

    def encode(self, **settings: Any) -> list[EncodedSample]:
        own = {name: settings.pop(name) for name in ("extra_prompts", "on_bad") if name in settings}
        encoders = SampleEncoders(
            media=self.media, text=self.text, fps=8.0, reference_size=SIZE,
            **{"picture_size": SEEN, **settings},
        )  # fmt: skip
        return encode(self.samples(), encoders, self.cache, **own)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edits:
    monkeypatch.chdir(tmp_path)
    return Edits(tmp_path)


def changed_pixel(file: Path) -> None:
    with Image.open(file) as image:
        image.putpixel((9, 3), (1, 2, 3))
        image.save(file)


def test_each_caption_and_each_empty_one_is_encoded_with_its_references(world: Edits) -> None:
    first, _, last = world.encode()
    texts = [
        ("", 1),
        ("make it teal", 1),
        ("", 1),
        ("make it red", 1),
        ("", 2),
        ("make it navy", 2),
    ]
    assert world.text.prompts == texts
    alone = ToyTextEncoder().encode(["make it navy"])[0]["text"]
    assert torch.equal(last.load()["text"][2:], alone)
    gold = torch.tensor([255, 215, 0]) / 127.5 - 1
    assert torch.allclose(first.load()["text"][0, 3:6], gold, atol=0.02), "its right half"
    assert first.load(drop_caption=True)["text"].shape == (2, 8)


def test_a_changed_pixel_of_a_reference_changes_its_captions_and_nothing_else(world: Edits) -> None:
    before = {sample.id: sample for sample in world.encode()}
    calls = world.text.calls, world.media.calls
    assert world.encode() == [*before.values()] and calls == (world.text.calls, world.media.calls)
    changed_pixel(world.folder / "refs/c_1.png")
    after = {sample.id: sample for sample in world.encode()}
    assert (after["a"], after["b"]) == (before["a"], before["b"])
    one, other = before["c"], after["c"]
    assert not {*one.caption_keys} & {*other.caption_keys}
    same = replace(
        other, text_keys=one.text_keys, empty_text_key=one.empty_text_key,
        reference_keys=(other.reference_keys[0], one.reference_keys[1]),
    )  # fmt: skip
    assert same == one and other.reference_keys[1] != one.reference_keys[1]
    assert (world.text.calls, world.media.calls) == (calls[0] + 2, calls[1] + 1)


def test_order_and_size_of_references_are_part_of_the_key(world: Edits) -> None:
    *_, before = world.encode()
    for one, other in (("c_0", "swap"), ("c_1", "c_0"), ("swap", "c_1")):
        (world.folder / f"refs/{one}.png").rename(world.folder / f"refs/{other}.png")
    *_, swapped = world.encode()
    assert not {*before.caption_keys} & {*swapped.caption_keys}
    assert {*swapped.reference_keys} == {*before.reference_keys}
    world.text.encode = ToyReader().encode  # type: ignore[method-assign]
    *_, larger = world.encode(picture_size=lambda height, width, count: (12, 12))
    assert not {*larger.caption_keys} & {*swapped.caption_keys}
    assert larger.reference_keys == swapped.reference_keys


def test_an_encoder_of_captions_alone_has_the_keys_that_it_had(world: Edits) -> None:
    world.text = ToyTextEncoder()  # type: ignore[assignment]
    before = world.encode(picture_size=None, flips=True)
    changed_pixel(world.folder / "refs/a.png")
    after = world.encode(picture_size=None, flips=True)
    assert [sample.caption_keys for sample in before] == [sample.caption_keys for sample in after]
    assert before[0].mirrored is not None and before[0].mirrored.text_keys == before[0].text_keys
    assert len({sample.empty_text_key for sample in before}) == 1


def test_a_mirrored_sample_has_mirrored_references_in_its_captions(world: Edits) -> None:
    plain = world.encode()
    first, *_ = both = world.encode(flips=True)
    assert [sample.text_keys for sample in both] == [sample.text_keys for sample in plain]
    assert first.mirrored is not None
    for drop in (False, True):
        one, other = (way.load(drop_caption=drop)["text"] for way in (first, first.mirrored))
        assert torch.equal(one[1:], other[1:])
        assert torch.allclose(one[0, :3], other[0, 3:6]) and not torch.equal(one[0], other[0])


def test_further_captions_see_the_references_too(world: Edits) -> None:
    prompts = dict(zip(SLIDER_PREFIXES, ("a big cat", "a small cat"), strict=True))
    first, *_, last = world.encode(more_captions=prompts)
    assert not {*first.more_text_keys.values()} & {*last.more_text_keys.values()}
    item = last.load()
    for prefix, prompt in prompts.items():
        assert item[f"{prefix}text"].shape == (2 + len(prompt), 8)
        assert torch.equal(item[f"{prefix}text"][:2], item["text"][:2])


def test_what_its_encoder_cannot_read_is_a_bad_sample(world: Edits) -> None:
    world.text = Reader(unreadable="make it red")
    with pytest.raises(UserError, match="make it red is too long; shorten it"):
        world.encode()
    bad: list[tuple[str, str]] = []
    encoded = world.encode(on_bad=lambda sample, error: bad.append((sample.id, str(error))))
    assert [sample.id for sample in encoded] == ["a", "c"] and [id for id, _ in bad] == ["b"]
    assert "too long" in bad[0][1] and all(sample.load() for sample in encoded)
    reference = (world.folder / "refs/a.png",)
    with pytest.raises(UserError, match="is too long"):  # a preview is no sample to be left out
        world.encode(extra_prompts=[PromptFiles("make it red", reference)], on_bad=lambda *_: None)


def test_a_bad_sample_among_many_at_once_is_the_only_one_left_out(world: Edits) -> None:
    world.text = Several(unreadable="make it red")
    bad: list[str] = []
    encoded = world.encode(on_bad=lambda sample, error: bad.append(sample.id))
    assert bad == ["b"] and [sample.id for sample in encoded] == ["a", "c"]
    assert all(sample.load() for sample in encoded)
    with pytest.raises(UserError, match="make it red is too long"):
        world.encode()


def test_a_run_trains_and_goes_on_bitwise_and_its_previews_see_references(world: Edits) -> None:
    flags = (
        "--sample.captions", "2", "--sample.every_steps", "2", "--save.every_steps", "2",
        "--train.caption_dropout", "0.4", "--sample.guidance", "3", "--sample.negative", "ugly",
        "--data.flip", "true",
    )  # fmt: skip
    assert world.train("whole", 4, *flags) == 0
    asked = {prompt for prompt in world.text.prompts if prompt[0]}
    captions = {("make it teal", 1), ("make it red", 1), ("make it navy", 2)}
    assert asked == captions | {("ugly", 1)}, "the negative prompt sees the references"
    calls = world.text.calls
    assert world.train("parts", 2, *flags) == 0 and world.train("parts", 4, *flags) == 0
    assert equal(world.adapter("whole"), world.adapter("parts")) and world.text.calls == calls
    previews = sorted((world.folder / "whole/samples").glob("*.png"))
    assert len(previews) >= 4
    for preview in previews:
        assert preview.read_bytes() == (world.folder / "parts/samples" / preview.name).read_bytes()
    changed_pixel(world.folder / "refs/b.png")
    assert world.train("parts", 5, *flags) == 1, "other captions are other data"


def test_a_preview_in_another_process_sees_references(world: Edits) -> None:
    flags = ("--sample.captions", "1", "--sample.every_steps", "2")
    assert world.train("here", 2, *flags) == 0
    with children(world.spec, "draws") as started:
        assert world.train("there", 2, *flags, "--sample.device", "cpu") == 0
    assert len(started) == 1
    here, there = (
        {file.name: file.read_bytes() for file in (world.folder / run / "samples").glob("*.png")}
        for run in ("here", "there")
    )
    assert here == there and here


@pytest.mark.parametrize("references", [1, 2])
def test_a_sample_of_a_prompt_has_the_references_that_it_is_given(
    world: Edits, references: int
) -> None:
    files = [str(world.folder / f"refs/{name}.png") for name in ("a", "b")[:references]]
    flags = [flag for file in files for flag in ("--reference", file)]
    assert world.train("run", 1, "--sample.captions", "0") == 0
    world.text.prompts.clear()
    folder = ("--run", str(world.folder / "run"))
    given = ("--prompt", "make it lime", *flags, "--sample.negative", "ugly")
    given += ("--sample.guidance", "3", "--out", str(world.folder / "out"))
    assert world.run("sample", *folder, *given) == 0 and [*(world.folder / "out").glob("*.png")]
    assert world.text.prompts == [("make it lime", references), ("ugly", references)]
    changed_pixel(world.folder / "refs/a.png")
    assert world.run("sample", *folder, *given) == 0
    assert world.text.prompts == [("make it lime", references), ("ugly", references)] * 2


def test_a_library_encodes_and_samples_with_references(world: Edits) -> None:
    transformer = world.folder / "toy.safetensors"
    spec = altered(world.spec, presets={"tiny": TOY.architecture.presets["tiny"]})
    items = ditkit_core.encode(
        spec, transformer, world.folder / "clips", world.folder / "other", frames=1, height=16,
        width=16, references=str(world.folder / "refs"),
    )  # fmt: skip
    assert items[2].load()["text"].shape == (2 + len("make it navy"), 8)
    world.text.prompts.clear()
    model = ditkit_core.load(spec, transformer, dtype="fp32")
    images = [
        ditkit_core.sample(
            model, ["make it lime"], frames=1, height=16, width=16, steps=2, guidance=2.0,
            negative="ugly", references=(str(world.folder / f"refs/{name}.png"),),
        )[0]
        for name in ("a", "b")
    ]  # fmt: skip
    assert world.text.prompts == [("make it lime", 1), ("ugly", 1)] * 2
    assert not torch.equal(*images), "the toy sees references by its text alone"


def test_class_images_are_generated_without_references(world: Edits) -> None:
    flags = ("--prior.prompt", "a class", "--prior.images", "2", "--sample.captions", "0")
    assert world.train("run", 1, *flags) == 0
    assert {("a class", 0), ("", 0)} <= {*world.text.prompts}
    assert len([*(world.folder / "run/prior").glob("*.png")]) == 2


def test_pruning_keeps_the_captions_of_mirrored_samples(
    world: Edits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ditkit_core.encoding.cache._SETTLED_SECONDS", -1)
    flags = ("--run.folder", str(world.folder / "run"), "--data.flip", "true")
    flags += ("--sample.captions", "0", "--flow.target_guidance", "2")
    assert world.run("encode", *flags) == 0
    calls = world.text.calls
    assert calls == 2 * 2 * len(NAMES)
    assert world.run("encode", *flags, "--prune-cache", "unused") == 0
    assert world.run("encode", *flags) == 0 and world.text.calls == calls


REFUSED: Mapping[str, tuple[Callable[[Edits], None], Sequence[str], str]] = {
    "one prompt of the base": (
        lambda world: None,
        ("--prior.match_base", "0.5", "--prior.prompt", "a class"),
        "prior.prompt is one text for all samples",
    ),
    "class images of a model that edits": (
        lambda world: setattr(world, "spec", altered(world.spec, needs_references=True)),
        ("--prior.prompt", "a class", "--prior.images", "2"),
        "class images are generated from text alone, which this model cannot do (it edits images)",
    ),
    "a prompt of a model that edits": (
        lambda world: setattr(world, "spec", altered(world.spec, needs_references=True)),
        ("--sample.prompts", "make it lime"),
        "sample.prompts: this model edits images and there is none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_have_references_is_refused_in_a_line_before_anything_is_encoded(
    world: Edits, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    prepare, flags, message = REFUSED[case]
    prepare(world)
    assert world.train("run", 1, *flags) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
    assert (world.text.calls, world.media.calls) == (0, 0)


def test_one_prompt_of_the_base_is_for_samples_without_references(world: Edits) -> None:
    """Of a model that could see them."""
    flags = ("--prior.match_base", "0.5", "--prior.prompt", "a class", "--data.references", "")
    assert world.train("run", 1, *flags, "--sample.captions", "0") == 0
    assert ("a class", 0) in world.text.prompts


def test_a_model_that_edits_leaves_out_or_refuses_samples_without_references(
    world: Edits, capsys: pytest.CaptureFixture[str]
) -> None:
    world.spec = altered(world.spec, needs_references=True)
    assert world.train("run", 1, "--sample.captions", "0") == 0
    world.add("clips/d.png", (16, 16), "gold", "make it gold")
    capsys.readouterr()
    assert world.train("other", 1, "--sample.captions", "0") == 1
    error = capsys.readouterr().err
    assert "d.png has no reference, and this model edits images" in error
    assert error.count("\n") == 1
    assert world.train("other", 1, "--sample.captions", "0", "--data.on_bad", "skip") == 0
    assert ("make it gold", 0) not in world.text.prompts
    assert load_file(world.folder / "other/exports/other.safetensors")
