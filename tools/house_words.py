"""Words and threads of the code by folder, as a table of `benchmarks/house.md`: numbers that may
only fall.

    uv run tools/house_words.py                  # print the table, of the working tree
    uv run tools/house_words.py --rev fd759269   # of a revision
    uv run tools/house_words.py --write          # put it into the page

- Words are names that say nothing of what they name (`WORDS`), wherever they stand in the code:
  variables, parameters, attributes, functions.
- Phrases are "that of", "those of" and "of which" in code, comments and docstrings, which take the
  place of a noun.
- Signatures are functions with a parameter that is a `RunContext`, and fields that are one.

The core is counted by its folders. What is counted for the whole core stands under the table: the
library is everything below the configuration of a run, and the application is the folders of
`APPLICATION`.
"""

import argparse
import ast
import io
import keyword
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent / "docs"))  # `marked` is there

from house_measures import CORE, ROOT, File, Tree, import_graph, row, tree_at, working_tree
from marked import replaced

PAGE = ROOT / "benchmarks" / "house.md"
MARKERS = ("<!-- words -->", "<!-- /words -->")
WORDS = frozenset(
    {"each", "own", "found", "given", "made", "place", "places", "whole", "what", "known", "seen"}
)
APPLICATION = ("config", "run", "planner", "diagnostics", "previews", "commands")
PACKAGES = ("wan", "flux2")
HEAD = ("folder", "words", "of 1,000 names", "phrases", "signatures")
_PHRASE = re.compile(r"\b(?:that|those)\s+of\b|\bof\s+which\b", re.IGNORECASE)


class Count(NamedTuple):
    """What is counted of a folder."""

    words: int
    names: int
    phrases: int
    signatures: int

    def cells(self) -> list[str]:
        """The cells of the folder's row, from the second on."""
        return [
            str(self.words),
            f"{1000 * self.words / max(1, self.names):.1f}",
            str(self.phrases),
            str(self.signatures),
        ]

    def __add__(self, other: "Count") -> "Count":  # type: ignore[override]  # numbers are added, not joined
        return Count(*(one + two for one, two in zip(self, other, strict=True)))


def count(file: File) -> Count:
    """The counts of one file."""
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    names = Counter(
        token.string
        for token in tokens
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string)
    )
    words = sum(number for name, number in names.items() if name in WORDS)
    return Count(
        words, names.total(), len(_PHRASE.findall(file.text)), sum(map(has_run, file.nodes))
    )


def has_run(node: ast.AST) -> bool:
    """Whether a function takes a run, or a field is one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return any(
            argument.annotation and _names_run(argument.annotation) for argument in arguments
        )
    return isinstance(node, ast.AnnAssign) and _names_run(node.annotation)


def _names_run(annotation: ast.expr) -> bool:
    return re.search(r"\bRunContext\b", ast.unparse(annotation)) is not None


def folder_of(path: str) -> str:
    """The folder of the core that a file is in, or the package."""
    folder, _, rest = path.removeprefix(CORE).partition("/")
    return path.split("/")[1] if not path.startswith(CORE) else folder if rest else "(no folder)"


def counted(tree: Tree) -> list[File]:
    """The files of the core without `testing`, and of the packages."""
    return [file for file in tree.files("") if is_counted(file.path)]


def is_counted(path: str) -> bool:
    """Whether a file is one of them."""
    sources = (CORE, *(f"packages/{package}/src/" for package in PACKAGES))
    return path.startswith(sources) and not path.startswith(f"{CORE}testing/")


def counts(files: Iterable[File]) -> dict[str, Count]:
    """Of each folder of the core, and of each package."""
    folders: dict[str, Count] = defaultdict(lambda: Count(0, 0, 0, 0))
    for file in files:
        folders[folder_of(file.path)] += count(file)
    return dict(sorted(folders.items()))


def single_importers(files: Iterable[File]) -> int:
    """Modules of the core that one module alone imports."""
    graph = import_graph(files)
    importers = Counter(
        target
        for targets in graph.values()
        for target in targets
        if target.startswith("ditkit_core.")
    )
    return sum(number == 1 for number in importers.values())


def imports_of(file: File) -> int:
    """Import statements of a file."""
    return sum(isinstance(node, ast.Import | ast.ImportFrom) for node in file.nodes)


def report(tree: Tree) -> Iterator[str]:
    """The lines of the section."""
    files = counted(tree)
    folders = counts(files)
    yield from (row(HEAD), row(["---"] + ["---:"] * (len(HEAD) - 1)))
    for folder, number in folders.items():
        yield row([f"`{folder}`", *number.cells()])
    core = sum(
        (number for name, number in folders.items() if name not in PACKAGES), Count(0, 0, 0, 0)
    )
    yield row(["the core", *core.cells()])
    lines: Counter[str] = Counter()
    for file in files:
        lines[folder_of(file.path)] += len(file.lines)
    application = sum(lines[folder] for folder in APPLICATION)
    library = lines.total() - application - sum(lines[folder] for folder in PACKAGES)
    train = next(file for file in files if file.path == f"{CORE}commands/train.py")
    yield ""
    yield f"- lines of the library {library:,}, of the application {application:,}"
    yield f"- modules with one importer: {single_importers(files)}"
    yield f"- imports of commands/train.py: {imports_of(train)}, lines: {len(train.lines)}"


def recorded(page: str) -> Mapping[str, tuple[int, int, int]]:
    """Words, phrases and signatures of each folder in the page's table."""
    rows = re.findall(
        r"^\| `(.+?)` \| (\d+) \| [\d.]+ \| (\d+) \| (\d+) \|$", page, flags=re.MULTILINE
    )
    return {
        folder: (int(words), int(phrases), int(signatures))
        for folder, words, phrases, signatures in rows
    }


def grown(files: Iterable[File], page: str) -> list[str]:
    """The numbers that are higher than the page's, in words."""
    limits = recorded(page)
    return [
        f"{folder}: {name} {number}, and benchmarks/house.md has {limit}"
        for folder, count in counts(files).items()
        for name, number, limit in zip(
            ("words", "phrases", "signatures"),
            (count.words, count.phrases, count.signatures),
            limits.get(folder, (0, 0, 0)),
            strict=True,
        )
        if number > limit
    ]


def write(page: Path, lines: Iterable[str]) -> None:
    text = page.read_text(encoding="utf-8")
    page.write_text(
        replaced(text, MARKERS, "\n".join(lines), page.name), encoding="utf-8", newline="\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rev", metavar="REV", help="a revision instead of the working tree")
    parser.add_argument(
        "--write", action="store_true", help="write the table into benchmarks/house.md"
    )
    arguments = parser.parse_args()
    lines = list(report(tree_at(ROOT, arguments.rev) if arguments.rev else working_tree(ROOT)))
    if arguments.write:
        write(PAGE, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
