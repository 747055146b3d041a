"""Captions are written whole or not at all, and an undo gives back what was there."""

from pathlib import Path

import pytest

from ditkit_core.errors import UserError
from ditkit_ui.captions import CaptionEdits
from ditkit_ui.folders import OpenedFolders


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir())}


def test_edits_are_undone_one_after_the_other_also_of_files_that_were_not_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("a cät", encoding="utf-8")
    (tmp_path / "b.txt").write_text("a dog\n", encoding="utf-8")
    a, b, new = (str(tmp_path / f"{name}.txt") for name in "abn")
    edits = CaptionEdits(OpenedFolders([tmp_path]))
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
    edits = CaptionEdits(OpenedFolders([tmp_path]))
    b.write_text("by another program")
    with pytest.raises(UserError, match=r"b\.txt was changed by another program"):
        edits.write({str(a): ("one", "1"), str(b): ("two", "2")})
    assert contents(tmp_path) == {"a.txt": "one", "b.txt": "by another program"}
    assert edits.write({str(a): ("one", "1")}) == 1
    a.write_text("later")
    with pytest.raises(UserError, match=r"a\.txt was changed by another program"):
        edits.undo()
    assert a.read_text() == "later"
