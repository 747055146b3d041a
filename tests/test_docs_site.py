"""The site of the documentation is complete and builds without a warning."""

import re
import subprocess
import sys

import pytest

from ditkit_core.config.schema import config_fields
from ditkit_core.run.config import RunConfig
from pages import PAGES
from workspace import MEMBERS, MODELS, ROOT

CONTENTS = ROOT / "docs" / "README.md"
API = ROOT / "docs" / "api"
UNLISTED = {ROOT / "README.md", CONTENTS}
"""The first page of the site, and the list itself."""
HEADINGS = [
    "Demo",
    "Which model",
    "Data",
    "What is trained",
    "Samples",
    "Exports",
    "Measured",
    "Never tried",
]
"""Of the page of a model family: who knows one finds the same things on the others."""


def test_the_list_has_every_page_once():
    listed = [
        (CONTENTS.parent / link).resolve()
        for link in re.findall(r"\]\(([^)#]+)\)", CONTENTS.read_text("utf-8"))
    ]
    made = {*API.glob("*.rst"), ROOT / "docs" / "settings.rst", ROOT / "docs" / "commands.rst"}
    pages = {page for page in PAGES if page.relative_to(ROOT).parts[0] != ".github"}
    # docs/conf.py finds the pages of model packages.
    unlisted = {
        page
        for page in (pages | made) - UNLISTED - set(listed)
        if page.parent.parent != ROOT / "packages"
    }
    assert unlisted == set(), "list them in docs/README.md"
    assert set(listed) - UNLISTED - (pages | made) == set()
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("member", MODELS, ids=lambda member: member.name)
def test_pages_of_families_have_the_same_headings(member):
    text = (member.folder / "README.md").read_text("utf-8")
    assert re.findall("^## (.+)$", text, re.MULTILINE) == HEADINGS


def test_every_module_is_on_one_page_of_the_reference():
    references = [*API.glob("*.rst"), *ROOT.glob("packages/*/api.rst")]
    lines = [line for page in references for line in page.read_text("utf-8").splitlines()]
    named = [name for line in lines if line.startswith(".. modules::") for name in line.split()[2:]]
    for member in MEMBERS:
        for file in member.modules:
            name = ".".join(file.relative_to(member.folder / "src").with_suffix("").parts)
            if file.name != "__init__.py":
                pages = sum(name == each or name.startswith(f"{each}.") for each in named)
                assert pages == 1, (
                    f"{name} is on {pages} pages of docs/api: name it, or its package, under `.. "
                    f"modules::` of one"
                )


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path):
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-n",
        "-q",
        "-c",
        "docs",
        ".",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "index.html").read_text(encoding="utf-8")
    links = set(re.findall(r'<a class="reference internal" href="([^"#]+)"', first))
    assert {
        page.relative_to(ROOT).with_suffix(".html").as_posix() for page in API.glob("*.rst")
    } < links
    assert all((tmp_path / link).is_file() for link in links)
    settings = (tmp_path / "docs" / "settings.html").read_text(encoding="utf-8")
    assert [key for key in config_fields(RunConfig) if f">{key}<" not in settings] == []
    engine = (tmp_path / "docs" / "api" / "engine.html").read_text(encoding="utf-8")
    assert 'id="ditkit_core.engine.engine.BlockEngine"' in engine
    commands = (tmp_path / "docs" / "commands.html").read_text(encoding="utf-8")
    assert "use with --run" in commands and not re.findall(r"–[a-z]", commands), (
        "an option begins with two hyphens"
    )
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="https?:', page.read_text(encoding="utf-8")
        ), page
