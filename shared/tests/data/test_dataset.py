"""From a folder to a checked list of samples."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from data_specs import CLIPS, STILLS
from media_files import numbered_video, picture
from PIL import Image

from ditkit_core.data.caption_files import caption_folders
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.errors import UserError


def look(folder: Path, **settings: object) -> Dataset:
    config = {"folder": str(folder), "frames": 9, "height": 32, "width": 48, **settings}
    return scan(DataConfig(**config), CLIPS)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    numbered_video(folder / "b.mp4")
    numbered_video(folder / "sub" / "A.MKV")
    picture(folder / "a.png")
    for name, caption in (
        ("b.txt", " a bee \n"),
        ("sub/A.txt", "\ufeffcafé"),
        ("a.txt", "an ant\nand more"),
    ):
        (folder / name).write_text(caption, encoding="utf-8")
    return folder


def summary(dataset: Dataset) -> list[tuple[str, str, int]]:
    return [(sample.id, sample.captions[0], sample.frames) for sample in dataset.samples]


def test_captions_are_next_to_the_media(folder: Path) -> None:
    dataset = look(folder)
    assert summary(dataset) == [
        ("a", "an ant\nand more", 1),
        ("b", "a bee", 9),
        ("sub/A", "café", 9),
    ]
    assert dataset.samples[2].media == folder / "sub" / "A.MKV"
    assert (dataset.excluded, dataset.fps) == ([], 16.0)


def test_hidden_and_foreign_files_are_ignored(folder: Path) -> None:
    numbered_video(folder / ".hidden.mp4")
    numbered_video(folder / ".cache" / "c.mp4")
    (folder / "readme.txt").write_text("about this set")
    (folder / "list.pdf").write_bytes(b"x")
    assert [sample.id for sample in look(folder).samples] == ["a", "b", "sub/A"]


@pytest.mark.parametrize("media", ["file_name", "video", "image", "file_path", "path"])
@pytest.mark.parametrize("caption", ["text", "prompt", "caption"])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_metadata_takes_the_columns_in_use(
    folder: Path, kind: str, media: str, caption: str
) -> None:
    if kind == "jsonl":
        rows = [
            {media: "sub/A.MKV", caption: "one, two", "width": 3},
            {media: "a.png", caption: "café"},
        ]
        text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    else:
        text = f'width,{media},{caption}\n3,sub/A.MKV,"one, two"\n,a.png,café\n'
    (folder / f"metadata.{kind}").write_text("\ufeff" + text, encoding="utf-8")
    assert summary(look(folder)) == [("a", "café", 1), ("sub/A", "one, two", 9)]


def test_metadata_may_be_named_and_may_be_ambiguous(folder: Path) -> None:
    for name in ("metadata.csv", "other.csv"):
        (folder / name).write_text(f"video,text\nb.mp4,{name}\n")
    (folder / "metadata.jsonl").write_text('{"video": "b.mp4", "text": "json"}')
    assert summary(look(folder, metadata="other.csv")) == [("b", "other.csv", 9)]
    with pytest.raises(
        UserError, match="both metadata.jsonl and metadata.csv; set data.metadata to the right one"
    ):
        look(folder)
    for name, said in (
        ("gone.csv", "does not exist"),
        ("b.txt", "unknown format; accepted are .jsonl, .csv, .json"),
    ):
        with pytest.raises(UserError, match=said):
            look(folder, metadata=name)


def test_paths_in_metadata_may_be_written_in_different_ways(folder: Path) -> None:
    rows = [
        {"path": str(folder / "b.mp4"), "text": "absolute"},
        {"path": "sub/../a.png", "text": "roundabout"},
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert summary(look(folder)) == [("a", "roundabout", 1), ("b", "absolute", 9)]


def test_paths_may_leave_the_folder_when_that_is_allowed(folder: Path) -> None:
    numbered_video(folder.parent / "outside.mp4")
    (folder / "metadata.jsonl").write_text('{"path": "../outside.mp4", "text": "out"}')
    (sample,) = look(folder, allow_outside=True).samples
    assert sample.id == (folder.parent / "outside").as_posix()


def test_links_count_under_their_own_name(folder: Path) -> None:
    # no extension, as in a download cache
    content = numbered_video(folder.parent / "blob.mp4").rename(folder.parent / "3f9a")
    try:
        (folder / "linked.mp4").symlink_to(content)
    except OSError:
        pytest.skip("this system does not let us make symbolic links")
    (folder / "linked.txt").write_text("linked")
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    dataset = look(folder, allow_outside=True)
    assert [sample.id for sample in dataset.samples] == ["a", "b", "linked", "sub/A"]


def test_the_frame_rate_is_the_models_unless_set(folder: Path) -> None:
    assert look(folder, fps=8.0, frames=5).fps == 8.0
    with pytest.raises(UserError, match="b.mp4 has 8 frames at 8 fps, but data.frames asks for 9"):
        look(folder, fps=8.0)


def test_order_and_ids_do_not_depend_on_where_the_folder_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absolute = look(folder)
    monkeypatch.chdir(folder.parent)
    assert summary(look(Path("set"))) == summary(absolute)
    rows = [{"path": str(sample.media), "text": sample.captions[0]} for sample in absolute.samples]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for written in ("set", "set/sub/.."):
        assert summary(look(Path(written))) == summary(absolute)
    monkeypatch.chdir(folder)
    assert summary(look(Path("."))) == summary(absolute)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"frames": 10}, r"data.frames = 10 is not 1 \+ k \* 4; set 9 or 13"),
        ({"frames": -1}, "data.frames = -1 is not between 0 and 65536; set 0"),
        ({"height": 40}, "data.height = 40 is not a multiple of 16; set 32 or 48"),
        ({"width": 8}, "data.width = 8 is not a multiple of 16; set 16 or 32"),
        ({"width": -16}, "data.width = -16 is not between 0 and 16384; set 0"),
        ({"fps": -1.0}, "data.fps = -1.0 is not between 0 and 1000; set 0"),
        ({"fps": float("nan")}, "data.fps = nan is not between 0 and 1000; set 0"),
    ],
)
def test_settings_that_do_not_fit_say_what_would(
    folder: Path, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        look(folder, **settings)


@pytest.mark.parametrize(
    ("name", "said"), [("", "data.folder is not set"), ("x/y", "data.folder x/y does not exist")]
)
def test_a_folder_has_to_be_there(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        scan(DataConfig(folder=name), CLIPS)


def test_two_caption_columns_are_refused(tmp_path):
    (tmp_path / "metadata.csv").write_text("file_name,text,caption\na.mp4,one,two\n")
    with pytest.raises(UserError, match="2 caption columns, text, caption"):
        look(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"file_name": "a\\u0000.mp4", "text": "x"}',
        '{"file_name": "%s.mp4", "text": "x"}' % ("a" * 500),
        "[" * 100_000,
    ],
)
def test_a_line_that_no_file_system_or_parser_takes_is_a_bad_entry(tmp_path, line):
    (tmp_path / "metadata.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="line 1") as caught:
        look(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_called_like_a_clip_is_said(tmp_path):
    (tmp_path / "clip.mp4").mkdir()
    with pytest.raises(UserError, match="is a folder, not a media file"):
        look(tmp_path)


def test_a_caption_may_be_several(folder: Path) -> None:
    rows = [
        {"path": "a.png", "text": [" one ", "two\nlines"]},
        {"path": "b.mp4", "text": "first\n\n second "},
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [sample.captions for sample in look(folder).samples] == [
        ("one", "two\nlines"),
        ("first\n\n second",),
    ]
    by_lines = look(folder, captions="lines")
    assert [sample.captions for sample in by_lines.samples] == [
        ("one", "two", "lines"),
        ("first", "second"),
    ]
    assert by_lines.captions == ["one", "first"]


def test_each_line_of_a_text_next_to_the_media_may_be_a_caption(folder: Path) -> None:
    (folder / "b.txt").write_text("\n one\n\ntwo \r\nthree", newline="")
    captions = {sample.id: sample.captions for sample in look(folder, captions="lines").samples}
    assert captions == {
        "a": ("an ant", "and more"),
        "b": ("one", "two", "three"),
        "sub/A": ("café",),
    }


def test_each_image_and_clip_gets_the_bucket_of_its_aspect(tmp_path: Path) -> None:
    sizes = {"square": (50, 50), "wide": (40, 60), "tall": (90, 60), "long": (10, 100)}
    for name, size in sizes.items():
        picture(tmp_path / f"{name}.png", size)
    numbered_video(tmp_path / "clip.mp4", size=(48, 64), rotation=90)
    photograph = Image.new("RGB", (60, 40))
    exif = photograph.getexif()
    exif[0x0112] = 6  # turned on its side
    photograph.save(tmp_path / "upright.jpg", exif=exif)
    for name in (*sizes, "clip", "upright"):
        (tmp_path / f"{name}.txt").write_text(name)

    def found(**settings: object) -> dict[str, tuple[int, int]]:
        return {
            s.id: (s.height, s.width)
            for s in look(tmp_path, height=96, width=96, **settings).samples
        }

    assert set(found(buckets=False).values()) == {(96, 96)}
    assert found() == {
        "square": (96, 96), "wide": (64, 128), "tall": (128, 64), "long": (64, 128), "clip": (96,
        96),
        "upright": (128, 64),
    }  # fmt: skip
    assert found(bucket_step=16) == {
        "square": (96, 96), "wide": (80, 112), "tall": (112, 80), "long": (64, 128), "clip": (112,
        80),
        "upright": (112, 80),
    }  # fmt: skip
    assert found(buckets=True, bucket_step=16, max_aspect=1.7) == {
        "square": (96, 96), "wide": (80, 128), "tall": (128, 80), "long": (80, 128), "clip": (112,
        80),
        "upright": (128, 80),
    }  # fmt: skip
    assert found(buckets=True)["long"] == (64, 128), "steps of 64, four times the model's own"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bucket_step": 24}, "data.bucket_step = 24 is not a multiple of 16; set 16 or 32"),
        ({"bucket_step": -16}, "data.bucket_step = -16 is not between 0 and 4096; set 0"),
        ({"max_aspect": 0.5}, "data.max_aspect = 0.5 is not between 1 and 16; set 1"),
        ({"buckets": True, "bucket_step": 256}, "lower data.bucket_step"),
    ],
)
def test_buckets_that_do_not_fit_say_what_would(
    folder: Path, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        look(folder, **settings)


def test_a_model_of_still_images_refuses_videos_one_by_one(folder: Path) -> None:
    def stills(**settings: object) -> Dataset:
        config = {"folder": str(folder), "frames": 1, "height": 32, "width": 48, **settings}
        return scan(DataConfig(**config), replace(STILLS, fps=0.0))  # type: ignore[arg-type]

    with pytest.raises(
        UserError, match=r"b.mp4 is a video, .* convert it to images or remove it \(and 1 more"
    ):
        stills()
    assert [sample.id for sample in stills(on_bad="skip").samples] == ["a"]
    with pytest.raises(
        UserError, match="data.frames = 5: this model takes still images only; set 1"
    ):
        stills(frames=5)


def test_excluded_files_are_not_trained_and_their_names_are_checked(folder: Path) -> None:
    picture(folder / "b.png")  # of the same name as b.mp4, which is an error
    (folder / "a-mask.png").write_bytes((folder / "a.png").read_bytes())
    dataset = look(folder, exclude=("b.png", "a.png"))
    assert [sample.id for sample in dataset.samples] == ["b", "sub/A"]
    assert dataset.excluded == [], "nobody has to be told what they asked for"
    for name, said in (("sub/A.MKw", "did you mean sub/A.MKV?"), ("nothing", "correct the name")):
        with pytest.raises(UserError, match=rf"data\.exclude has '{name}', .*{re.escape(said)}"):
            look(folder, exclude=("b.png", name))
    with pytest.raises(UserError, match="all are in data.exclude"):
        look(folder, exclude=("a.png", "b.png", "b.mp4", "sub/A.MKV"))
    with pytest.raises(UserError, match="has a name twice"):
        look(folder, exclude=("a.png", "a.png"))
    rows = [{"file_name": name, "text": name} for name in ("a.png", "b.mp4")]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [sample.id for sample in look(folder, exclude=("a.png",)).samples] == ["b"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "text": " "}\n{"file_name": "b.mp4", "text": "x"}',
        ),
        ("metadata.json", '[{"file_name": "a.png"}, {"file_name": "b.mp4", "text": "x"}]'),
        ("metadata.csv", "video,prompt\na.png,\nb.mp4,x"),
        ("videos.txt", "a.png\nb.mp4"),
    ],
)
def test_a_file_whose_line_has_a_mistake_can_be_left_out(
    folder: Path, name: str, text: str
) -> None:
    for path in folder.rglob("*.txt"):
        path.unlink()
    (folder / name).write_text(text)
    if name == "videos.txt":
        (folder / "prompts.txt").write_text("\nx")
    with pytest.raises(UserError, match="empty|no caption"):
        look(folder)
    assert look(folder, on_bad="skip").excluded[0][0] == "a.png", "called by its name"
    assert [sample.id for sample in look(folder, exclude=("a.png",)).samples] == ["b"]
    with pytest.raises(UserError, match="did you mean a.png"):
        look(folder, exclude=("a.pgn",), on_bad="skip")


def test_of_several_folders_the_folder_comes_before_the_name(folder: Path, tmp_path: Path) -> None:
    for name in "ac":
        picture(tmp_path / "more" / f"{name}.png")
        (tmp_path / "more" / f"{name}.txt").write_text("another")
    folders = (str(folder), str(tmp_path / "more"))

    def ids(name: str) -> list[str]:
        config = DataConfig(folders=folders, exclude=(name,), frames=9, height=32, width=48)
        found = scan(config, CLIPS)
        return [sample.id for sample in found.samples]

    assert ids("more/a.png") == ["more/c", "set/a", "set/b", "set/sub/A"]
    with pytest.raises(UserError, match=r"did you mean (set|more)/a\.png\?"):
        ids("a.png")


def test_captions_are_written_for_no_excluded_file(folder: Path) -> None:
    config = DataConfig(folder=str(folder), exclude=("a.png",))
    (files,) = caption_folders(config, (), edits=False)
    assert [item.name for item in files.items] == ["b.mp4", "sub/A.MKV"]
    with pytest.raises(UserError, match="did you mean a.png"):
        caption_folders(replace(config, exclude=("a.pgn",)), (), edits=False)


def test_a_name_that_is_no_utf_8_is_one_line(folder: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    try:
        picture(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("x")
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    with pytest.raises(UserError, match="is not a valid UTF-8 name; rename the file"):
        look(folder)
    assert len(look(folder, on_bad="skip").samples) == 3


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (
            "video;prompt",
            "fields must be separated by commas, not by ';': save the file with commas",
        ),
        ("video\tprompt", "fields must be separated by commas, not by '.t': save the file"),
        ("video,Prompt", "has no caption column: found video, Prompt; write 'Prompt' as 'prompt'"),
    ],
)
def test_a_table_that_another_program_saved_is_answered_with_what_to_change(
    folder: Path, head: str, said: str
) -> None:
    (folder / "metadata.csv").write_text(f"{head}\nb.mp4,x\n")
    with pytest.raises(UserError, match=said):
        look(folder)
    (folder / "metadata.csv").write_text('video, prompt\nb.mp4, "a cat, asleep"\n')
    assert look(folder).captions == ["a cat, asleep"]


def test_a_list_under_another_name_is_pointed_at_where_no_caption_is_there(folder: Path) -> None:
    (folder / "my clips.json").write_text("[]")
    (folder / "b.txt").unlink()
    with pytest.raises(UserError, match=r"has no caption; write one to \S+b.txt \("):
        look(folder)
    for file in folder.glob("*.txt"):
        file.unlink()
    with pytest.raises(UserError, match='or set data.metadata = "my clips.json" if that lists'):
        look(folder)
