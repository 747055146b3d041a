"""The pages of docs/ have what the code says today, and every schedule that they show is one."""

import re

import pytest
import torch

from ditkit_core.diagnostics.audit.audit import ACTING
from ditkit_core.engine.ac_schedule import parse_schedule, words
from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import ADAPTER_FORMS
from ditkit_core.models.adapter_programs import NOT_TRIED
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.attention.backends import BACKENDS
from doc_models import LICENCES, SPECS
from doc_models import row as published
from doc_planned import POLICIES, SUBJECTS, job_of, row
from doc_precision import CASES, NAMES, precision_of
from doc_programs import KINDS, files, is_written, loaded
from doc_ranks import MACHINES, RUNS
from doc_tables import CHECKPOINTING, ROOT, TABLES, Table, section, stale
from marked import between
from pages import PAGES

BY_NAME = {table.name: table for table in TABLES}
SLOW = ("models", "programs")
"""Tables that build every preset of every family, which takes seconds: tests below compare rows of
the first presets."""


def written(table: Table) -> list[str]:
    """The lines of a table's rows, as the page has them."""
    text = between(table.page.read_text(encoding="utf-8"), table.markers, table.page.name)
    return [line for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(table, marks=pytest.mark.slow if table.name in SLOW else (), id=table.name)
        for table in TABLES
        if table.is_cheap
    ],
)
def test_a_table_that_is_read_off_the_code_is_that_of_today(table):
    assert not stale(table), f"uv run tools/docs/doc_tables.py --write --only {table.name}"


@pytest.mark.parametrize(
    "table", [table for table in TABLES if not table.is_cheap], ids=lambda table: table.name
)
def test_a_table_that_is_made_says_how(table):
    text = between(table.page.read_text(encoding="utf-8"), table.markers, table.page.name)
    said = [
        line
        for line in text.splitlines()
        if line.startswith(("Planned, not measured: ", "Measured: "))
    ]
    assert len(said) == 1 and f"--only {table.name}`, torch " in said[0]
    assert said[0].startswith("Planned") == (table.kind == "planned")


def test_each_published_model_has_a_row_and_the_first_of_a_family_the_sizes_of_today():
    rows = written(BY_NAME["models"])[1:]
    ids = [(spec, *names) for spec in SPECS for names in spec.architecture.hub_presets.items()]
    for line, (_, hub_id, preset) in zip(rows, ids, strict=True):
        assert line.startswith(f"| `{hub_id}` | `{preset}` | ")
        assert line.endswith(f" | {LICENCES.get(hub_id, '')} |")
    first = [published(spec, next(iter(spec.architecture.hub_presets))) for spec in SPECS]
    assert [line for line in first if line not in rows] == []


@pytest.mark.parametrize("family", SUBJECTS)
def test_planned_tables_assume_the_kernels_of_a_plan(family):
    """Which are those of Triton on GPUs, where nothing else is set."""
    assert job_of(family).kernels == "triton"


@pytest.mark.slow
def test_the_first_row_of_a_plan_is_what_the_planner_says_today():
    table = BY_NAME["kept-wan"]
    text = table.page.read_text(encoding="utf-8")
    if f"--only {table.name}`, torch {torch.__version__.partition('+')[0]}," not in text:
        pytest.skip("written with another torch, whose operations may hold other amounts")
    assert row("wan", "none") in written(table)


def test_tables_have_every_policy_backend_place_and_case():
    first = {
        name: [line.split(" | ")[0].strip("| `") for line in written(BY_NAME[name])][1:]
        for name in BY_NAME
    }
    assert first["kept-wan"] == first["kept-flux2"] == list(POLICIES)
    assert first["backends"] == list(BACKENDS)
    assert first["presets"] == [case.strip("`") for case in CASES]
    for name in ("audit-wan", "audit-flux2"):
        assert set(ACTING) == set(first[name][:-2])


def test_every_schedule_of_the_page_is_understood():
    page = CHECKPOINTING.read_text(encoding="utf-8")
    grammar = page.partition("## How to write a schedule")[2].partition("Blocks are counted")[0]
    texts = [line.split("`")[1] for line in grammar.splitlines() if line.startswith("| `")]
    assert len(texts) >= 8
    for text in [
        *texts,
        *(line.split("`")[1] for line in written(BY_NAME["budgets"])[1:] if "`" in line),
    ]:
        parse_schedule(text)
    policies = page.partition("## Policies")[2].partition("The next table")[0]
    named = {
        re.split(r"[^a-z_]", line.split("`")[1].lstrip("+"))[0]
        for line in policies.splitlines()
        if line.startswith("| ") and "`" in line
    }
    assert named == set(words())


def test_every_case_of_the_presets_is_one_that_a_run_may_have():
    assert {precision_of("wan", **fields).residual for fields in CASES.values()} == {
        torch.float32,
        torch.bfloat16,
    }


def test_every_marker_of_a_page_is_a_table():
    for page in PAGES:
        found = re.findall(
            r"<!-- (\S+): written by tools/docs/doc_tables.py -->", page.read_text(encoding="utf-8")
        )
        assert sorted(found) == sorted(table.name for table in TABLES if table.page == page)


def test_the_page_for_maintainers_names_every_page_that_has_a_table():
    page = (ROOT / "docs" / "maintaining.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if "doc_tables.py --write`" in line]
    names = {
        table.page.parent.name if table.page.stem == "README" else table.page.stem
        for table in TABLES
    }
    assert [name for name in names if name not in row.split("|")[1]] == []


def test_each_run_has_a_row_for_each_number_of_ranks():
    rows = [line.strip("| ").split(" | ") for line in written(BY_NAME["ranks"])[1:]]
    assert [(row[0], row[1]) for row in rows] == [
        (run.name, str(8 * nodes)) for run in RUNS for nodes in MACHINES
    ]


def test_a_table_that_cannot_be_made_leaves_no_half():
    def broken():
        yield "| head |"
        raise UserError("no such tool")

    with pytest.raises(UserError, match="no such tool"):
        section(Table(name="made up", page=CHECKPOINTING, kind="measured", make=broken))


def test_licences_are_those_of_the_packages_pages():
    pages = [
        (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8")
        for name in ("flux2", "qwenimage", "zimage")
    ]
    rows = [line for page in pages for line in page.splitlines() if line.startswith("| `")]
    for hub_id, licence in LICENCES.items():
        assert any(f"| `{hub_id}` | {licence} |" in row for row in rows), hub_id


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_page_of_a_family_names_the_columns_of_its_conditions(spec: ModelSpec) -> None:
    page = (ROOT / "packages" / spec.name / "README.md").read_text(encoding="utf-8")
    names = {
        column.name
        for arch in spec.architecture.presets.values()
        for column in spec.for_arch(arch).data.columns(arch)
    }
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_table_of_programs_says_what_an_inspection_says(spec: ModelSpec, kind: str) -> None:
    """Of an adapter of the default targets: a form without a star is loaded whole, and one that is
    not there is not."""
    head, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in written(BY_NAME["programs"])
    ]
    (row,) = [row for row in rows if row[0] == kind and NAMES[spec.name] in row[1].split(", ")]
    targets, _ = files(spec, next(iter(spec.architecture.presets.values())))
    forms = [form for form in ADAPTER_FORMS.values() if is_written(spec, kind, form.name, targets)]
    assert len(head) == 6 and len(targets) > 50 and forms
    for program, cell in zip(head[2:], row[2:], strict=True):
        for form in forms:
            layout = form.layout(spec.architecture.names.bare, **KINDS[kind])
            problem = spec.adapters.rules.readers(layout, targets)[program]
            assert f"`{form.name}`*" in cell or (f"`{form.name}`" in cell) == (problem == "")
            assert (cell == "not tried") == (problem == NOT_TRIED)


def test_a_star_is_of_a_form_that_loses_some_layers() -> None:
    """ComfyUI has no name of FLUX.2's modulation in diffusers' names."""
    (flux2,) = (spec for spec in SPECS if spec.name == "flux2")
    targets, layers = files(flux2, flux2.architecture.presets["klein-4b"])
    assert "`diffusers`," in loaded(flux2, "LoRA", [targets])["ComfyUI"]
    assert r"`diffusers`\*," in loaded(flux2, "LoRA", [targets, layers])["ComfyUI"]
    assert "`diffusers`" not in loaded(flux2, "LoRA", [layers])["ComfyUI"]
