"""Files next to a clip, and names in texts, whose case or Unicode form differs from the clip's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from data_specs import STILLS
from media_files import picture

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import scan
from ditkit_core.data.media.image_sequence import open_folder
from ditkit_core.data.side_names import Names, stored_path
from ditkit_core.errors import UserError

NFC, NFD = "\u00dc", "U\u0308"

EDITS = replace(STILLS, reference_size=lambda *size: (16, 16))


def scanned(folder: Path, **settings: object) -> dict[str, tuple[str, ...]]:
    """The captions of each sample."""
    config = DataConfig(folder=str(folder), frames=1, height=16, width=16, **settings)
    found = scan(config, EDITS)
    return {sample.id: sample.captions for sample in found.samples}


def test_names_are_found_by_their_meaning_and_ambiguous_ones_are_not() -> None:
    names = Names(["Cat", "cat", "Dog", NFD])
    assert (
        names.find("cat"),
        names.find("dog"),
        names.find(NFC),
        names.find("CAT"),
        names.find("x"),
    ) == (
        "cat",
        "Dog",
        NFD,
        None,
        None,
    )
    assert names.similar("CAT") == ["Cat", "cat"]


@pytest.mark.parametrize("text", ["b.TXT", "b.Caption", "B.txt", "b.png.txt", "b.PNG.TXT"])
def test_a_caption_is_read_whatever_the_case_of_its_name(tmp_path: Path, text: str) -> None:
    picture(tmp_path / "b.png")
    (tmp_path / text).write_text("a cat")
    assert scanned(tmp_path) == {"b": ("a cat",)}


def test_an_exact_name_comes_first_and_two_spellings_are_refused(tmp_path: Path) -> None:
    picture(tmp_path / "b.png")
    for name in ("b.txt", "b.TXT", "b.png.txt"):
        (tmp_path / name).write_text(name)
    assert scanned(tmp_path) == {"b": ("b.txt",)}
    (tmp_path / "b.txt").unlink()
    with pytest.raises(
        UserError,
        match=r"b\.TXT and b\.png\.txt in .* are both the caption of b\.png; remove all but one",
    ):
        scanned(tmp_path)


def test_a_picture_does_not_take_the_caption_of_another(tmp_path: Path) -> None:
    for name in ("a.png", "A.jpg"):
        picture(tmp_path / name)
    (tmp_path / "a.txt").write_text("small")
    with pytest.raises(UserError, match=r"A\.jpg has no caption; write one to .*/A\.txt"):
        scanned(tmp_path)
    (tmp_path / "A.txt").write_text("large")
    assert scanned(tmp_path) == {"a": ("small",), "A": ("large",)}


@pytest.mark.parametrize(("media", "text"), [(NFD, NFC), (NFC, NFD)])
def test_a_caption_in_another_unicode_form_belongs_to_its_clip(
    tmp_path: Path, media: str, text: str
) -> None:
    picture(tmp_path / f"{media}.png")
    (tmp_path / f"{text}.txt").write_text("a cat")
    assert scanned(tmp_path) == {media: ("a cat",)}


@pytest.mark.parametrize("listing", ["metadata.jsonl", "Metadata.CSV", "metadata.json", "lists"])
def test_names_of_every_kind_of_list_are_found_in_another_unicode_form(
    tmp_path: Path, listing: str
) -> None:
    (tmp_path / f"s{NFD}").mkdir()
    picture(tmp_path / f"s{NFD}" / f"{NFD}.png")
    picture(tmp_path / f"r{NFD}.png")
    name, reference = f"s{NFC}/{NFC}.png", f"r{NFC}.png"
    row = {"file_name": name, "text": "a cat", "control_path": reference}
    if listing == "lists":
        (tmp_path / "Images.txt").write_text(name)
        (tmp_path / "Prompts.txt").write_text("a cat")
    elif listing == "Metadata.CSV":
        (tmp_path / listing).write_text(f"file_name,text,control_path\n{name},a cat,{reference}\n")
    else:
        (tmp_path / listing).write_text(
            json.dumps([row] if listing.endswith("json") else row, ensure_ascii=False)
        )
    assert scanned(tmp_path) == {f"s{NFD}/{NFD}": ("a cat",)}


def test_a_list_that_a_setting_names_in_another_form_is_read(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / f"{NFD}.jsonl").write_text('{"file_name": "a.png", "text": "a cat"}')
    assert scanned(tmp_path, metadata=f"{NFC}.jsonl") == {"a": ("a cat",)}


def test_references_and_masks_are_matched_by_meaning(tmp_path: Path) -> None:
    folder, references, masks = tmp_path / "set", tmp_path / "references", tmp_path / "masks"
    for place in (folder, references, masks):
        place.mkdir()
    for name in (f"{NFD}.png", "cat.png", "dog.png", "dog-Mask.PNG"):
        picture(folder / name)
    for name in (NFD, "cat", "dog"):
        (folder / f"{name}.txt").write_text("x")
    for name in (f"{NFC}.png", "Cat_0.png", "dog.png"):
        picture(references / name)
    config = DataConfig(
        folder=str(folder), frames=1, height=16, width=16, references=str(references)
    )
    found = scan(config, EDITS)
    by_id = {sample.id: sample for sample in found.samples}
    assert {id: [path.name for path in sample.references] for id, sample in by_id.items()} == {
        NFD: [f"{NFC}.png"], "cat": ["Cat_0.png"], "dog": ["dog.png"],
    }  # fmt: skip
    assert by_id["dog"].mask == folder / "dog-Mask.PNG" and by_id["cat"].mask is None
    for name in (f"{NFC}.png", "CAT.png", "dog.png"):
        picture(masks / name)
    (folder / "dog-Mask.PNG").unlink()
    config = DataConfig(folder=str(folder), frames=1, height=16, width=16, masks=str(masks))
    found = scan(config, STILLS)
    assert {sample.id: sample.mask.name for sample in found.samples if sample.mask} == {
        NFD: f"{NFC}.png",
        "cat": "CAT.png",
        "dog": "dog.png",
    }


def test_the_rate_of_a_folder_of_images_is_read_whatever_its_case(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / f"{number}.png")
    (tmp_path / "FPS.TXT").write_text("12")
    assert open_folder(tmp_path).fps == 12
    (tmp_path / "fps.txt").write_text("24")
    with pytest.raises(UserError, match="are both the rate of these images"):
        open_folder(tmp_path)


def test_a_file_that_is_not_there_is_answered_with_the_one_that_is(tmp_path: Path) -> None:
    picture(tmp_path / "cat01.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "cat02.png", "text": "a cat"}')
    with pytest.raises(
        UserError, match=r"cat02\.png does not exist or is not a file; did you mean .*/cat01\.png\?"
    ):
        scanned(tmp_path)


def test_a_path_is_stored_as_it_is_written_unless_only_its_form_differs(tmp_path: Path) -> None:
    (tmp_path / NFD).mkdir()
    (tmp_path / NFD / "a.png").touch()
    assert stored_path(tmp_path, f"{NFC}/a.png") == f"{NFD}/a.png"
    for path in (f"{NFC}/b.png", "A.png", "x\0", f"../{tmp_path.name}/gone", ""):
        assert stored_path(tmp_path, path) == path
    assert stored_path(tmp_path, str(tmp_path / NFC / "a.png")) == str(tmp_path / NFD / "a.png")
