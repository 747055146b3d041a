"""What tools/house_words.py counts, and that it only falls."""

from house_measures import CORE, File
from house_words import (
    PAGE,
    Count,
    count,
    counts,
    grown,
    imports_of,
    is_counted,
    recorded,
    single_importers,
)
from workspace import MEMBERS, source

TEXT = '''"""That of a neighbour, and those
of another; the unit of which is a byte."""
from a import own

def f(run: RunContext, each: int, *, other: "list[RunContext]") -> None:
    """each found"""
    place = own.seen + placed

class Job:
    run: RunContext
    def g(self, context) -> RunContext: ...
'''


def file(path: str, text: str) -> File:
    return File.parse(f"{CORE}{path}", text)


def test_words_phrases_and_signatures_are_counted_in_code_and_prose() -> None:
    found = count(file("a/b.py", TEXT))
    # from a import `own`; `each`; `place` = `own`.`seen`: names, and no words of a docstring
    assert (found.words, found.phrases, found.signatures) == (5, 3, 2)
    assert imports_of(file("a/b.py", TEXT)) == 1


def test_folders_are_added_up() -> None:
    files = [file("a/b.py", TEXT), file("a/c/d.py", TEXT), file("e.py", "each = 1\n")]
    assert counts(files)["a"] == Count(*(2 * number for number in count(files[0])))
    assert counts(files)["(no folder)"] == Count(1, 1, 0, 0)


def test_a_module_with_one_importer_is_counted() -> None:
    files = [
        file("a.py", ""),
        file("b.py", "import ditkit_core.a\n"),
        file("c.py", "import ditkit_core.a, ditkit_core.b\n"),
    ]
    assert single_importers(files) == 1


def test_what_grows_is_named() -> None:
    page = "| `a` | 4 | 9.9 | 3 | 2 |\n"
    assert recorded(page) == {"a": (4, 3, 2)}
    assert grown([file("a/b.py", TEXT)], page) == ["a: words 5, and benchmarks/house.md has 4"]
    assert grown([file("a/b.py", TEXT)], page.replace("4", "5")) == []
    assert len(grown([file("new/b.py", TEXT)], page)) == 3, "a new folder begins at nothing"


def test_the_words_of_each_folder_only_fall() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(recorded(page)) > 15
    files = [source(path) for member in MEMBERS for path in member.modules]
    files = [file for file in files if is_counted(file.path)]
    assert grown(files, page) == [], (
        "use nouns; after they fell: uv run tools/house_words.py --write"
    )
