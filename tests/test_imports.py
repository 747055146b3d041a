"""Who may import whom, and that every member asks for what it imports."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from workspace import CORE, MEMBERS, MODELS, ROOT, UI, Member, read_toml, source

NOT_ON_AN_INDEX = {"flash_attn_interface", "sageattention"}
"""Imported where somebody built it, never required: FlashAttention 3 and SageAttention 2 are
published as source only."""


@cache
def imported_packages(file: Path) -> set[str]:
    """First names of everything that a file imports, at the top and inside functions."""
    names: set[str] = set()
    for node in source(file).nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def distribution(name: str) -> str:
    """A distribution's normalised name, out of a requirement or a plain name."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()


def declared(member: Member) -> set[str]:
    extras = member.project.get("optional-dependencies", {}).values()
    return {
        distribution(name)
        for name in [*member.project["dependencies"], *(name for extra in extras for name in extra)]
    }


def test_the_import_contracts_hold():
    # A process of its own: import-linter disables the loggers that exist when it starts. It imports
    # none of our code.
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-cache",
    ]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, encoding="utf-8")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 broken" in checked.stdout


def test_the_contracts_are_those_of_the_core():
    config = read_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]
    contracts = {contract["type"]: contract for contract in config["contracts"]}
    assert config["root_packages"] == contracts["forbidden"]["source_modules"] == [CORE.package]
    assert contracts["layers"]["containers"] == [CORE.package]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_no_member_imports_a_model_package_but_itself(member):
    models = {model.package for model in MODELS} - {member.package}
    imports = {file: imported_packages(file) & models for file in member.modules}
    assert {file.relative_to(ROOT): names for file, names in imports.items() if names} == {}


@pytest.mark.parametrize("member", [CORE, *MODELS], ids=lambda member: member.name)
def test_a_training_package_knows_nothing_of_the_page(member):
    """Machines that train, and programs with the library, install none of its dependencies."""
    pages_own = declared(UI) - declared(CORE) - {CORE.name} | {UI.name}
    assert "nicegui" in pages_own
    assert declared(member) & pages_own == set()
    names = {UI.package, *(name.replace("-", "_") for name in pages_own)}
    assert [file for file in member.modules if imported_packages(file) & names] == []


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_every_import_is_a_declared_dependency(member):
    # A model package may use what the core requires: the two are released together, with one
    # version.
    allowed = declared(member) | declared(CORE) | {member.name}
    owners = packages_distributions()
    missing = []
    for file in member.modules:
        for name in sorted(imported_packages(file) - sys.stdlib_module_names - NOT_ON_AN_INDEX):
            candidates = {distribution(owner) for owner in owners.get(name, [name])}
            if not candidates & allowed:
                missing.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not missing, f"declare these in {member.folder.name}/pyproject.toml: {missing}"
