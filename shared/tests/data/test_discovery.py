"""What a dataset folder may contain besides samples: formats that are not read, lists that are no
files, and a machine that lacks something."""

import errno
import json
import os
from pathlib import Path

import av
import pytest
from data_specs import CLIPS
from media_files import numbered_video, picture
from one_line import assert_one_line
from PIL import Image

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.data.media import clip, files
from ditkit_core.data.media.image import HEIC_SUFFIXES
from ditkit_core.errors import EnvironmentFault


def look(folder: Path, **settings: object) -> Dataset:
    config = {"folder": str(folder), "frames": 9, "height": 32, "width": 32, **settings}
    return scan(DataConfig(**config), CLIPS)  # type: ignore[arg-type]


def add(folder: Path, name: str, caption: str | None = "a clip") -> Path:
    path = folder / name
    (picture if path.suffix == ".png" else numbered_video)(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)
    return path


def test_formats_that_are_not_read_are_named_once_each(tmp_path: Path) -> None:
    add(tmp_path, "good.mp4")
    for name in (
        "a.jxl",
        "b.jxl",
        "sub/c.jxl",
        "without_caption.psd",
        "d.docx",
        "notes.docx",
        ".hidden.jxl",
        "good.npz",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"whatever")
    for name in ("a.txt", "sub/c.caption", "d.txt"):
        (tmp_path / name).write_text("a caption")
    found = look(tmp_path)
    assert [sample.id for sample in found.samples] == ["good"]
    assert found.excluded == [
        ("d.docx", ".docx is not read; convert to png, jpg or mp4"),
        ("a.jxl and 2 more", ".jxl is not read; convert to png, jpg or mp4"),
        ("without_caption.psd", ".psd is not read; convert to png, jpg or mp4"),
    ]
    assert found.kinds == ["unused"] * 3


def test_captioned_files_that_the_list_lacks_are_named(tmp_path: Path) -> None:
    """A file was added later, next to a list that is read in place of its caption. Files without a
    caption may be references."""
    for name in ("a.png", "b.png", "sub/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        add(tmp_path, name)
    add(tmp_path, "reference.png", None)
    lines = [
        {"image": "a.png", "prompt": "listed"},
        {"image": str(tmp_path / "sub" / ".." / "b.png"), "prompt": "by its path"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = look(tmp_path, frames=1)
    assert [sample.captions for sample in found.samples] == [("listed",), ("by its path",)]
    ((name, reason),) = found.excluded
    assert name == "sub/c.png" and reason.startswith(
        "metadata.jsonl lists the samples, and this is not in it; add a line for it"
    )
    assert found.kinds == ["unused"]
    add(tmp_path, "later.png")
    ((name, reason),) = look(tmp_path, frames=1).excluded
    assert (
        name == "later.png and 1 more" and "add lines for them, or remove metadata.jsonl" in reason
    )


def test_heic_is_named_where_its_extra_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = clip.IMAGE_SUFFIXES - HEIC_SUFFIXES
    monkeypatch.setattr(clip, "IMAGE_SUFFIXES", without)
    add(tmp_path, "good.png")
    for name in ("iphone.heic", "iphone.txt"):
        (tmp_path / name).write_text("x")
    ((name, reason),) = look(tmp_path, frames=1).excluded
    assert name == "iphone.heic" and reason.endswith(
        "or install the extra heic of ditkit-core (pillow-heif)"
    )


@pytest.mark.parametrize("on_bad", ["error", "skip"])
def test_a_shortage_stops_the_scan_even_where_bad_files_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_bad: str
) -> None:
    add(tmp_path, "good.mp4")

    def short(*args: object, **settings: object) -> None:
        av.error.err_check(-errno.EAGAIN, "good.mp4")

    monkeypatch.setattr(av, "open", short)
    with pytest.raises(EnvironmentFault, match="memory, threads or open files are short"):
        look(tmp_path, on_bad=on_bad)


def test_a_thin_image_is_a_bad_entry(tmp_path: Path) -> None:
    add(tmp_path, "good.png")
    Image.new("RGB", (1, 1500)).save(tmp_path / "line.png")
    (tmp_path / "line.txt").write_text("a line")
    ((name, reason),) = look(tmp_path, frames=1, on_bad="skip").excluded
    assert name == "line.png" and "1 x 1500 pixels" in reason


LISTS = {
    "metadata.jsonl": '{"video": "good.mp4", "text": "good"}',
    "videos.txt": "good.mp4",
    "prompts.txt": "good",
}


def lists(folder: Path, name: str) -> Path:
    """A folder with lists, and the path of one of them, which is to be replaced."""
    add(folder, "good.mp4", None)
    for each in ("metadata.jsonl",) if name == "metadata.jsonl" else ("videos.txt", "prompts.txt"):
        (folder / each).write_text(LISTS[each])
    (folder / name).unlink()
    return folder / name


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_is_a_named_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(lists(tmp_path, name))
    assert_one_line(lambda: look(tmp_path), f"{name} is not a regular file")


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_is_a_device_is_not_read(tmp_path: Path, name: str) -> None:
    lists(tmp_path, name).symlink_to("/dev/zero")
    assert_one_line(lambda: look(tmp_path, allow_outside=True), f"{name} is not a regular file")


@pytest.mark.parametrize("name", LISTS)
def test_a_list_outside_the_folder_is_read_only_where_that_is_allowed(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "elsewhere").write_text(LISTS[name])
    (tmp_path / "set").mkdir()
    lists(tmp_path / "set", name).symlink_to(tmp_path / "elsewhere")
    assert_one_line(lambda: look(tmp_path / "set"), "leaves the dataset folder", name)
    assert len(look(tmp_path / "set", allow_outside=True).samples) == 1


def test_metadata_that_the_configuration_names_may_be_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    add(tmp_path / "set", "good.mp4", None)
    (tmp_path / "list.jsonl").write_text(LISTS["metadata.jsonl"])
    assert len(look(tmp_path / "set", metadata=str(tmp_path / "list.jsonl")).samples) == 1


def test_metadata_named_from_the_working_directory_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    for name in ("set/list.jsonl", "list.jsonl"):
        (tmp_path / name).write_text(LISTS["metadata.jsonl"])
    assert_one_line(
        lambda: look(Path("set"), metadata="set/list.jsonl"),
        'data.folder: set data.metadata = "list.jsonl"',
    )
    assert_one_line(
        lambda: look(Path("set"), metadata="list2.jsonl"),
        "did you mean set/list.jsonl? Or leave data.metadata empty",
    )
    assert_one_line(
        lambda: look(Path("set"), metadata="x.csv"), "correct the path or leave data.metadata empty"
    )
    (tmp_path / "set" / "list.jsonl").unlink()
    outside = (tmp_path / "list.jsonl").as_posix()
    assert_one_line(
        lambda: look(Path("set"), metadata="list.jsonl"), f'set data.metadata = "{outside}"'
    )


@pytest.mark.parametrize(
    ("name", "limit"), [("videos.txt", "MOST_LIST_BYTES"), ("good.txt", "MOST_TEXT_BYTES")]
)
def test_a_text_of_any_size_is_not_read(tmp_path: Path, name: str, limit: str) -> None:
    if name == "videos.txt":
        lists(tmp_path, name).write_bytes(b"")
    else:
        add(tmp_path, "good.mp4")
    most = getattr(files, limit)
    os.truncate(tmp_path / name, most + 1)  # sparse: it takes no room
    assert_one_line(lambda: look(tmp_path), f"{name} has {most + 1} bytes")
