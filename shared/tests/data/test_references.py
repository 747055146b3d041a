"""The images that an instruction starts from: found, checked, encoded like targets, handed over in
order."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_specs import CLIPS
from media_files import numbered_video, picture, truncated
from PIL import Image
from toy_encoders import CountingEncoder
from toy_encoders import encode_with as encode

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, Sample, scan
from ditkit_core.data.media.clip import read_clip
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encode import encode_references
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.errors import UserError


def reference_size(height: int, width: int, count: int) -> tuple[int, int]:
    if width > 500:
        raise UserError(f"{width} pixels are too wide; use a smaller picture")
    return 16 if height < width else 32, 32 // count


def look(folder: Path, **settings: Any) -> Dataset:
    config = {"folder": str(folder), "frames": 1, "height": 32, "width": 32, **settings}
    taken = config.pop("reference_size", reference_size)
    return scan(DataConfig(**config), replace(CLIPS, reference_size=taken))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three targets, `sub/c` in a folder of its own, each with an instruction."""
    for name in ("a", "b", "sub/c"):
        picture(tmp_path / "set" / f"{name}.png", (40, 40), "teal")
        (tmp_path / "set" / f"{name}.txt").write_text(f"change {name}")
    return tmp_path / "set"


def named(dataset: Dataset) -> dict[str, list[str]]:
    return {sample.id: [path.name for path in sample.references] for sample in dataset.samples}


@pytest.mark.parametrize("place", ["before", "set/before"])
def test_files_of_the_samples_name_are_its_references(folder: Path, place: str) -> None:
    before = folder.parent / place
    for name in ("a.jpg", "sub/c_1.png", "sub/c_0.webp", "sub/c_2.png", "d.png", ".b.png"):
        picture(before / name)
    dataset = look(folder, references=str(before))
    assert named(dataset) == {"a": ["a.jpg"], "b": [], "sub/c": ["c_0.webp", "c_1.png", "c_2.png"]}
    assert dataset.samples[2].references[0] == before / "sub" / "c_0.webp"
    assert dataset.excluded == [(str(before / "d.png"), "no sample has this name")]


def test_eleven_references_are_in_the_order_of_their_numbers(folder: Path) -> None:
    for number in range(11):
        picture(folder.parent / "before" / f"a_{number}.png")
    dataset = look(folder, references=str(folder.parent / "before"))
    assert named(dataset)["a"] == [f"a_{number}.png" for number in range(11)]


def test_a_sample_whose_own_name_ends_with_a_number_comes_first(folder: Path) -> None:
    picture(folder / "a_0.png")
    (folder / "a_0.txt").write_text("another")
    picture(folder.parent / "before" / "a_0.png")
    assert named(look(folder, references=str(folder.parent / "before"))) == {
        "a": [], "a_0": ["a_0.png"], "b": [], "sub/c": [],
    }  # fmt: skip


@pytest.mark.parametrize("column", ["references", "reference", "control", "edit_image"])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_metadata_names_one_several_or_none(folder: Path, column: str, kind: str) -> None:
    for name in ("one.png", "two.png"):
        picture(folder / "in" / name)
    both = ["in/two.png", "in/one.png"]
    if kind == "jsonl":
        rows: list[dict[str, object]] = [
            {"image": "a.png", "text": "x", column: both}, {"image": "b.png", "text": "x",
            column: "in/one.png"},
            {"image": "sub/c.png", "text": "x"},
        ]  # fmt: skip
        text = "\n".join(map(json.dumps, rows))
    else:
        quoted = json.dumps(both).replace('"', '""')
        text = f'image,text,{column}\na.png,x,"{quoted}"\nb.png,x,in/one.png\nsub/c.png,x,\n'
    (folder / f"metadata.{kind}").write_text(text)
    assert named(look(folder)) == {"a": ["two.png", "one.png"], "b": ["one.png"], "sub/c": []}


def bad(folder: Path, case: str) -> dict[str, Any]:
    """Spoil the reference of `a`; returns settings."""
    before = folder.parent / "before"
    picture(before / "b.png")
    line: dict[str, object] = {"image": "a.png", "text": "x"}
    written = {
        "missing": "gone.png",
        "escape": "../before/b.png",
        "pickle": "weights.pt",
        "video": "clip.mp4",
        "null byte": "a\0.png",
        "number": 3,
        "empty": [""],
    }
    if case in written:
        numbered_video(folder / "clip.mp4", frames=2)
        (folder / "weights.pt").write_bytes(b"\x80\x04.")
        lines = [line | {"references": written[case]}, {"image": "b.png", "text": "x"}]
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return {}
    names = {
        "two files": ["a.png", "a.jpg"], "whole and numbered": ["a.png", "a_0.png"],
        "gap": ["a_0.png", "a_2.png"],
        "from one": ["a_1.png"], "same number": ["a_0.png", "a_00.png"],
    }  # fmt: skip
    for name in names.get(case, ["a.png"]):
        picture(before / name)
    if case == "torn":
        (before / "a.png").write_bytes(b"\x89PNG")
    if case == "too wide":
        picture(before / "a.png", (10, 501))
    if case == "both":
        lines = [line | {"references": "b.png"}, {"image": "b.png", "text": "x"}]
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if case == "link":
        picture(folder.parent / "elsewhere.png")
        (before / "a.png").unlink()
        try:
            (before / "a.png").symlink_to(folder.parent / "elsewhere.png")
        except OSError:
            pytest.skip("this system does not let us make symbolic links")
    return {"references": str(before)}


CASES = {
    "missing": "gone.png does not exist",
    "escape": "leaves the dataset folder",
    "pickle": "weights.pt does not have the extension of a media file",
    "video": "clip.mp4 is a video; convert it",
    "null byte": "no file name can have",
    "number": "'references' is empty or not a text",
    "empty": "'references' is empty or not a text",
    "two files": "a.jpg and a.png",
    "whole and numbered": "a.png and a_0.png",
    "same number": "a_0.png and a_00.png",
    "gap": "numbered 0, 2; renumber them 0, 1",
    "from one": "numbered 1; renumber",
    "torn": "a.png cannot be read as an image",
    "too wide": "501 pixels are too wide",
    "both": "in the metadata and in data.references",
    "link": "leaves the dataset folder",
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_reference_is_one_line_and_its_sample_may_be_left_out(
    folder: Path, case: str
) -> None:
    settings = bad(folder, case)
    with pytest.raises(UserError, match=CASES[case]) as caught:
        look(folder, **settings)
    assert "\n" not in str(caught.value) and 'data.on_bad = "skip"' in str(caught.value)
    assert "a" not in named(look(folder, on_bad="skip", **settings))


def test_links_may_leave_when_that_is_allowed(folder: Path) -> None:
    settings = bad(folder, "link")
    assert named(look(folder, allow_outside=True, **settings))["a"] == ["a.png"]


@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_a_model_that_takes_no_references_says_so(folder: Path, on_bad: str) -> None:
    picture(folder.parent / "before" / "a.png")
    with pytest.raises(
        UserError, match="a.png has references, but this model does not edit images"
    ) as caught:
        look(folder, references=str(folder.parent / "before"), reference_size=None, on_bad=on_bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"), [("gone", "data.references .*gone does not exist"), ("set", "itself")]
)
def test_the_folder_of_references_has_to_be_one_of_its_own(
    folder: Path, name: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        look(folder, references=str(folder.parent / name))


@pytest.mark.parametrize(
    ("names", "said"),
    [((), "no image in it"), (("x.png", "y.png"), "none of its 2 images .first: x")],
)
def test_a_folder_of_references_for_no_sample_is_refused(
    folder: Path, names: tuple[str, ...], said: str
) -> None:
    before = folder.parent / "before"
    before.mkdir()
    for name in names:
        picture(before / name)
    with pytest.raises(UserError, match=f"{said}.* has the name of a sample; name them like"):
        look(folder, references=str(before), on_bad="skip")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_misspelt_column_of_references_is_not_passed_over(folder: Path, kind: str) -> None:
    line = json.dumps({"image": "a.png", "text": "x", "Refrences": "b.png", "width": 40})
    (folder / f"metadata.{kind}").write_text(
        line if kind == "jsonl" else "image,text,Refrences,width\na.png,x,b.png,40"
    )
    with pytest.raises(
        UserError, match="line 1 has a column 'Refrences'; rename it to 'references'"
    ):
        look(folder)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_two_columns_of_media_are_refused(folder: Path, kind: str) -> None:
    line = json.dumps({"file_name": "a.png", "image": "b.png", "text": "x"})
    (folder / f"metadata.{kind}").write_text(
        line if kind == "jsonl" else "file_name,image,text\na.png,b.png,x"
    )
    with pytest.raises(
        UserError, match="2 media columns, file_name, image; remove or rename all but one"
    ):
        look(folder)


class World:
    """A dataset of pairs, a cache and fresh encoders."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before, self.cache = (
            folder,
            folder.parent / "before",
            Cache(folder.parent / "cache"),
        )
        picture(self.before / "a_0.png", (40, 80), "red")
        picture(self.before / "a_1.png", (80, 40), "navy")
        picture(self.before / "b.png", (80, 40), "gold")

    def samples(self) -> list[Sample]:
        return look(self.folder, references=str(self.before)).samples

    def encode(
        self, samples: list[Sample] | None = None, **settings: Any
    ) -> dict[str, EncodedSample]:
        self.media = CountingEncoder("media")
        samples = self.samples() if samples is None else samples
        given = {
            "media_encoder": self.media,
            "text_encoder": CountingEncoder("text"),
            "reference_size": reference_size,
        }
        return {
            s.id: s for s in encode(samples, cache=self.cache, fps=16.0, **{**given, **settings})
        }


@pytest.fixture
def world(folder: Path) -> World:
    return World(folder)


def latents(path: Path, height: int, width: int) -> torch.Tensor:
    return read_clip(path, frames=1, fps=16.0, height=height, width=width)[:, ::4, ::8, ::8]


def test_references_are_encoded_upright_at_their_own_size_in_order(world: World) -> None:
    encoded = world.encode()
    item = encoded["a"].load()
    assert list(item) == ["latents", "reference.0", "reference.1", "text"]
    assert torch.equal(item["reference.0"], latents(world.before / "a_0.png", 16, 16))
    assert torch.equal(item["reference.1"], latents(world.before / "a_1.png", 32, 16))
    assert torch.equal(encoded["b"].load()["reference.0"], latents(world.before / "b.png", 32, 32))
    assert set(encoded["sub/c"].load()) == {"latents", "text"}
    assert encoded["a"].outline()["reference.1"].shape == item["reference.1"].shape
    assert encoded["a"].outline()["reference.1"].device.type == "meta"
    assert encoded["a"].keys != encoded["b"].keys and len(encoded["a"].keys) == 4


def test_a_reference_that_is_another_samples_target_is_encoded_once(world: World) -> None:
    # 40 × 40, at 32 × 32 like the target
    (world.before / "b.png").write_bytes((world.folder / "a.png").read_bytes())
    encoded = world.encode()
    assert encoded["b"].reference_keys == (encoded["a"].media_key,)
    assert len(world.media.items) == 3, (
        "the target, which all three share, and two references of `a`"
    )


def test_a_changed_reference_makes_another_sample(world: World) -> None:
    before = world.encode()
    picture(world.before / "b.png", (80, 40), "white")
    after = world.encode()
    assert len(world.media.items) == 1
    assert [id for id in before if before[id].keys != after[id].keys] == ["b"]
    (world.before / "a_0.png").rename(world.before / "x.png")
    (world.before / "a_1.png").rename(world.before / "a_0.png")
    (world.before / "x.png").rename(world.before / "a_1.png")
    turned = world.encode()
    assert not world.media.items and turned["a"].keys[-2:] == after["a"].keys[:-3:-1], (
        "order counts"
    )


def test_a_reference_that_cannot_be_decoded_leaves_its_sample_out(world: World) -> None:
    (world.before / "b.png").unlink()
    noise = np.random.default_rng(0).integers(0, 255, (80, 80, 3), np.uint8)
    Image.fromarray(noise).save(world.before / "b.jpg")
    truncated(world.before / "b.jpg", world.before / "b.jpg")  # its header stays
    samples = world.samples()
    with pytest.raises(UserError, match="b.jpg cannot be read"):
        world.encode(samples)
    left_out: list[str] = []
    encoded = world.encode(
        samples, on_bad=lambda sample, error: left_out.append(f"{sample.id}: {error}")
    )
    assert list(encoded) == ["a", "sub/c"] and len(left_out) == 1 and "b.jpg" in left_out[0]


def test_images_to_edit_when_sampling_are_encoded_as_in_training(world: World) -> None:
    encoded = world.encode()
    fresh = CountingEncoder("media")
    paths = [world.before / "a_0.png", world.before / "a_1.png"]
    given: dict[str, Any] = {
        "cache": world.cache,
        "media_encoder": fresh,
        "reference_size": reference_size,
    }
    found = encode_references(paths, **given)
    item = encoded["a"].load()
    assert [torch.equal(one, item[f"reference.{i}"]) for i, one in enumerate(found)] == [True, True]
    assert not fresh.items, "they were in the cache"
    alone = encode_references(paths[:1], **given)
    assert alone[0].shape != found[0].shape and len(fresh.items) == 1
    numbered_video(world.before / "clip.mp4", frames=2)
    with pytest.raises(UserError, match="clip.mp4 is a video"):
        encode_references([world.before / "clip.mp4"], **given)
