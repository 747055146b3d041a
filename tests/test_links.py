"""Links between the pages lead somewhere, and tests that a page names exist."""

import re
from collections.abc import Iterator
from pathlib import Path

from pages import PAGES, prose
from workspace import ROOT, text_files

TEST_FILES = [
    file.relative_to(ROOT).as_posix() for file in text_files() if file.name.startswith("test_")
]


def links(page: Path) -> Iterator[str]:
    """The targets of a page's links, those to other sites left out."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


def broken(page: Path) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and (file.suffix != ".md" or anchor not in anchors(file))):
            yield target


def test_every_link_of_a_page_leads_somewhere():
    assert {
        str(page.relative_to(ROOT)): targets for page in PAGES if (targets := list(broken(page)))
    } == {}


def test_every_test_file_that_a_page_names_exists():
    assert not [
        (str(page.relative_to(ROOT)), name)
        for page in PAGES
        for name in set(re.findall(r"(?:\w+/)*\btest_\w+\.py\b", page.read_text(encoding="utf-8")))
        if not any(f"/{file}".endswith(f"/{name}") for file in TEST_FILES)
    ]


def test_broken_links_and_anchors_are_found(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text(
        "# A `code` heading: it's here\n\n```\n# not a heading\n```\n", encoding="utf-8"
    )
    page.write_text(
        "# Top\n[1](other.md) [2](other.md#a-code-heading-its-here) [3](#top) "
        "[4](https://example.org)\n"
        "[5](gone.md) [6](other.md#not-a-heading) [7](#bottom) `[8](code.md)`\n",
        encoding="utf-8",
    )
    assert list(broken(page)) == ["gone.md", "other.md#not-a-heading", "#bottom"]


def test_the_readme_is_short_and_says_its_status_first():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert any("Status" in line and "GPU" in line for line in lines[:10])
