"""Datasets as other trainers lay them out: read as they are, or told in one line what to change."""

import json
from pathlib import Path
from typing import Any

import pytest

from ditkit_core.conditions import Column
from ditkit_core.data_config import DataConfig
from ditkit_core.dataset import Dataset, scan
from ditkit_core.errors import UserError
from media_files import numbered_video, picture
from one_line import assert_one_line

LISTED = ("pictures", "more_pictures", "last_pictures")
COLUMNS = (
    Column(name="depth", kind="video", aliases=("control_path",)),
    *(Column(name=name, kind="image", aliases=("object_file_path",)) for name in LISTED),
)
"""Of a model that follows a video and is shown up to three pictures."""


def look(folder: Path, *, columns: tuple[Column, ...] = (), edits: bool = False, **settings: Any) -> Dataset:
    config = DataConfig(**{"folder": str(folder), "frames": 5, "height": 32, "width": 32, **settings})
    return scan(
        config, frame_step=4, size_step=16, fps=24.0, columns=columns,
        reference_size=(lambda height, width, count: (16, 16)) if edits else None,
    )  # fmt: skip


def summary(dataset: Dataset) -> list[tuple[str, tuple[str, ...]]]:
    return [(sample.id, sample.captions) for sample in dataset.samples]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two clips and a picture, and nothing that says what they show."""
    folder = tmp_path / "set"
    for name in ("0", "1"):
        numbered_video(folder / "videos" / f"{name}.mp4", frames=6)
    picture(folder / "images" / "2.png")
    return folder


def jsonl(folder: Path, *rows: dict[str, Any], name: str = "metadata.jsonl") -> None:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))


def clip(folder: Path, name: str = "0", **more: Any) -> dict[str, Any]:
    return {"video_path": str(folder / "videos" / f"{name}.mp4"), "caption": name, **more}


def test_json_lines_of_musubi_with_absolute_paths(folder: Path) -> None:
    image = {"image_path": str(folder / "images" / "2.png"), "caption": "2"}
    jsonl(
        folder, clip(folder), clip(folder, "1", control_path=str(folder / "videos" / "0.mp4")), image, name="any.jsonl"
    )
    dataset = look(folder, metadata="any.jsonl", columns=COLUMNS)
    assert summary(dataset) == [("images/2", ("2",)), ("videos/0", ("0",)), ("videos/1", ("1",))]
    assert [dict(sample.controls) for sample in dataset.samples] == [
        {},
        {},
        {"depth": str(folder / "videos" / "0.mp4")},
    ]
    assert summary(look(folder, metadata="any.jsonl")) == summary(dataset), "a model that is told text alone"


def test_pictures_of_musubi_are_references_of_a_model_that_edits(folder: Path) -> None:
    for name in ("a", "b"):
        picture(folder / "before" / f"{name}.png")
    place = folder / "before"
    first = {"image_path": "images/2.png", "caption": "2", "control_path_0001": str(place / "b.png")}
    for control in ("control_path", "control_path_0", "control_path_0000"):
        jsonl(folder, first | {control: "before/a.png"})
        (sample,) = look(folder, edits=True).samples
        assert [path.name for path in sample.references] == ["a.png", "b.png"], "in order of their numbers"
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text(
        "image_path,caption,control_path_1,control_path_0\nimages/2.png,2,,before/b.png\nvideos/0.mp4,0,,\n"
    )
    still, moving = look(folder, edits=True).samples
    assert ([path.name for path in still.references], moving.references) == (["b.png"], ())


VAGUE = {
    "which one": (
        {"control_path": "x"},
        COLUMNS[1:3],
        False,
        "'control_path', .* call it pictures or more_pictures, or",
    ),
    "numbered": ({"control_path_0": "x"}, COLUMNS, False, "'control_path_0'; did you mean 'control_path'"),
    "of another model": (
        {"control_file_path": "x"},
        COLUMNS[1:2],
        False,
        "'control_file_path', .* call it pictures, or",
    ),
    "of a control": ({"object_file_path": ["x"]}, (), True, "'object_file_path', .* call it references, or remove it"),
    "two kinds": (
        {"control_path": "x", "references": "y"},
        (),
        True,
        "several reference columns, references, control_path",
    ),
    "a number twice": ({"control_path": "x", "control_path_00": "y"}, (), True, "control_path, control_path_00 twice"),
    "both": ({"control_path": "x", "depth": "y"}, COLUMNS, False, "'control_path' and 'depth', which mean the same"),
}


@pytest.mark.parametrize("kind", VAGUE)
def test_a_column_that_may_mean_several_things_is_not_guessed_at(folder: Path, kind: str) -> None:
    more, columns, edits, said = VAGUE[kind]
    jsonl(folder, clip(folder, **more))
    with pytest.raises(UserError, match=f"line 1 has .*{said}"):
        look(folder, columns=columns, edits=edits)


def test_a_list_fills_the_columns_that_share_its_name(folder: Path) -> None:
    files = [str(picture(folder / "objects" / f"{name}.png")) for name in range(4)]
    for count in (0, 1, 3):
        jsonl(folder, clip(folder, object_file_path=files[:count]))
        (sample,) = look(folder, columns=COLUMNS).samples
        assert dict(sample.controls) == dict(zip(LISTED, files[:count], strict=False))
    jsonl(folder, clip(folder, object_file_path=files[0]))
    assert dict(look(folder, columns=COLUMNS).samples[0].controls) == {"pictures": files[0]}
    jsonl(folder, clip(folder, object_file_path=files))
    assert_one_line(lambda: look(folder, columns=COLUMNS), "'object_file_path' names 4 files and this model takes 3")
