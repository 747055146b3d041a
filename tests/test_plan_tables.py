"""The tables of README.md are what tools/plan_tables.py would write."""

import pytest
import torch

from ditkit_core.errors import UserError
from marked import between, replaced
from plan_tables import EXAMPLE, README, ROWS, TABLE, line, notes

CHEAP = next(row for row in ROWS if row.file == "klein_base_4b_lora")
made_with_another_torch = pytest.mark.skipif(
    f"torch {torch.__version__.partition('+')[0]}." not in README.read_text(encoding="utf-8"),
    reason="README.md was written with another torch, whose operations may hold other amounts",
)


@pytest.fixture(scope="module")
def written():
    return README.read_text(encoding="utf-8")


@made_with_another_torch
def test_a_row_of_the_readme_is_what_the_planner_says_today(written):
    assert line(CHEAP) in between(written, TABLE, README.name).splitlines()


def test_the_readme_has_all_rows_and_todays_assumptions(written):
    lines = between(written, TABLE, README.name).splitlines()
    assert [each.split(" | ")[0].removeprefix("| ") for each in lines if each.startswith("| ")][1:] == [
        row.name for row in ROWS
    ]
    rates = notes().partition("Planned, not measured")[0]
    assert any(each.startswith(rates) for each in lines)


def test_rows_name_presets_and_sizes_that_the_run_files_have_not_fixed():
    assert {row.spec.name for row in ROWS} == {"wan", "flux2"}
    for row in ROWS:
        assert (row.config.data.height, row.config.data.width) == row.size[1:] and row.config.model.preset in row.name


def test_only_what_is_between_the_markers_is_replaced():
    begin, end = TABLE
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert replaced(text, TABLE, "new", "page") == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(UserError, match="has it 0 times"):
        replaced(text, EXAMPLE, "new", "page")
    with pytest.raises(UserError, match="has it 2 times"):
        replaced(text + begin, TABLE, "new", "page")
