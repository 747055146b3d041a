"""The table of docs/memory.md is what tools/docs/plan_tables.py would write, and README.md shows a
part of the plan there."""

import pytest
import torch

from ditkit_core.errors import UserError
from marked import between, replaced
from plan_tables import EXAMPLE, EXCERPT, MEMORY, README, ROWS, TABLE, example, excerpt, line, notes

CHEAP = next(row for row in ROWS if row.file == "klein_base_4b_lora")
made_with_another_torch = pytest.mark.skipif(
    f"torch {torch.__version__.partition('+')[0]}." not in MEMORY.read_text(encoding="utf-8"),
    reason="docs/memory.md was written with another torch, whose operations may hold other amounts",
)


@pytest.fixture(scope="module")
def written():
    return MEMORY.read_text(encoding="utf-8")


@pytest.mark.slow
@made_with_another_torch
def test_a_row_of_the_page_is_what_the_planner_says_today(written):
    assert line(CHEAP) in between(written, TABLE, MEMORY.name).splitlines()


def test_the_page_has_all_rows_and_todays_assumptions(written):
    lines = between(written, TABLE, MEMORY.name).splitlines()
    assert [each.split(" | ")[0].removeprefix("| ") for each in lines if each.startswith("| ")][
        1:
    ] == [row.name for row in ROWS]
    rates = notes().partition("Planned, not measured")[0]
    assert any(each.startswith(rates) for each in lines)


def test_the_readme_shows_a_part_of_the_plan_on_the_page(written):
    shown = between(written, EXAMPLE, MEMORY.name)
    printed = (
        shown.strip().removeprefix("```console").removesuffix("```").strip().partition("\n")[2]
    )
    assert shown == f"\n{example(printed)}\n"
    part = between(README.read_text(encoding="utf-8"), EXCERPT, README.name)
    assert part == f"\n{excerpt(printed)}\n"
    assert 8 <= len(part.splitlines()) - 3 < len(printed.splitlines())


def test_rows_name_presets_and_sizes_that_the_run_files_have_not_fixed():
    assert {row.spec.name for row in ROWS} == {"wan", "flux2"}
    for row in ROWS:
        assert (row.config.data.height, row.config.data.width) == row.size[
            1:
        ] and row.config.model.preset in row.name


def test_only_what_is_between_the_markers_is_replaced():
    begin, end = TABLE
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert replaced(text, TABLE, "new", "page") == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(UserError, match="has it 0 times"):
        replaced(text, EXAMPLE, "new", "page")
    with pytest.raises(UserError, match="has it 2 times"):
        replaced(text + begin, TABLE, "new", "page")
