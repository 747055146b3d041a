"""Datasets as other trainers lay them out: read as they are, or told in one line what to change."""

import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from dataset_looks import look
from media_files import LEVELS, numbered_video, picture
from one_line import assert_one_line

from ditkit_core.data.dataset import Dataset
from ditkit_core.data.media.clip import read_clip
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column

LISTED = ("pictures", "more_pictures", "last_pictures")
COLUMNS = (
    Column(name="depth", kind="video", aliases=("control_path",)),
    *(Column(name=name, kind="image", aliases=("object_file_path",)) for name in LISTED),
)
"""Of a model that follows a video and is shown up to three images."""


def summary(dataset: Dataset) -> list[tuple[str, tuple[str, ...]]]:
    return [(sample.id, sample.captions) for sample in dataset.samples]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two clips and an image, and nothing that says what they show."""
    folder = tmp_path / "set"
    for name in ("0", "1"):
        numbered_video(folder / "videos" / f"{name}.mp4", frames=6)
    picture(folder / "images" / "2.png")
    return folder


def lists(
    folder: Path,
    media: str,
    captions: str,
    *,
    names: tuple[str, str] = ("videos.txt", "prompts.txt"),
) -> None:
    for name, text in zip(names, (media, captions), strict=True):
        (folder / name).write_bytes(text.encode())


CLIPS = "videos/0.mp4\nvideos/1.mp4\n"


@pytest.mark.parametrize("captions", ["prompts.txt", "prompt.txt", "captions.txt", "caption.txt"])
@pytest.mark.parametrize("media", ["videos.txt", "video.txt", "images.txt", "image.txt"])
def test_line_i_of_one_list_belongs_to_line_i_of_the_other(
    folder: Path, media: str, captions: str
) -> None:
    lists(folder, CLIPS, "a cat\na dog\n", names=(media, captions))
    dataset = look(folder)
    assert summary(dataset) == [("videos/0", ("a cat",)), ("videos/1", ("a dog",))]
    if (media, captions) == ("videos.txt", "prompts.txt"):
        clip = read_clip(dataset.samples[0].media, frames=5, fps=dataset.fps, height=32, width=32)
        assert float((clip[:, 3].mean() + 1) * 127.5) == pytest.approx(3 * LEVELS, abs=2)


ODD = {
    "byte order marks and CRLF": (
        "\ufeffvideos/0.mp4\r\nvideos/1.mp4\r\n",
        "\ufeffa cat\r\na dog\r\n",
    ),
    "carriage returns alone": ("videos/0.mp4\rvideos/1.mp4\r", "a cat\ra dog"),
    "empty lines at the end": (CLIPS + "\n \n", "a cat\na dog"),
    "a line that is empty in both": ("videos/0.mp4\n\nvideos/1.mp4", "a cat\n\na dog"),
    "spaces and other ways to write a path": (
        "  videos/0.mp4 \n./videos/../videos/1.mp4",
        " a cat\t\na dog",
    ),
    "a separator of lines within a caption": (CLIPS, "a cat\na dog".replace(" cat", "\u2028cat")),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("settings", [{}, {"metadata": "videos.txt"}])
def test_lists_as_programs_write_them_are_read(
    folder: Path, kind: str, settings: dict[str, str]
) -> None:
    lists(folder, *ODD[kind])
    found = summary(look(folder, **settings))
    assert [(id, text.replace("\u2028", " ")) for id, (text,) in found] == [
        ("videos/0", "a cat"),
        ("videos/1", "a dog"),
    ]


@pytest.mark.parametrize("apart", [",", "\u2028", "\u2029", "\x85", "\v", "\f", "\x1c"])
def test_a_line_is_one_caption_however_captions_are_read(folder: Path, apart: str) -> None:
    lists(folder, CLIPS, f"a cat{apart} asleep\na cat{apart} asleep\n")
    assert look(folder, captions="lines").captions == [f"a cat{apart} asleep"] * 2
    assert summary(look(folder, captions="lines")) == summary(look(folder))


def test_words_are_put_in_front_of_each_line(folder: Path) -> None:
    lists(folder, CLIPS, "a cat, asleep\na cat, asleep\n")
    assert look(folder, captions="lines", trigger="ohwx").captions == ["ohwx a cat, asleep"] * 2


def test_paths_in_a_list_may_be_absolute_and_inside(folder: Path) -> None:
    numbered_video(folder.parent / "out.mp4", frames=6)
    lists(folder, f"{folder / 'videos' / '0.mp4'}\n{folder.parent / 'out.mp4'}", "a cat\na dog")
    message = assert_one_line(lambda: look(folder), "out.mp4", "data.allow_outside = true")
    assert "leaves the dataset folder" in message
    assert summary(look(folder, on_bad="skip")) == [("videos/0", ("a cat",))]
    assert len(look(folder, allow_outside=True).samples) == 2


BAD_LINES = {
    "no caption": (CLIPS + "images/2.png", "a cat\n\na bird", "prompts.txt line 2 is empty"),
    "no file": (
        "videos/0.mp4\n\nimages/2.png",
        "a cat\na dog\na bird",
        "videos.txt line 2 is empty, but prompts.txt",
    ),
    "gone": (
        "videos/0.mp4\ngone.mp4\nimages/2.png",
        "a cat\na dog\na bird",
        "gone.mp4 does not exist",
    ),
    "no media": (
        "videos/0.mp4\nvideos/1\nimages/2.png",
        "a cat\na dog\na bird",
        "videos.txt line 2: videos/1 does not have the extension of a media file",
    ),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_a_bad_entry(folder: Path, kind: str) -> None:
    *written, said = BAD_LINES[kind]
    lists(folder, *written)
    assert_one_line(lambda: look(folder), said, 'data.on_bad = "skip" skips it')
    dataset = look(folder, on_bad="skip")
    assert summary(dataset) == [("images/2", ("a bird",)), ("videos/0", ("a cat",))]
    assert [said in reason for _, reason in dataset.excluded] == [True]


def test_a_clip_that_is_listed_twice_is_answered_with_what_has_several_captions(
    folder: Path,
) -> None:
    lists(folder, "videos/0.mp4\nvideos/0.mp4\nvideos/1.mp4", "a cat\na bird\na dog")
    assert_one_line(
        lambda: look(folder),
        "videos/0.mp4 is listed 2 times",
        "with a list of its captions in .jsonl",
    )
    assert summary(look(folder, on_bad="skip")) == [("videos/1", ("a dog",))]


@pytest.mark.parametrize(
    ("captions", "said"),
    [
        (
            "a cat\n",
            (
                "has 2 lines but {set}/prompts.txt has 1: line i of one belongs to line i of the "
                "other; write one caption"
            ),
        ),
        (
            "a cat\n\na dog\n",
            "prompts.txt has 3: .*; line 2 of prompts.txt is empty: remove it, or fill it in",
        ),
        ("", "prompts.txt has 0"),
    ],
)
def test_lists_of_different_lengths_are_of_no_use(folder: Path, captions: str, said: str) -> None:
    lists(folder, CLIPS, captions)
    with pytest.raises(UserError, match=f"videos.txt .*{said.replace('{set}', str(folder))}"):
        look(folder, on_bad="skip")


def test_which_lists_are_meant_is_said_or_asked(folder: Path) -> None:
    lists(folder, CLIPS, "a cat\na dog\n")
    (folder / "images.txt").write_text("images/2.png\nimages/2.png\n")
    assert_one_line(
        lambda: look(folder), "both images.txt and videos.txt; set data.metadata to the right one"
    )
    assert len(look(folder, metadata="videos.txt").samples) == 2
    (folder / "images.txt").unlink()
    (folder / "captions.txt").write_text("a cat\na dog\n")
    assert_one_line(
        lambda: look(folder, metadata="videos.txt"),
        "both captions.txt and prompts.txt for videos.txt",
    )
    for name in ("captions.txt", "prompts.txt"):
        (folder / name).unlink()
    assert_one_line(
        lambda: look(folder, metadata="videos.txt"),
        "there is no caption list next to it",
        "prompts.txt, line by line",
    )


def test_a_caption_next_to_a_clip_is_no_list(tmp_path: Path) -> None:
    for name in ("video", "prompt"):
        numbered_video(tmp_path / f"{name}.mp4", frames=6)
        (tmp_path / f"{name}.txt").write_text(f"a {name}")
    assert look(tmp_path).captions == ["a prompt", "a video"]


@pytest.mark.parametrize(
    ("there", "missing"), [("prompt.txt", "videos.txt"), ("videos.txt", "prompts.txt")]
)
def test_half_of_a_pair_of_lists_is_answered_with_the_other(
    folder: Path, there: str, missing: str
) -> None:
    (folder / there).write_text("x\n")
    assert_one_line(
        lambda: look(folder),
        "has no caption; write one to",
        f"write {missing} next to it, line by line",
    )


def test_captions_of_kohya_are_next_to_the_media(folder: Path) -> None:
    for name, suffix, text in (
        ("videos/0", "caption", " a cat\n"),
        ("videos/1", "txt", "a dog"),
        ("images/2", "caption", ""),
    ):
        (folder / f"{name}.{suffix}").write_text(text)
    assert_one_line(lambda: look(folder), "2.caption is empty")
    (folder / "images" / "2.caption").write_text("a bird\na plane")
    assert look(folder, captions="lines").captions == ["a bird", "a cat", "a dog"]
    (folder / "videos" / "1.caption").write_text("a dog\r\n")
    assert len(look(folder).samples) == 3, "the same twice"
    (folder / "videos" / "1.caption").write_text("animal, dog")
    assert look(folder).captions == ["a bird\na plane", "a cat", "a dog"], (
        "the text, if they differ"
    )
    (folder / "videos" / "1.txt").write_text("")
    assert_one_line(lambda: look(folder), "1.txt is empty")


def jsonl(folder: Path, *rows: dict[str, Any], name: str = "metadata.jsonl") -> None:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))


def clip(folder: Path, name: str = "0", **more: Any) -> dict[str, Any]:
    return {"video_path": str(folder / "videos" / f"{name}.mp4"), "caption": name, **more}


def test_json_lines_of_musubi_with_absolute_paths(folder: Path) -> None:
    image = {"image_path": str(folder / "images" / "2.png"), "caption": "2"}
    jsonl(
        folder,
        clip(folder),
        clip(folder, "1", control_path=str(folder / "videos" / "0.mp4")),
        image,
        name="any.jsonl",
    )
    dataset = look(folder, metadata="any.jsonl", columns=COLUMNS)
    assert summary(dataset) == [("images/2", ("2",)), ("videos/0", ("0",)), ("videos/1", ("1",))]
    assert [dict(sample.controls) for sample in dataset.samples] == [
        {},
        {},
        {"depth": str(folder / "videos" / "0.mp4")},
    ]
    assert summary(look(folder, metadata="any.jsonl")) == summary(dataset), (
        "a model that is told text alone"
    )


def test_images_of_musubi_are_references_of_a_model_that_edits(folder: Path) -> None:
    for name in ("a", "b"):
        picture(folder / "before" / f"{name}.png")
    place = folder / "before"
    first = {
        "image_path": "images/2.png",
        "caption": "2",
        "control_path_0001": str(place / "b.png"),
    }
    for control in ("control_path", "control_path_0", "control_path_0000"):
        jsonl(folder, first | {control: "before/a.png"})
        (sample,) = look(folder, edits=True).samples
        assert [path.name for path in sample.references] == ["a.png", "b.png"], (
            "in order of their numbers"
        )
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
        "'control_path', .* rename it to pictures or more_pictures, or",
    ),
    "numbered": (
        {"control_path_1": "x"},
        COLUMNS,
        False,
        "'control_path_1', .* a single file; rename it to 'depth', or",
    ),
    "twice by number": (
        {"control_path": "x", "control_path_0": "x"},
        COLUMNS,
        False,
        "'control_path' and 'control_path_0', which mean the same",
    ),
    "two lists": (
        {"object_file_path": "x", "more_files": "y"},
        (
            Column(name="one", kind="image", aliases=("object_file_path", "more_files")),
            Column(name="two", kind="image", aliases=("object_file_path", "more_files")),
        ),
        False,
        "'object_file_path' and 'more_files', which mean the same",
    ),
    "of another model": (
        {"control_file_path": "x"},
        COLUMNS[1:2],
        False,
        "'control_file_path', .* rename it to pictures, or",
    ),
    "of a control": (
        {"object_file_path": ["x"]},
        (),
        True,
        "'object_file_path', .* rename it to references, or remove it",
    ),
    "two kinds": (
        {"control_path": "x", "references": "y"},
        (),
        True,
        "several reference columns, references, control_path",
    ),
    "a number twice": (
        {"control_path": "x", "control_path_00": "y"},
        (),
        True,
        "control_path, control_path_00 twice",
    ),
    "both": (
        {"control_path": "x", "depth": "y"},
        COLUMNS,
        False,
        "'control_path' and 'depth', which mean the same",
    ),
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
    assert_one_line(
        lambda: look(folder, columns=COLUMNS),
        "'object_file_path' names 4 files, but this model takes 3",
    )
    first, second, third, fourth = files
    for own, listed, expected in (
        ({"more_pictures": second}, first, (first, second)),
        ({"more_pictures": second}, [first, third], (first, second, third)),
        ({"pictures": first}, [second, third], (first, second, third)),
        (
            {"pictures": first, "more_pictures": "", "last_pictures": None},
            [second],
            (first, second),
        ),
        (
            {"pictures": first, "more_pictures": second, "last_pictures": third},
            "",
            (first, second, third),
        ),
    ):
        jsonl(folder, clip(folder, object_file_path=listed, **own))
        assert dict(look(folder, columns=COLUMNS).samples[0].controls) == dict(
            zip(LISTED, expected, strict=False)
        )
    jsonl(folder, clip(folder, object_file_path=[first, third, fourth], more_pictures=second))
    said = (
        "'object_file_path' names 3 files, but this model takes 2 besides more_pictures; remove 1"
    )
    assert_one_line(lambda: look(folder, columns=COLUMNS), said)


def test_a_list_in_a_table_is_read_as_one(folder: Path) -> None:
    for name in ("x", "[y]"):
        picture(folder / f"{name}.png")
    table = folder / "metadata.csv"
    for written, expected in (
        ('"[""x.png"", ""[y].png""]"', ("x", "[y]")), ('" [ ""x.png"" ]"', ("x",)), ("[]", ()), ("", ()),
        ("[y].png", ("[y]",)), ("x.png", ("x",)),
    ):  # fmt: skip
        table.write_text(f"video,text,object_file_path,depth\nvideos/0.mp4,a cat,{written},\n")
        (sample,) = look(folder, columns=COLUMNS).samples
        assert [Path(path).stem for path in sample.controls.values()] == list(expected)
        assert list(sample.controls) == list(LISTED[: len(expected)])
    table.write_text("video,text,object_file_path\nvideos/0.mp4,a cat,['x.png']\n")
    assert_one_line(
        lambda: look(folder, columns=COLUMNS),
        "line 2: 'object_file_path' is not a JSON list; write one path",
    )


@pytest.mark.parametrize("name", ["control_path", "control_path_0", "control_path_000"])
def test_the_first_of_numbered_files_is_the_one_that_a_model_takes(folder: Path, name: str) -> None:
    jsonl(folder, clip(folder, **{name: "videos/1.mp4"}))
    assert dict(look(folder, columns=COLUMNS).samples[0].controls) == {
        "depth": str(folder / "videos" / "1.mp4")
    }


@pytest.mark.skipif(os.sep == "\\", reason="they are what this system writes")
def test_backslashes_of_windows_are_reported(folder: Path) -> None:
    lists(folder, "videos\\0.mp4\nC:\\data\\1.mp4", "a cat\na dog")
    assert_one_line(
        lambda: look(folder),
        "line 1: videos\\0.mp4 is written with backslashes",
        "write videos/0.mp4",
    )
    lists(folder, "videos/0.mp4\nC:\\data\\1.mp4", "a cat\na dog")
    assert_one_line(
        lambda: look(folder), "line 2: C:\\data\\1.mp4 is a Windows path; write the path"
    )
    for name in ("videos.txt", "prompts.txt"):
        (folder / name).unlink()
    jsonl(folder, clip(folder, control_path="videos\\1.mp4"))
    assert_one_line(lambda: look(folder, columns=COLUMNS), "depth", "write videos/1.mp4")
    jsonl(folder, {"image": "images/2.png", "text": "x", "control_path": "images\\2.png"})
    assert_one_line(
        lambda: look(folder, edits=True), "line 1: images\\2.png is written with backslashes"
    )
    picture(folder / "images\\2.png")
    assert len(look(folder, edits=True).samples) == 1, "a name that is there"


@pytest.mark.parametrize("settings", [{}, {"metadata": "metadata.parquet"}])
def test_tables_of_hugging_face_are_reported(folder: Path, settings: dict[str, str]) -> None:
    (folder / "metadata.parquet").write_bytes(b"PAR1")
    assert_one_line(
        lambda: look(folder, **settings),
        "metadata.parquet is a Parquet table",
        "convert it to metadata.jsonl",
    )
    jsonl(folder, clip(folder))
    assert settings or len(look(folder).samples) == 1


def test_a_folder_of_tables_alone_is_reported(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    assert_one_line(
        lambda: look(tmp_path),
        "has no media files, only data",
        "train-00000-of-00001.parquet",
        "to files",
    )


def test_a_caption_is_read_from_a_json_next_to_its_clip(folder: Path) -> None:
    """As ai-toolkit, img2dataset and downloaders write it, with other facts; a text next to it
    comes first."""
    facts = {"url": "x", "width": 640, "status": "success", "exif": {"text": "no"}}
    (folder / "videos" / "0.json").write_text(
        json.dumps({**facts, "caption": "a cat", "caption_short": "cat"})
    )
    (folder / "videos" / "1.mp4.json").write_text(
        json.dumps({**facts, "prompt": ["a dog", "a black dog"]})
    )
    (folder / "images" / "2.JSON").write_text(json.dumps({"text": "a bird"}))
    dataset = look(folder)
    birds, cats = ("images/2", ("a bird",)), ("videos/0", ("a cat",))
    assert summary(dataset) == [birds, cats, ("videos/1", ("a dog", "a black dog"))]
    (folder / "videos" / "1.txt").write_text("a fox")
    assert summary(look(folder)) == [birds, cats, ("videos/1", ("a fox",))]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            '{"tags": "a cat"}',
            "0.json has no caption column: found tags; accepted: text, prompt, caption",
        ),
        ('{"caption": "a", "text": "b"}', "0.json has 2 caption columns, caption, text"),
        ('{"caption": ""}', "0.json: 'caption' is empty or not a text"),
        ('{"caption": 3}', "0.json: 'caption' is empty or not a text"),
        ('["a cat"]', "0.json is not a JSON object"),
        ('{"caption": ', "0.json line 1 is not valid JSON"),
    ],
)
def test_a_json_without_a_caption_is_one_line(folder: Path, text: str, answer: str) -> None:
    for name in ("videos/1", "images/2"):
        (folder / f"{name}.txt").write_text("x")
    (folder / "videos" / "0.json").write_text(text)
    assert_one_line(lambda: look(folder), answer)


@pytest.mark.parametrize("name", ["set.zip", "set.tar.gz"])
def test_an_archive_is_to_be_unpacked(tmp_path: Path, name: str) -> None:
    """In a folder without media, or as the folder."""
    (tmp_path / "a.txt").write_text("a cat")
    archive = tmp_path / "data" / name
    archive.parent.mkdir()
    if name.endswith("zip"):
        with zipfile.ZipFile(archive, "w") as file:
            file.write(tmp_path / "a.txt", "a.txt")
    else:
        with tarfile.open(archive, "w:gz") as file:
            file.add(tmp_path / "a.txt", "a.txt")
    assert_one_line(
        lambda: look(archive.parent),
        f"has no media files, only the archive {name}; unpack it, or name",
    )
    assert_one_line(
        lambda: look(archive),
        f"{name} is an archive; unpack it, and name the folder with its files",
    )
