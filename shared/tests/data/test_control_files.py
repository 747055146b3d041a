"""What goes with a clip: columns of metadata, folders of equally named files, and what is wrong
with them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from data_specs import CLIPS
from media_files import numbered_video, picture, sound_only

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, Sample, scan
from ditkit_core.data.media.clip import IMAGE_SUFFIXES
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column

COLUMNS = (
    Column(name="control_video", kind="video", aliases=("pose",)),
    Column(name="first_image", kind="image", aliases=("input_image", "image")),
    Column(name="music", kind="audio"),
    Column(name="direction", kind="text"),
    Column(name="poses", kind="table"),
)


def look(folder: Path, *, columns: tuple[Column, ...] = COLUMNS, **settings: Any) -> Dataset:
    data = DataConfig(**{"folder": str(folder), "frames": 5, "height": 32, "width": 32, **settings})
    return scan(data, CLIPS, columns)


def test_each_path_of_the_section_may_begin_with_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for name in ("set", "depth", "masks"):
        numbered_video(tmp_path / name / "a.mp4", size=(32, 32))
    (tmp_path / "list.jsonl").write_text(json.dumps({"video": "a.mp4", "text": "x"}))

    def found(home: str) -> Dataset:
        paths = {
            "metadata": f"{home}/list.jsonl",
            "controls": (f"control_video={home}/depth",),
            "masks": f"{home}/masks",
        }
        return look(Path(f"{home}/set"), **paths)

    assert found("~") == found(str(tmp_path)) and found("~").samples[0].mask
    (tmp_path / "set" / "a.txt").write_text("x")
    several = DataConfig(folders=("~/set",), frames=5, height=32, width=32)
    assert len(scan(several, CLIPS).samples) == 1


def rows(folder: Path, *found: dict[str, Any], kind: str = "jsonl") -> None:
    if kind == "jsonl":
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, found)))
    elif kind == "json":
        (folder / "metadata.json").write_text(json.dumps(list(found)))
    else:
        names = list(found[0])
        lines = [names, *([str(row.get(name, "")) for name in names] for row in found)]
        (folder / "metadata.csv").write_text("\n".join(",".join(line) for line in lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    for name in ("a", "b"):
        numbered_video(folder / f"{name}.mp4", fps=16, frames=24)
        (folder / f"{name}.txt").write_text(name)
    numbered_video(folder / "extra" / "depth.mp4", fps=16, frames=24)
    picture(folder / "extra" / "face.png")
    (folder / "extra" / "song.wav").write_bytes(b"RIFF")
    (folder / "extra" / "poses.npy").write_bytes(b"NUMPY")
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_columns_and_their_other_names_become_controls(folder: Path, kind: str) -> None:
    full = {
        "file_path": "a.mp4", "text": "one", "type": "video", "pose": "extra/depth.mp4",
        "input_image": "extra/face.png",
        "music": "extra/song.wav", "direction": "left", "poses": "extra/poses.npy",
    }  # fmt: skip
    rows(folder, full, {"file_path": "b.mp4", "text": "two"}, kind=kind)
    one, two = look(folder).samples
    place = folder / "extra"
    assert one.controls == {
        "control_video": str(place / "depth.mp4"), "first_image": str(place / "face.png"),
        "music": str(place / "song.wav"), "direction": "left", "poses": str(place / "poses.npy"),
    }  # fmt: skip
    assert (two.controls, one.captions) == ({}, ("one",))


def test_a_name_of_media_is_a_control_next_to_another(folder: Path) -> None:
    rows(folder, {"video": "a.mp4", "image": "extra/face.png", "text": "one"})
    (sample,) = look(folder).samples
    assert sample.controls == {"first_image": str(folder / "extra" / "face.png")}
    (folder / "metadata.jsonl").unlink()
    rows(folder, {"image": "extra/face.png", "text": "one"})
    (sample,) = look(folder).samples
    assert (sample.id, sample.controls) == ("extra/face", {})


def test_empty_fields_and_lists_of_one(folder: Path) -> None:
    rows(
        folder,
        {
            "video": "a.mp4",
            "text": "x",
            "pose": ["extra/depth.mp4"],
            "music": None,
            "direction": 0.5,
            "first_image": "",
        },
        {"video": "b.mp4", "text": "x", "pose": [], "direction": "  "},
    )
    found = [sample.controls for sample in look(folder).samples]
    assert found == [{"control_video": str(folder / "extra" / "depth.mp4"), "direction": "0.5"}, {}]


def row(**controls: Any) -> dict[str, Any]:
    return {"video": "a.mp4", "text": "x", **controls}


BAD = {
    "control_vide": (
        row(control_vide="x"),
        "has a column 'control_vide'; did you mean 'control_video'\\?",
    ),
    "twice": (
        row(pose="a.mp4", control_video="a.mp4"),
        "'pose' and 'control_video', which mean the same; remove one",
    ),
    "gone": (row(pose="gone.mp4"), "control_video .*gone.mp4 does not exist; correct the path"),
    "outside": (row(pose="../../x.mp4"), "leaves the dataset folder"),
    "kind": (
        row(pose="extra/song.wav"),
        "control_video .*song.wav is not of kind video by its extension; accepted: .3gp .avi",
    ),
    "a video for a picture": (
        row(first_image="a.mp4"),
        "first_image .*a.mp4 is not of kind image by its extension",
    ),
    "several": (
        row(first_image=["extra/face.png", "extra/face.png"]),
        "'first_image' is not the path of a single file",
    ),
    "number": (row(music=3), "'music' is not the path of a single file"),
    "truth": (row(direction=True), "'direction' is not a text"),
    "object": (row(direction={"to": 1}), "'direction' is not a text"),
    "null byte": (row(pose="a\0.mp4"), "has a character that no file name can have"),
    "a folder": (row(poses="extra"), "poses .*extra is a folder, not a file"),
    "images without numbers": (
        row(pose="extra"),
        "control_video: .*extra does not contain only numbered images",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_control_is_a_bad_entry(folder: Path, kind: str) -> None:
    bad, said = BAD[kind]
    rows(folder, bad, {"video": "b.mp4", "text": "fine"})
    with pytest.raises(UserError, match=said) as caught:
        look(folder)
    assert "\n" not in str(caught.value)
    assert [sample.id for sample in look(folder, on_bad="skip").samples] == ["b"]


def test_a_misspelt_column_of_a_table_stops_it_all(folder: Path) -> None:
    (folder / "metadata.csv").write_text("video,text,control_vidoe\na.mp4,x,extra/depth.mp4\n")
    with pytest.raises(
        UserError, match="line 1 has a column 'control_vidoe'; did you mean 'control_video'"
    ):
        look(folder, on_bad="skip")


@pytest.mark.parametrize("content", ["", "text"])
def test_empty_and_foreign_files_are_said(folder: Path, content: str) -> None:
    (folder / "bad.mp4").write_text(content)
    rows(folder, row(pose="bad.mp4"))
    with pytest.raises(
        UserError, match=r"control_video.*bad.mp4 (is empty \(0 bytes\)|cannot be read as a video)"
    ):
        look(folder)


def test_a_control_video_must_last_as_long_as_what_is_read_of_its_clip(folder: Path) -> None:
    numbered_video(folder / "extra" / "depth.mp4", fps=16, frames=12)
    rows(folder, row(pose="extra/depth.mp4"))
    assert len(look(folder).samples) == 1
    with pytest.raises(
        UserError, match="depth.mp4 has 12 frames at 16 fps, but its clip needs 24; make it as long"
    ):
        look(folder, windows="uniform", clips_per_file=2)
    rows(folder, row(pose="extra/face.png"))
    assert len(look(folder, windows="uniform", clips_per_file=2).samples) == 2, (
        "a still picture lasts"
    )


def test_an_image_of_one_moment_is_not_shared_by_other_windows(folder: Path) -> None:
    moment = (Column(name="start", kind="image", moment="begin"),)
    rows(
        folder,
        {"video": "a.mp4", "text": "x", "start": "extra/face.png"},
        {"video": "b.mp4", "text": "x"},
    )
    assert len(look(folder, columns=moment).samples) == 2
    for windows in ("all", "uniform"):
        with pytest.raises(
            UserError,
            match="start .*face.png shows how one clip begins, but data.windows takes .* from its file",
        ):
            look(folder, columns=moment, windows=windows)
        left = look(folder, columns=moment, windows=windows, on_bad="skip")
        assert {sample.media.name for sample in left.samples} == {"b.mp4"}
    assert len(look(folder, columns=moment, windows="all", frames=21).samples) == 2, (
        "one window, at the start"
    )


def test_a_required_column_that_is_missing_is_a_bad_entry(folder: Path) -> None:
    needed = (Column(name="control_video", kind="video", required=True),)
    rows(
        folder,
        {"video": "a.mp4", "text": "x", "control_video": "extra/depth.mp4"},
        {"video": "b.mp4", "text": "x"},
    )
    with pytest.raises(
        UserError, match="b.mp4 has no control_video, which this model requires; add it"
    ):
        look(folder, columns=needed)
    assert [sample.id for sample in look(folder, columns=needed, on_bad="skip").samples] == ["a"]


def beside(folder: Path, *, on_bad: str = "error") -> list[Sample]:
    masks = folder.parent / "masks"
    return look(
        folder, controls=(f"pose = {masks}", f"direction={folder / 'says'}"), on_bad=on_bad
    ).samples


def test_a_folder_of_equally_named_files(folder: Path) -> None:
    masks = folder.parent / "masks"
    numbered_video(masks / "a.mkv", fps=16)
    (folder / "says").mkdir()
    for name in ("a", "b"):
        (folder / "says" / f"{name}.txt").write_text(f" to {name}\n")
        numbered_video(folder / "says" / f"{name}.mp4")
    for i in range(6):
        picture(masks / "b" / f"{i}.png")
    (folder / "extra" / "depth.txt").write_text("x")
    (folder / "extra" / "face.txt").write_text("x")
    controls = {sample.id: dict(sample.controls) for sample in beside(folder)}
    assert controls["a"] == {"control_video": str(masks / "a.mkv"), "direction": "to a"}
    assert controls["b"] == {"control_video": str(masks / "b"), "direction": "to b"}
    assert controls["extra/depth"] == {}, "and what lies in the folder of controls is no sample"
    numbered_video(masks / "c.mp4")
    dataset = look(folder, controls=(f"pose={masks}",))
    assert (str(masks / "c.mp4"), "no sample has this name") in dataset.excluded
    picture(masks / "a.png")
    with pytest.raises(
        UserError,
        match="a.mkv and a.png in .*masks both match 'a' as its control_video; remove all but one",
    ):
        look(folder, controls=(f"pose={masks}",))


def image_control(folder: Path) -> Path:
    """Images as the control of every clip: of the metadata inside the dataset."""
    shot = folder / "poses"
    for i in range(24):
        picture(shot / f"{i:02d}.png")
    rows(folder, row(pose="poses"))
    return shot


@pytest.mark.parametrize("name", ["24.png", "fps.txt"])
def test_images_of_a_control_behind_links_stay_inside(folder: Path, name: str) -> None:
    shot = image_control(folder)
    assert look(folder).samples[0].controls["control_video"] == str(shot)
    secret = folder.parent / "secret"
    secret.write_text("24")
    try:
        (shot / name).symlink_to(
            picture(folder.parent / "secret.png") if name == "24.png" else secret
        )
    except OSError:
        pytest.skip("this system does not let us make symbolic links")
    with pytest.raises(UserError, match=r"control_video: .*leaves the dataset folder"):
        look(folder)
    assert len(look(folder, allow_outside=True).samples) == 1
    (folder.parent / "masks").mkdir()
    shot.rename(folder.parent / "masks" / "a")
    rows(folder, {"video": "a.mp4", "text": "one"})
    with pytest.raises(UserError, match=r"control_video: .*leaves the dataset folder"):
        look(folder, controls=(f"pose={folder.parent / 'masks'}",))


@pytest.mark.parametrize("name", ["03.png", "fps.txt"])
def test_a_named_pipe_among_the_images_of_a_control_is_said(folder: Path, name: str) -> None:
    shot = image_control(folder)
    (shot / name).unlink(missing_ok=True)
    try:
        os.mkfifo(shot / name)
    except (AttributeError, OSError):
        pytest.skip("this system has no named pipes")
    with pytest.raises(UserError, match=rf"control_video: .*{name} is not a regular file"):
        look(folder)


def test_metadata_and_a_folder_at_once_are_refused(folder: Path) -> None:
    numbered_video(folder.parent / "masks" / "a.mp4", fps=16)
    rows(folder, row(pose="extra/depth.mp4"))
    with pytest.raises(
        UserError,
        match="has control_video in the metadata and in data.controls; remove one of the two",
    ):
        look(folder, controls=(f"pose={folder.parent / 'masks'}",))


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("pose", "'pose', which is not column=folder; write it like vace_video=masks"),
        ("=x", "which is not column=folder"),
        ("posse=masks", "'posse', which is not a column of this model; did you mean pose\\?"),
        ("qqq=masks", "choose one of control_video, pose, first_image"),
        ("pose=nowhere", "the path does not exist or is not a folder"),
        ("pose={set}", "control_video is data.folder .* itself"),
        ("pose={set}/extra", "no file has the name of a sample"),
    ],
)
def test_folders_that_cannot_be_used_are_said(folder: Path, item: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        look(folder, controls=(item.replace("{set}", str(folder)),))


def test_a_folder_twice_or_for_a_model_without_controls(folder: Path) -> None:
    extra = folder / "extra"
    with pytest.raises(UserError, match="data.controls names control_video twice"):
        look(folder, controls=(f"pose={extra}", f"control_video={extra}"))
    with pytest.raises(UserError, match="this model takes no conditions from files; remove it"):
        look(folder, controls=(f"pose={extra}",), columns=())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "is not a JSON list"),
        ("[1]", "entry 1 is not a JSON object"),
        ('[{"text": "x"}]', "entry 1 has no media column"),
        ("[", "line 1 is not valid JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('[{"video": "a.mp4", "video": "b.mp4", "text": "x"}]', "has 'video' twice"),
    ],
)
def test_a_json_list_that_cannot_be_read_is_one_line(folder: Path, text: str, said: str) -> None:
    (folder / "metadata.json").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        look(folder)
    assert "\n" not in str(caught.value)


def test_sound_of_a_video_counts_as_music(folder: Path) -> None:
    sound_only(folder / "extra" / "song.mp4")
    rows(folder, row(music="extra/song.mp4"))
    assert look(folder).samples[0].controls == {"music": str(folder / "extra" / "song.mp4")}
    assert ".mp4" not in IMAGE_SUFFIXES


def test_features_of_any_size_are_not_read(folder: Path) -> None:
    (folder / "extra" / "music.npy").touch()
    os.truncate(folder / "extra" / "music.npy", 2**30 + 1)  # sparse: it takes no room
    rows(folder, {"video": "a.mp4", "text": "a", "music": "extra/music.npy"})
    with pytest.raises(
        UserError,
        match=r"music .*music.npy has 1073741825 bytes, more than the 1073741824 that are read",
    ):
        look(folder)
