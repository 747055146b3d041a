"""Captions are written whole or not at all, and an undo gives back what was there."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from ditkit_core.data.caption_files import CaptionFiles
from ditkit_core.data.config import DataConfig
from ditkit_core.data.list_text import RowEdit
from ditkit_core.errors import UserError
from ditkit_core.io.files import write_text
from ditkit_ui.captions import CaptionEdits
from ditkit_ui.folders import OpenedFolders


class Edits(CaptionEdits):
    """With the edits that can be undone, as the page keeps them."""

    def __init__(self, folder: Path):
        self.undos = list[Callable[[], bool]]()
        super().__init__(OpenedFolders([folder]), self.undos)

    def undo(self) -> bool:
        """Undo the last edit; False if there is none."""
        return bool(self.undos) and self.undos.pop()()


def contents(folder: Path) -> dict[str, str]:
    """What is in the files of a folder, without the locks next to lists, which are empty."""
    files = {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir())}
    locks = {name for name in files if name.startswith(".") and name.endswith(".lock")}
    assert not any(files[name] for name in locks)
    return {name: text for name, text in files.items() if name not in locks}


def test_edits_are_undone_one_after_the_other_also_of_files_that_were_not_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("a cät", encoding="utf-8")
    (tmp_path / "b.txt").write_text("a dog\n", encoding="utf-8")
    a, b, new = (str(tmp_path / f"{name}.txt") for name in "abn")
    edits = Edits(tmp_path)
    before = contents(tmp_path)
    assert edits.write({a: ("a cät", "a cat"), b: ("a dog\n", "a dog\n")}) == 1
    between = contents(tmp_path)
    assert edits.write({a: ("a cat", "ohwx"), new: (None, "a <b>bird</b>")}) == 2
    assert contents(tmp_path) == {"a.txt": "ohwx", "b.txt": "a dog\n", "n.txt": "a <b>bird</b>"}
    assert edits.undo() and contents(tmp_path) == between
    assert edits.undo() and contents(tmp_path) == before
    assert not edits.undo()
    assert edits.write({a: ("a cät", "a cät"), new: (None, "")}) == 0
    assert contents(tmp_path) == before, "no file for an empty caption that nobody wrote"


def test_what_another_program_wrote_meanwhile_is_not_overwritten_and_no_half_is_written(
    tmp_path: Path,
) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("one")
    b.write_text("two")
    edits = Edits(tmp_path)
    b.write_text("by another program")
    with pytest.raises(UserError, match=r"b\.txt was changed by another program"):
        edits.write({str(a): ("one", "1"), str(b): ("two", "2")})
    assert contents(tmp_path) == {"a.txt": "one", "b.txt": "by another program"}
    assert edits.write({str(a): ("one", "1")}) == 1
    a.write_text("later")
    with pytest.raises(UserError, match=r"a\.txt was changed by another program"):
        edits.undo()
    assert a.read_text() == "later"
    assert not edits.undo(), "an edit that cannot be undone hides no earlier one"


def test_what_a_command_writes_is_undone_and_no_edit_of_a_person_is_taken_for_it(
    tmp_path: Path,
) -> None:
    a, b, new, other = (tmp_path / f"{name}.txt" for name in "abno")
    listed = tmp_path / "metadata.jsonl"
    for file in (a, b, other):
        file.write_text(f"a person's {file.name}")
    listed.write_text(LISTS["metadata.jsonl"])
    before = contents(tmp_path)
    edits = Edits(tmp_path)
    edits.watch(map(str, (a, b, new, listed)))
    a.write_text("by a model")
    listed.write_text(LISTS["metadata.jsonl"].replace("one", "by a model"))
    between = contents(tmp_path)
    assert edits.write({str(b): ("a person's b.txt", "better")}) == 1
    new.write_text("by a model, too")
    edits.watch(())  # the command has ended
    other.write_text("not watched")
    a.write_text("later, by another program")
    edits.note_changes()
    assert len(edits.undos) == 3
    assert edits.undo() and not new.exists() and b.read_text() == "better"
    assert edits.undo() and b.read_text() == "a person's b.txt"
    with pytest.raises(UserError, match=r"a\.txt was changed by another program"):
        edits.undo()
    assert a.read_text() == "later, by another program", "and the list stays with it"
    assert listed.read_text() == between["metadata.jsonl"]
    for file in (a, listed):
        file.write_text(before[file.name])
    edits.watch([str(a), str(listed)])
    a.write_text(between[a.name])
    listed.write_text(between[listed.name])
    edits.note_changes()
    assert edits.undo() and not edits.undo()
    edits.note_changes()
    assert not edits.undos, "an undo is no change of the command"
    assert contents(tmp_path) == before | {"o.txt": "not watched"}


def test_what_cannot_be_written_puts_back_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, new, full = (tmp_path / name for name in ("a.txt", "new.txt", "full.txt"))
    a.write_text("one")
    full.write_text("two")
    edits = Edits(tmp_path)
    before = contents(tmp_path)

    def write(path: Path, text: str) -> None:
        if path == full:
            raise UserError("the disk is full")
        path.write_text(text)

    monkeypatch.setattr("ditkit_ui.captions.write_text", write)
    with pytest.raises(UserError, match="the disk is full"):
        edits.write({str(a): ("one", "1"), str(new): (None, "3"), str(full): ("two", "2")})
    assert contents(tmp_path) == before and not edits.undo()


def test_edits_at_the_same_moment_are_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of a list, whose text is read, changed and written as a whole."""
    file = tmp_path / "metadata.jsonl"
    file.write_text(
        '{"file_name": "a.png", "text": "one"}\n{"file_name": "b.png", "text": "two"}\n'
    )
    edits = Edits(tmp_path)
    both = threading.Barrier(2)

    def written(path: Path, text: str) -> None:
        with suppress(threading.BrokenBarrierError):  # the other one waits, as it should
            both.wait(0.2)
        write_text(path, text)

    monkeypatch.setattr("ditkit_ui.captions.write_text", written)
    changes = [RowEdit(0, "a.png", "one", "1"), RowEdit(1, "b.png", "two", "2")]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda change: edits.write({}, {str(file): [change]}), changes))
    assert [json.loads(line)["text"] for line in file.read_text().splitlines()] == ["1", "2"]


@pytest.mark.parametrize("first", ["page", "undo", "command"])
def test_a_list_is_written_by_the_page_or_by_the_command_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Neither loses what the other writes into other rows between its reading and its writing.
    Threads stand in for processes: each has a lock of its own."""
    path = tmp_path / "metadata.jsonl"
    names = ("a.png", "b.png")
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    path.write_text("".join(json.dumps({"file_name": name}) + "\n" for name in names))
    edits = Edits(tmp_path)
    if first == "undo":
        edits.write({}, {str(path): [RowEdit(0, "a.png", "", "removed again")]})
    files = CaptionFiles(tmp_path, DataConfig(folder=str(tmp_path)), (), edits=False)
    item = next(item for item in files.items if item.name == "b.png")

    def page() -> None:
        if first == "undo":
            assert edits.undo()
        else:
            edits.write({}, {str(path): [RowEdit(0, "a.png", "", "a person's")]})

    def command() -> None:
        assert files.write([(item, "a model's")], "settings") == []

    begun, done = threading.Event(), threading.Event()

    def slowly(path: Path, text: str) -> None:
        begun.set()
        done.wait(0.3)  # the other waits, as it should: it is done later
        write_text(path, text)

    def other() -> None:
        begun.wait(10)
        (page if first == "command" else command)()
        done.set()

    of_command = "ditkit_core.data.caption_files.write_text"
    slow = of_command if first == "command" else "ditkit_ui.captions.write_text"
    monkeypatch.setattr(slow, slowly)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(other)
        (command if first == "command" else page)()
        second.result()
    captions = [json.loads(line).get("text", "") for line in path.read_text().splitlines()]
    assert captions == ["" if first == "undo" else "a person's", "a model's"]


def test_columns_of_the_same_name_are_refused_before_one_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "metadata.csv"
    file.write_text("image,note,prompt,note\na.png,1,one,2\n")
    edits = Edits(tmp_path)
    with pytest.raises(UserError, match="several columns of the same name"):
        edits.write({}, {str(file): [RowEdit(0, "a.png", "one", "two")]})


LISTS = {
    "metadata.jsonl": '{"file_name": "a.png", "text": "one", "n": 1.50}\n\n{"file_name": "b.png"}\n',
    "metadata.csv": 'image,n,prompt\na.png,"1, 2",one\nb.png,3,\n',
    "metadata.json": '[{"path": "a.png", "caption": "one"}, {"path": "b.png", "n": "\\u00e9"}]',
}


@pytest.mark.parametrize("name", list(LISTS))
def test_rows_of_a_list_are_edited_in_place_and_undone_to_the_byte(
    tmp_path: Path, name: str
) -> None:
    path, before = tmp_path / name, LISTS[name]
    path.write_text(before)
    text = tmp_path / "c.txt"
    text.write_text("beside")
    edits = Edits(tmp_path)
    rows = [RowEdit(0, "a.png", "one", 'a "<b>"\ncät, in two'), RowEdit(1, "b.png", "", "")]
    assert edits.write({str(text): ("beside", "1")}, {str(path): rows}) == 2
    after = path.read_text("utf-8")
    assert json.dumps("cät, in two")[1:-1] in after or "cät, in two" in after
    assert text.read_text() == "1"
    now = RowEdit(0, "a.png", 'a "<b>"\ncät, in two', "three")
    assert edits.write({}, {str(path): [now, RowEdit(1, "b.png", "", "a dog")]}) == 2
    assert edits.undo() and path.read_text("utf-8") == after
    assert edits.undo() and path.read_text("utf-8") == before and text.read_text() == "beside"


@pytest.mark.parametrize("name", list(LISTS))
@pytest.mark.parametrize(
    "stale",
    [
        RowEdit(1, "b.png", "another", "x"),
        RowEdit(0, "b.png", "", "x"),
        RowEdit(2, "b.png", "", "x"),
    ],
)
def test_of_edits_of_which_one_is_stale_none_is_written(
    tmp_path: Path, name: str, stale: RowEdit
) -> None:
    path, text = tmp_path / name, tmp_path / "c.txt"
    path.write_text(LISTS[name])
    text.write_text("beside")
    before, edits = contents(tmp_path), Edits(tmp_path)
    fine = RowEdit(0, "a.png", "one", "two")
    with pytest.raises(UserError, match="has another caption of b.png by now"):
        edits.write({str(text): ("beside", "1")}, {str(path): [fine, stale]})
    assert contents(tmp_path) == before and not edits.undo()


def test_several_captions_of_a_row_stay_several(tmp_path: Path) -> None:
    path = tmp_path / "metadata.jsonl"
    path.write_text('{"file_name": "a.png", "text": ["one", " two "]}\n')
    edits = Edits(tmp_path)
    edit = RowEdit(0, "a.png", "one\ntwo", "one\n\n 2 \nthree")
    assert edits.write({}, {str(path): [edit]}) == 1
    assert json.loads(path.read_text())["text"] == ["one", "2", "three"]
    path.write_text(json.dumps({"file_name": "a.png", "text": ["one\nand more", "two"]}))
    before = path.read_text()
    with pytest.raises(UserError, match="several captions of several lines for a.png; edit the"):
        edits.write({}, {str(path): [RowEdit(0, "a.png", "one\nand more\ntwo", "x")]})
    assert path.read_text() == before
