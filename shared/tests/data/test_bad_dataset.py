"""A folder of things that go wrong with clips, captions and metadata: each is one line that names
the file and a remedy."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from data_specs import CLIPS
from media_files import numbered_video, picture
from one_line import assert_one_line

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan


def damage(path: Path) -> None:
    path.write_text("these are no pixels\n" * 50)


def look(folder: Path, **settings: object) -> Dataset:
    config = {"folder": str(folder), "frames": 9, "height": 32, "width": 32, **settings}
    return scan(DataConfig(**config), CLIPS)  # type: ignore[arg-type]


def add(folder: Path, name: str, caption: str | bytes | None = "a clip", frames: int = 24) -> Path:
    path = folder / name
    (picture if path.suffix == ".png" else numbered_video)(
        path, **({} if path.suffix == ".png" else {"frames": frames})
    )
    if caption is not None:
        path.with_suffix(".txt").write_bytes(
            caption if isinstance(caption, bytes) else caption.encode()
        )
    return path


def caption_missing(folder: Path) -> str:
    return add(folder, "bad.mp4", None).name


def caption_empty(folder: Path) -> str:
    return add(folder, "bad.mp4", " \n").with_suffix(".txt").name


def caption_latin_1(folder: Path) -> str:
    return add(folder, "bad.mp4", "café".encode("latin-1")).with_suffix(".txt").name


def duplicate_names(folder: Path) -> str:
    add(folder, "bad.png")
    return add(folder, "bad.mp4").name


def too_short(folder: Path) -> str:
    return add(folder, "bad.mp4", frames=10).name


def damaged(folder: Path) -> str:
    path = add(folder, "bad.mp4")
    damage(path)
    return path.name


def json_lines(folder: Path, *lines: object) -> str:
    good = {"file_name": "good.mp4", "text": "good"}
    written = [line if isinstance(line, str) else json.dumps(line) for line in (good, *lines)]
    (folder / "metadata.jsonl").write_text("\n".join(written))
    return "metadata.jsonl line 2"


def json_broken(folder: Path) -> str:
    return json_lines(folder, '{"file_name": ')


def json_no_object(folder: Path) -> str:
    return json_lines(folder, ["bad.mp4", "caption"])


def json_without_caption(folder: Path) -> str:
    return json_lines(folder, {"file_name": "bad.mp4", "label": 3})


def json_number_as_caption(folder: Path) -> str:
    return json_lines(folder, {"file_name": "bad.mp4", "text": 3})


def json_missing_file(folder: Path) -> str:
    json_lines(folder, {"file_name": "gone.mp4", "text": "x"})
    return "gone.mp4"


def json_path_escape(folder: Path) -> str:
    add(folder.parent, "outside.mp4")
    json_lines(folder, {"file_name": "../outside.mp4", "text": "x"})
    return "../outside.mp4"


def json_null_byte(folder: Path) -> str:
    return json_lines(folder, {"file_name": "a\0.mp4", "text": "x"})


def json_half_a_character(folder: Path) -> str:
    return json_lines(folder, {"file_name": "\ud800.mp4", "text": "x"})


def json_long_name(folder: Path) -> str:
    return json_lines(folder, {"file_name": "a" * 500 + ".mp4", "text": "x"})


def json_folder_itself(folder: Path) -> str:
    return json_lines(folder, {"file_name": ".", "text": "x"})


def json_nested(folder: Path) -> str:
    return json_lines(folder, "[" * 100_000)


def json_long_number(folder: Path) -> str:
    return json_lines(folder, '{"file_name": "good.mp4", "text": "x", "id": ' + "1" * 5000 + "}")


def json_two_captions(folder: Path) -> str:
    where = json_lines(folder, {"file_name": "bad.mp4", "text": "x", "caption": "y"})
    return f"{where} has 2 caption columns, text, caption"


def json_key_twice(folder: Path) -> str:
    where = json_lines(folder, '{"file_name": "bad.mp4", "text": "x", "text": "y"}')
    return f"{where} has 'text' twice"


def json_half_a_character_in_the_caption(folder: Path) -> str:
    return json_lines(folder, {"file_name": "bad.mp4", "text": "a dog \ud83d"})


def json_half_a_character_in_one_of_several_captions(folder: Path) -> str:
    return json_lines(folder, {"file_name": "bad.mp4", "text": ["a dog", "\udc36"]})


def json_empty_list_of_captions(folder: Path) -> str:
    return json_lines(folder, {"file_name": "bad.mp4", "text": []})


def json_number_among_captions(folder: Path) -> str:
    return json_lines(folder, {"file_name": "bad.mp4", "text": ["one", 2]})


def json_two_reference_columns(folder: Path) -> str:
    return json_lines(
        folder, {"file_name": "bad.mp4", "text": "x", "control": "a.png", "references": "b.png"}
    )


def folder_called_video(folder: Path) -> str:
    add(folder / "bad.mp4", "inner.mp4")
    return "bad.mp4 is a folder"


def csv_with_comma_in_caption(folder: Path) -> str:
    (folder / "metadata.csv").write_text("video,prompt\ngood.mp4,good\ngood.mp4,a dog, running\n")
    return "metadata.csv line 3"


def symlink_escape(folder: Path) -> str:
    add(folder.parent, "outside.mp4")
    link(folder / "bad.mp4", folder.parent / "outside.mp4")
    (folder / "bad.txt").write_text("x")
    return "bad.mp4"


def caption_symlink_escape(folder: Path) -> str:
    add(folder, "bad.mp4", None)
    (folder.parent / "secret.txt").write_text("x")
    link(folder / "bad.txt", folder.parent / "secret.txt")
    return "bad.txt"


def link(path: Path, target: Path) -> None:
    try:
        path.symlink_to(target)
    except OSError:
        pytest.skip("this system does not let us make symbolic links")


SKIPPABLE = [
    caption_missing,
    caption_empty,
    caption_latin_1,
    duplicate_names,
    damaged,
    json_broken,
    json_no_object,
    json_without_caption,
    json_number_as_caption,
    json_missing_file,
    json_path_escape,
    json_null_byte,
    json_half_a_character,
    json_long_name,
    json_folder_itself,
    json_nested,
    json_long_number,
    json_two_captions,
    json_key_twice,
    json_half_a_character_in_the_caption,
    json_half_a_character_in_one_of_several_captions,
    json_empty_list_of_captions,
    json_number_among_captions,
    json_two_reference_columns,
    folder_called_video,
    csv_with_comma_in_caption,
    symlink_escape,
    caption_symlink_escape,
]


@pytest.mark.parametrize("spoil", SKIPPABLE)
def test_a_bad_entry_stops_the_scan_or_is_left_out(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    folder = tmp_path / "set"
    add(folder, "good.mp4")
    name = spoil(folder)
    message = assert_one_line(lambda: look(folder), name, 'data.on_bad = "skip" skips it')
    dataset = look(folder, on_bad="skip")
    assert [sample.id for sample in dataset.samples] == ["good"]
    ((_, reason),) = dataset.excluded
    assert reason in message


def test_a_dataset_folder_called_like_a_video_cannot_be_its_own_clip(tmp_path: Path) -> None:
    folder = tmp_path / "set.mp4"
    add(folder, "good.mp4")
    json_lines(folder, {"file_name": str(folder), "text": "x"})
    assert_one_line(lambda: look(folder), "set.mp4 is a folder")


def test_a_caption_column_given_twice_is_refused(tmp_path: Path) -> None:
    add(tmp_path, "good.mp4")
    (tmp_path / "metadata.csv").write_text("video,caption,caption\ngood.mp4,one,two\n")
    assert_one_line(
        lambda: look(tmp_path, on_bad="skip"),
        "metadata.csv line 1 has 2 caption columns, caption, caption",
    )


@pytest.mark.parametrize("settings", [{}, {"metadata": "metadata.csv"}])
def test_metadata_that_is_a_folder_is_said(tmp_path: Path, settings: dict[str, str]) -> None:
    add(tmp_path, "good.mp4")
    (tmp_path / "metadata.csv").mkdir()
    assert_one_line(
        lambda: look(tmp_path, on_bad="skip", **settings), "metadata.csv is not a regular file"
    )


@pytest.mark.parametrize(
    ("call", "denied"),
    [
        ("stat", ""),
        ("stat", "metadata.jsonl"),
        ("scandir", ""),
        ("scandir", "sub"),
        ("stat", "good.mp4"),
    ],
)
def test_what_may_not_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, denied: str
) -> None:
    add(tmp_path, "good.mp4")
    add(tmp_path / "sub", "good.mp4")
    real = getattr(os, call)

    def refusing(path: object, *args: object, **kwargs: object) -> object:
        if Path(str(path)) == tmp_path / denied:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, refusing)
    assert_one_line(lambda: look(tmp_path), str(tmp_path / denied), "Permission denied")


def test_metadata_that_may_not_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, "good.mp4")
    json_lines(tmp_path)

    def refusing(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refusing)
    assert_one_line(lambda: look(tmp_path), "metadata.jsonl", "Permission denied")


def test_a_short_clip_says_what_it_has_and_what_to_set(tmp_path: Path) -> None:
    add(tmp_path, "good.mp4")
    too_short(tmp_path)
    message = assert_one_line(lambda: look(tmp_path, on_bad="skip"), "bad.mp4")
    assert "has 7 frames at 16 fps, but data.frames asks for 9; set data.frames = 5" in message
    assert [sample.id for sample in look(tmp_path, short_clips="skip").samples] == ["good"]
    assert [sample.frames for sample in look(tmp_path, short_clips="shorten").samples] == [5, 9]


def test_several_problems_are_counted(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        add(tmp_path, f"{name}.mp4", None)
    message = assert_one_line(lambda: look(tmp_path), "a.mp4")
    assert message.endswith('(and 2 more; data.on_bad = "skip" skips them)')


def test_duplicate_names_are_both_named(tmp_path: Path) -> None:
    duplicate_names(tmp_path)
    assert_one_line(lambda: look(tmp_path), "bad.mp4 and bad.png", "'bad'")


def csv_without_header(folder: Path) -> None:
    (folder / "metadata.csv").write_text("good.mp4,a good clip\n")


def csv_not_utf8(folder: Path) -> None:
    (folder / "metadata.csv").write_bytes("video,prompt\ngood.mp4,café\n".encode("latin-1"))


def csv_broken(folder: Path) -> None:
    (folder / "metadata.csv").write_text('video,prompt\ngood.mp4,"a "good" clip\n')


def csv_empty(folder: Path) -> None:
    (folder / "metadata.csv").write_text("")


@pytest.mark.parametrize("spoil", [csv_without_header, csv_not_utf8, csv_broken, csv_empty])
def test_metadata_that_cannot_be_used_is_an_error_even_when_skipping(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    add(tmp_path, "good.mp4")
    spoil(tmp_path)
    assert_one_line(lambda: look(tmp_path, on_bad="skip"), "metadata.csv")


def test_columns_found_and_accepted_are_listed(tmp_path: Path) -> None:
    add(tmp_path, "good.mp4")
    csv_without_header(tmp_path)
    message = assert_one_line(lambda: look(tmp_path), "metadata.csv")
    assert (
        "found good.mp4, a good clip; accepted: file_name, video, image, file_path, path" in message
    )


def test_a_folder_with_nothing_usable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no clips here")
    assert_one_line(lambda: look(tmp_path), str(tmp_path), "no media file; accepted: .3gp .avi")
    caption_missing(tmp_path)
    assert_one_line(
        lambda: look(tmp_path, on_bad="skip"), "no usable sample", "bad.mp4 has no caption"
    )


def test_a_file_without_permission_is_one_line(tmp_path: Path) -> None:
    path = add(tmp_path, "bad.mp4").with_suffix(".txt")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert_one_line(lambda: look(tmp_path), str(path))
