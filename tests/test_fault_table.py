"""tools/faults/planted_faults.py: its table, and what it writes of a run."""

from collections import Counter
from pathlib import Path

import pytest

from planted_faults import Fault, faults, page
from workspace import ROOT

FILE = Path("sums.py")


def fault(old: str, new: str) -> Fault:
    return Fault("engine", "a sum lacks the last", FILE, old, new, [Path("test_sums.py")], None)


def tree(folder: Path) -> Path:
    (folder / FILE).write_text("def total(values):\n    return sum(values)\n", encoding="utf-8")
    return folder


def test_a_fault_changes_one_place_of_its_file(tmp_path: Path) -> None:
    planted = fault("sum(values)", "sum(values[:-1])").planted(tree(tmp_path))
    assert planted == "def total(values):\n    return sum(values[:-1])\n"


def test_every_fault_of_the_table_changes_the_code_of_today_and_names_tests_that_are_there() -> (
    None
):
    checks = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "shared/src/ditkit_core/testing").glob("conformance*.py")
    )
    for one in faults():
        assert one.planted(ROOT) != (ROOT / one.file).read_text(encoding="utf-8")
        for path in one.tests:
            file, *names = str(path).split("::")
            text = (ROOT / file).read_text(encoding="utf-8") if names else ""
            assert (ROOT / file).exists() and all(f" {name}(" in text + checks for name in names)


@pytest.mark.parametrize("old", ["gone", "values"])
def test_a_text_that_does_not_stand_once_is_refused(old: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"sums.py has '{old}' [02] times"):
        fault(old, "").planted(tree(tmp_path))


def test_the_page_says_what_found_a_fault_and_which_tests_are_new() -> None:
    rows = [
        one.row(f"shared/tests/a.py::test_{number}" * bool(number), "", 2.4)
        | {"commit": "abc", "date": "2026-11-28"}
        for number, one in enumerate(faults())
    ]
    lines = [line for line in page(rows).splitlines() if line.startswith("| ")][1:]
    assert len(lines) == 60 and lines[0].endswith("| nothing | 2 |")
    assert lines[1].endswith("| `a.py::test_1` | 2 |")
    marked = [" * |" in line for line in lines]
    assert marked == [one.since is not None for one in faults()]


@pytest.mark.slow
def test_every_fault_of_the_table_can_be_planted() -> None:
    every = list(faults())
    assert set(Counter(one.area for one in every).values()) == {10}
    assert len({one.name for one in every}) == 60
    for one in every:
        assert one.planted(ROOT)
        files = [ROOT / str(test).partition("::")[0] for test in one.tests]
        assert all(file.exists() for file in files), one.name
