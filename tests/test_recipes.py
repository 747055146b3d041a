"""Every recipe is a run file that is accepted and fits as its page says, and the messages of the troubleshooting page are printed by the code."""

import ast
import re
from functools import cache

import pytest
import torch

from ditkit_core.testing.run_files import check_accepted, check_fits, check_schema_of
from ditkit_flux2.spec import FLUX2
from ditkit_wan.spec import WAN
from workspace import MEMBERS, ROOT

RECIPES = ROOT / "docs" / "recipes"
FILES = sorted(RECIPES.glob("*.toml"))
PAGE = (RECIPES / "README.md").read_text(encoding="utf-8")
SPECS = {FLUX2.name: FLUX2, WAN.name: WAN}
PLANS = {
    name: (family, gpus, host, excerpt.splitlines())
    for family, name, gpus, host, excerpt in re.findall(
        r"```console\n\$ uv run (\w+)-train docs/recipes/(\S+)\.toml --plan --gpus (\S+)(?: --host (\S+))?\n(.+?)\n```",
        PAGE,
        flags=re.DOTALL,
    )
}
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [
    line for block in re.findall(r"```text\n(.+?)```", TROUBLES, flags=re.DOTALL) for line in block.splitlines()
]


def test_the_page_has_a_plan_a_link_and_a_row_for_each_run_file():
    assert PLANS.keys() == {file.stem for file in FILES} and len(FILES) >= 7
    for file in FILES:
        assert PAGE.count(f"[`{file.name}`]({file.name})") == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_accepted(file):
    config = check_accepted(SPECS[PLANS[file.stem][0]], file)
    assert config.run.folder == f"runs/{file.stem.replace('_', '-')}"
    assert config.held_out.clips >= 4 and config.save.every_steps % config.held_out.every_steps == 0
    check_schema_of(file)


# A plan takes most of a minute of a CPU, so one is made each day.
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[] if file.stem == "klein_4b_12gb" else pytest.mark.slow, id=file.stem)
        for file in FILES
    ],
)
def test_a_recipe_fits_as_its_page_says(file, capsys):
    family, gpus, host, shown = PLANS[file.stem]
    check_fits(SPECS[family], file, gpus, host)
    printed = iter(capsys.readouterr().out.splitlines())
    if f", torch {torch.__version__.partition('+')[0]}." in PAGE:  # others hold other amounts
        assert len(shown) > 10 and [line for line in shown if line not in printed] == []


@cache
def literals() -> str:
    """All texts of the code; where a value goes into one, and between two, there is a line's end."""
    found = []
    for file in (file for member in MEMBERS for file in member.modules):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def clauses(message: str) -> list[str]:
    """What a message has between values, colons, semicolons and brackets."""
    return [part for each in re.split(r"…|[:;] | \(|\)", message) if (part := each.strip(" ,:;()."))]


def test_the_page_has_messages():
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_troubleshooting_page_is_one_of_the_code(message):
    assert max(map(len, clauses(message))) >= 12
    assert [clause for clause in clauses(message) if clause not in literals()] == []


def test_a_message_that_no_code_prints_is_found():
    assert clauses("error: … is sad; cheer it up (…)") == ["error", "is sad", "cheer it up"]
    assert "cheer it up, please" not in literals()
