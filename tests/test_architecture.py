"""ARCHITECTURE.md, docs/code.md and CONTRIBUTING.md name files, functions and folders that are
there."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from workspace import CORE, MEMBERS, ROOT, read_toml, text_files

CODE_PAGE = ROOT / "docs/code.md"
PAGES = [ROOT / "ARCHITECTURE.md", CODE_PAGE, ROOT / "CONTRIBUTING.md"]
STARTS = [ROOT, CORE.source, *(start for member in MEMBERS for start in (member.folder,
    member.source, member.folder / "src"))]  # fmt: skip
"""Where a path may begin."""
ELSEWHERE = {"data.json", "run.toml", "utils.py"}
"""What a run reads and writes, and a name that no file may have."""
PLACEHOLDER = re.compile(r"<\w+>")


def spans(text: str) -> Iterator[str]:
    """What stands in backticks outside of code blocks, each on one line."""
    outside = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", outside):
        yield " ".join(span.split())


def paths(text: str) -> Iterator[str]:
    """The paths among these: words with a slash, and names of files with an ending of ours."""
    for span in spans(text):
        for word in span.split():
            word = word.rstrip(":")
            is_path = re.fullmatch(r"[\w.*<>-]*(?:/[\w.*<>-]+)+/?|[\w.*<>-]+/", word)
            is_file = re.fullmatch(r"[\w*<>-]+\.(?:py|md|toml|json|safetensors)", word)
            if (is_path or is_file) and word not in ELSEWHERE:
                yield word


def exists(path: str) -> bool:
    """Whether there is such a path; a name alone may be anywhere, and `<name>` is any."""
    pattern = PLACEHOLDER.sub("*", path).rstrip("/")
    if "/" not in pattern:
        return any(file.match(pattern) for file in text_files()) or any(
            (start / pattern).is_dir() for start in STARTS
        )
    return any(any(start.glob(pattern)) for start in STARTS)


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Every `file.py: name` as the file and the name."""
    for span in spans(text):
        if found := re.fullmatch(r"([\w./-]+\.py): ([\w.]+)", span):
            yield found[1], found[2]


@cache
def defined(file: Path) -> frozenset[str]:
    """Functions, classes, methods, attributes of classes and constants of a module."""

    def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            match node:
                case ast.FunctionDef(name=name):
                    yield prefix + name
                case ast.ClassDef(name=name):
                    yield prefix + name
                    yield from names(node.body, f"{prefix}{name}.")
                case ast.Assign(targets=targets):
                    yield from (
                        prefix + target.id for target in targets if isinstance(target, ast.Name)
                    )
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield prefix + name

    return frozenset(names(ast.parse(file.read_text(encoding="utf-8")).body))


def is_defined(path: str, name: str) -> bool:
    return any(name in defined(start / path) for start in STARTS if (start / path).is_file())


def diagram(text: str) -> list[list[str]]:
    """Folders of the diagram of layers, line by line: the first word of each cell of each row."""
    rows = re.findall(r"^\+-+\+\n((?:\|.*\|\n)+)", text, flags=re.MULTILINE)
    return [[cell.split()[0] for cell in row.splitlines()[0].strip("|").split("|")] for row in rows]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page):
    named = list(paths(page.read_text(encoding="utf-8")))
    assert len(named) > 20
    assert sorted({path for path in named if not exists(path)}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_that_a_page_names_is_defined_in_its_file(page):
    named = set(definitions(page.read_text(encoding="utf-8")))
    assert sorted(f"{path}: {name}" for path, name in named if not is_defined(path, name)) == []


def test_the_walks_name_functions():
    walks = (
        CODE_PAGE.read_text(encoding="utf-8")
        .partition("## Three walks")[2]
        .partition("## I want to add")[0]
        .split("\n### ")[1:]
    )
    assert len(walks) == 3
    for walk in walks:
        assert len(set(definitions(walk))) >= 10, walk.splitlines()[0]
        assert len(re.findall(r"^\d+\. ", walk, flags=re.MULTILINE)) <= 10


def test_the_diagram_shows_the_layers_that_the_import_contract_has():
    contracts = {
        each["type"]: each
        for each in read_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    }
    layers = [
        [folder.strip() for folder in layer.split("|")] for layer in contracts["layers"]["layers"]
    ]
    shown = diagram((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    (packages,), *folders = [sorted(row) for row in shown]
    assert packages == "packages", "the diagram's first row has the model packages"
    assert folders == [sorted(layer) for layer in layers]


def test_each_wish_names_at_most_four_files():
    table = (
        CODE_PAGE.read_text(encoding="utf-8").partition("## I want to add")[2].partition("\n## ")[0]
    )
    files: dict[str, int] = {}
    wish = ""
    for line in re.findall(r"^\|.*\|$", table, flags=re.MULTILINE)[2:]:
        _, name, where, *_ = line.split("|")
        wish = name.strip() or wish
        # A row without a path is one file, too: "the family's code", "a file next to it".
        files[wish] = files.get(wish, 0) + max(1, len(list(paths(where))))
    assert set(files) == {
        "a form of adapter files",
        "a program that reads adapter files",
        "an attention backend",
        "a setting of how a model runs",
        "an optimizer",
        "a data column",
        "a precision place",
        "a rank",
        "a check of a run",
    }
    assert max(files.values()) <= 4


def test_what_is_not_there_is_found():
    text = """
`io/files.py`, `gone/file.py` and `gone.py`, `nn/*.py` and `uv run tests/gone_test.py`, `models/spec.py: ModelSpec.for_arch`,
`models/spec.py: ModelSpec.gone`, `io/files.py: atomic_write`, `shared/tests`, `packages/<name>/pyproject.toml`, `train.steps`,
`data.json`.

```
`another/gone.py` in a code block
```
"""
    assert [path for path in paths(text) if not exists(path)] == [
        "gone/file.py",
        "gone.py",
        "tests/gone_test.py",
    ]
    assert [name for path, name in definitions(text) if not is_defined(path, name)] == [
        "ModelSpec.gone"
    ]
    assert "nn/*.py" in set(paths(text)) and "train.steps" not in set(paths(text))


def test_the_diagram_is_read_as_it_is_written():
    text = "+------+\n| one    what it is | two    and this |\n|   more            |                 |\n+------+\n| three  |\n+------+\n"
    assert diagram(text) == [["one", "two"], ["three"]]
