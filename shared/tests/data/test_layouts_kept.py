"""What else is in a folder changes nothing of how it was read before other trainers' layouts were;
misspelt references are reported."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dataset_looks import look
from media_files import picture

from ditkit_core.data.columns import reference_columns
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column

FACES = tuple(
    Column(name=name, kind="image", aliases=("src_ref_images", "object_file_path"))
    for name in ("face", "face_2")
)
"""Of a model that is shown up to two images."""


@dataclass(frozen=True)
class Kept:
    write: Callable[[Path], None]
    captions: dict[str, str]
    """By sample."""
    controls: dict[str, str] = field(default_factory=dict)
    """Names of the files."""
    settings: dict[str, Any] = field(default_factory=dict)


def texts(folder: Path) -> None:
    for name in ("0", "1"):
        (folder / f"{name}.txt").write_text(f"text {name}")


def lists(folder: Path) -> None:
    (folder / "images.txt").write_text("0.png\n1.png\n")
    (folder / "prompts.txt").write_text("line 0\nline 1\n")


def rows(folder: Path, name: str = "metadata.jsonl", **more: str) -> None:
    row = {"file_name": "0.png", "text": "row 0"} | more
    written = {
        "metadata.csv": ",".join(row) + "\n" + ",".join(row.values()),
        "metadata.json": json.dumps([row]),
    }  # fmt: skip
    (folder / name).write_text(written.get(name, json.dumps(row)))


def shots(folder: Path) -> None:
    for name in ("0.png", "1.png"):
        (folder / name).unlink()
    for name in ("images", "prompt"):
        for number in range(6):
            picture(folder / name / f"{number}.png")
        (folder / f"{name}.txt").write_text(f"text {name}")


def then(*writers: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for each in writers:
            each(folder)

    return write


BY_TEXT, BY_ROW, BY_LINE = (
    {"0": "text 0", "1": "text 1"},
    {"0": "row 0"},
    {"0": "line 0", "1": "line 1"},
)


def parquet(folder: Path) -> None:
    (folder / "metadata.parquet").write_bytes(b"PAR1")


def kohya(folder: Path) -> None:
    (folder / "0.caption").write_text("another text")


def one_text(folder: Path) -> None:
    (folder / "0.txt").write_text("text 0")


KEPT = {
    **{
        f"{name} beside lists": Kept(then(lists, lambda folder, name=name: rows(folder, name)),
        BY_ROW)
        for name in ("metadata.jsonl", "metadata.csv", "metadata.json")
    },
    "metadata beside everything": Kept(then(lists, texts, parquet, kohya, rows), BY_ROW),
    "texts beside lists": Kept(then(lists, texts), BY_TEXT),
    "texts beside lists, not all": Kept(then(lists, one_text), {"0": "text 0"},
    settings={"on_bad": "skip"}),
    "texts beside a table": Kept(then(parquet, texts), BY_TEXT),
    "lists beside a table": Kept(then(parquet, lists), BY_LINE),
    "two texts beside a clip": Kept(then(texts, kohya), BY_TEXT),
    **{
        f"{name} beside file_name": Kept(lambda folder, name=name: rows(folder, **{name: "s3://x"}),
        BY_ROW)
        for name in ("video_path", "image_path")
    },
    "both in a table": Kept(lambda folder: rows(folder, "metadata.csv", video_path="x",
    image_path="y"), BY_ROW),
    "a list for the first, and the second": Kept(
        lambda folder: rows(folder, src_ref_images="0.png", face_2="1.png"), BY_ROW,
        {"face": "0.png", "face_2": "1.png"}
    ),
    "folders of images": Kept(
        shots, {"images": "text images", "prompt": "text prompt"}, settings={"image_folders": True}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_what_was_read_before_is_read_the_same(tmp_path: Path, kind: str) -> None:
    for name in ("0", "1"):
        picture(tmp_path / f"{name}.png")
    case = KEPT[kind]
    case.write(tmp_path)
    samples = {
        sample.id: sample for sample in look(tmp_path, columns=FACES, **case.settings).samples
    }
    assert {id: sample.captions for id, sample in samples.items()} == {
        id: (text,) for id, text in case.captions.items()
    }
    controls = {
        column: Path(path).name
        for sample in samples.values()
        for column, path in sample.controls.items()
    }
    assert controls == case.controls


def test_lists_that_are_not_read_for_a_single_text_are_named(tmp_path: Path) -> None:
    for name in ("0", "1"):
        picture(tmp_path / f"{name}.png")
    then(lists, one_text)(tmp_path)
    with pytest.raises(
        UserError, match=r'1\.png has no caption; .*, or set data\.metadata = "images\.txt"'
    ):
        look(tmp_path)
    assert len(look(tmp_path, metadata="images.txt").samples) == 2


def test_lists_of_folders_of_images_are_lists(tmp_path: Path) -> None:
    """A folder of such folders is none itself, and one that has its own text is none of the two
    lists."""
    for name in ("videos/0", "prompt"):
        for number in range(6):
            picture(tmp_path / name / f"{number}.png")
    (tmp_path / "videos.txt").write_text("videos/0\n")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    assert look(tmp_path, image_folders=True).captions == ["a cat"]
    (tmp_path / "prompt.txt").write_text("a dog")
    assert look(tmp_path, image_folders=True, metadata="videos.txt").captions == ["a cat"]


MISSPELT = {
    "control_paths": ([], "rename it to 'control_path' if"),
    "Control_Path": ([], "rename it to 'control_path' if"),
    "control_path_a": ([], "rename it to 'control_path' if"),
    "Control_Path_2": ([], "rename it to 'control_path_2' if"),
    "contorl_path_1": (
        ["control_path_0"],
        "besides 'control_path_0'; move its references there, in order, or",
    ),
    "control_directory": ([], "rename it to 'references' if"),
    "contorl": (["references"], "besides 'references'"),
    "reference_2": (["reference"], "besides 'reference'"),
    "edit_images": (["edit_image"], "besides 'edit_image'"),
    "control_path_b": (["control_path"], "besides 'control_path'"),
    "preference": ([], "rename it to 'reference' if"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_column_of_references_is_reported_for_a_model_that_edits(name: str) -> None:
    beside, said = MISSPELT[name]
    with pytest.raises(UserError, match=f"here has a column '{name}'.*{said}"):
        reference_columns("here", ["image", "text", *beside, name], edits=True)


@pytest.mark.parametrize("right", ["references", "control", "control_path", "control_path_0"])
def test_other_columns_are_no_misspelt_ones(right: str) -> None:
    others = [
        "width",
        "height",
        "type",
        "fps",
        "duration",
        "num_frames",
        "frame_count",
        "id",
        "source",
        "url",
        "score",
        "split",
        "seed",
        "mask",
        "mask_path",
        "caption_path",
        "control_video",
        "control_type",
        "control_mask",
        "control_scale",
        "control_hash",
        "end_image",
        "first_image",
        "source_image",
        "target_image",
        "original_image",
        "edited_image",
        "edit_prompt",
        "edit_instruction",
        "reference_id",
        "reference_url",
        "edit_image_path",
        "control_path_md5",
        "preference",
        "difference",
        "control_directory",
    ]
    assert reference_columns("here", [*others, right], edits=True) == (right,)
    alone = others[: others.index("edited_image")]
    assert (
        reference_columns("here", alone, edits=True)
        == reference_columns("here", alone, edits=False)
        == ()
    )


def test_a_model_of_text_passes_over_what_it_passed_over() -> None:
    assert (
        reference_columns(
            "here", ["control_paths", "control_path", "control_directory"], edits=False
        )
        == ()
    )
    assert reference_columns("here", ["reference", "contorl"], edits=False) == ("reference",)
    with pytest.raises(UserError, match="'controls'; rename it to 'control' if"):
        reference_columns("here", ["controls"], edits=False)
