"""Size and shape of the code as a markdown table, of the working tree and of any revisions next to
it.

    uv run tools/house_measures.py                   # the working tree
    uv run tools/house_measures.py --rev 58d647d     # a revision before it, for comparison
    uv run tools/house_measures.py --rev A --rev B   # several

Only text and syntax trees are looked at: nothing of the code is imported, so that any revision can
be measured. What is counted:

- Lines are all lines; code tokens are those of Python 3.11 (later ones take f-strings apart),
  without comments, docstrings, indents and ends of lines.
- Functions include methods and functions inside functions. Their length is from `def` to the last
  line, without decorators, and their body that without the docstring; `self` and `cls` are no
  parameters. Value classes are dataclasses, NamedTuples and TypedDicts.
- A walk is what somebody reads who follows every call by its name from one function on: the
  functions that it reaches, and their files. Calls of objects are not followed, nor is what is in
  `errors`, `io` and `config`.
- The core is counted without its folder `testing`. Folders of the core are those directly in it;
  one inside another is listed by itself.
- An import counts wherever it stands, also inside a function. An import runs up if the importing
  module's line of the layers contract is below that of what it imports, or is the same line and the
  two have different names.
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CORE = "shared/src/ditkit_core/"
LONGEST_LINE, LONGEST_FUNCTION, MOST_PARAMETERS, SHORT_BODY = 100, 60, 8, 3
WALKS = (
    "planner.partition: placement_of",
    "run.encoding: encode_all",
    "adapters.files.read: open_adapter",
)
"""Where walks through the core begin."""
NOT_WALKED = ("errors", "io", "config")
_NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        *(tokenize.NL, tokenize.NEWLINE),
        *(tokenize.INDENT, tokenize.DEDENT),
        tokenize.ENDMARKER,
    }
)

Texts = Mapping[str, str]
"""Content of files by path, with forward slashes, relative to the root."""
Graph = Mapping[str, set[str]]
"""Modules by what they import."""


class Function(NamedTuple):
    """A function or method."""

    name: str
    lines: int
    body: int
    """Lines of its body without the docstring."""
    parameters: int
    documented: bool


@dataclass(frozen=True)
class File:
    """What is counted of one file."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> "File":
        return cls(path, text, ast.parse(text))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def functions(self) -> list[Function]:
        found = []
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                documented = ast.get_docstring(node) is not None
                length, body = node.end_lineno - node.lineno + 1, node.body[documented:]
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                parameters = num_parameters(node.args)
                found.append(Function(node.name, length, lines, parameters, documented))
        return found

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @property
    def num_tokens(self) -> int:
        """Code tokens."""
        texts = {
            node.lineno
            for node in self.nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        return sum(
            token.type not in _NO_CODE
            and not (token.type == tokenize.STRING and token.start[0] in texts)
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
        )

    @property
    def public_names(self) -> list[str]:
        """Functions and classes at the top level whose name has no underscore in front."""
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        names = [node.name for node in self.tree.body if isinstance(node, kinds)]
        return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def num_parameters(arguments: ast.arguments) -> int:
    """Parameters of a function, without `self` and `cls`, `*args` and `**kwargs`."""
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return len(named) + len(arguments.kwonlyargs) - (named[:1] in (["self"], ["cls"]))


def is_value(node: ast.ClassDef) -> bool:
    """Whether a class only has fields: a dataclass, a NamedTuple or a TypedDict."""
    names = map(ast.unparse, (*node.decorator_list, *node.bases))
    return any(re.search(r"\b(dataclass|NamedTuple|TypedDict)\b", name) for name in names)


def defined_twice(files: Iterable[File]) -> dict[str, list[str]]:
    """Public names by the modules that define them, where these are more than one."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for name in file.public_names:
            places[name].append(module_of(file.path))
    return {name: sorted(modules) for name, modules in sorted(places.items()) if len(modules) > 1}


def module_of(path: str) -> str:
    """The dotted name of a file below `src`: `a/src/b/c/__init__.py` is `b.c`."""
    parts = PurePosixPath(path.rpartition("src/")[2]).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(files: Iterable[File]) -> dict[str, set[str]]:
    """Which of these modules imports which, wherever the import stands; the package around all of
    them is left out."""
    modules = {module_of(file.path): file for file in files}
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        package = module if file.path.endswith("/__init__.py") else module.rpartition(".")[0]
        named = (name for node in file.nodes for name in _imported(node, package))
        # `from a.b import c` names a.b.c: a module, or else something in a.b
        targets = (
            next((n for n in (name, name.rpartition(".")[0]) if n in modules), "") for name in named
        )
        graph[module] = {target for target in targets if "." in target and target != module}
    return graph


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *filter(None, [node.module])])
        yield from (f"{base}.{name.name}" for name in node.names)


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or not, sorted."""
    reached = {module: _reached(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in reached[m] if m in reached[other]))
        for m in graph
        if m in reached[m]
    }
    return [list(group) for group in sorted(groups)]


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    left = list(graph[start])
    while left:
        if (module := left.pop()) not in found:
            found.add(module)
            left += graph[module]
    return found


def layers_of(pyproject: str, container: str = "ditkit_core") -> list[list[str]]:
    """The lines of the layers contract of a package, the highest first; empty if it has none."""
    linter = tomllib.loads(pyproject).get("tool", {}).get("importlinter", {})
    for contract in linter.get("contracts", []):
        if contract["type"] == "layers" and contract.get("containers") == [container]:
            return [
                [name.strip(" ()") for name in re.split(r"[|:]", line)]
                for line in contract["layers"]
            ]
    return []


def running_up(graph: Graph, layers: Sequence[Sequence[str]]) -> list[str]:
    """Imports against the contract between what is directly in the package: folders, and modules
    outside of them."""
    rank = {name: number for number, line in enumerate(layers) for name in line}
    found = []
    for module, targets in sorted(graph.items()):
        for target in sorted(targets):
            one, other = (name.split(".")[1] for name in (f"{module}.", f"{target}."))
            known = one in rank and other in rank
            if known and (rank[other] < rank[one] or (rank[other] == rank[one] and one != other)):
                found.append(f"{module} -> {target}")
    return found


def single_importers(graph: Graph) -> int:
    """Modules that one module alone imports."""
    importers = Counter(target for targets in graph.values() for target in targets)
    return sum(number == 1 for number in importers.values())


def folders_of(paths: Iterable[str]) -> dict[str, int]:
    """How many files each folder of the core has of its own, by its path in the core; the core
    itself is the empty path."""
    folders = Counter(str(PurePosixPath(path.removeprefix(CORE)).parent) for path in paths)
    return {"" if folder == "." else folder: count for folder, count in sorted(folders.items())}


@dataclass(frozen=True)
class Tree:
    """The repository at one revision."""

    name: str
    texts: Texts

    def files(self, *prefixes: str) -> list[File]:
        paths = [
            path
            for path in sorted(self.texts)
            if path.endswith(".py") and path.startswith(prefixes)
        ]
        return [File.parse(path, self.texts[path]) for path in paths]

    def packages(self) -> list[str]:
        """The model packages."""
        parts = (path.split("/") for path in self.texts if path.startswith("packages/"))
        return sorted({folders[1] for folders in parts if "src" in folders})

    def groups(self) -> dict[str, list[File]]:
        """Files by the part of the repository that they belong to."""
        core = self.files(CORE)
        testing = [file for file in core if file.path.startswith(f"{CORE}testing/")]
        return {
            "core": [file for file in core if file not in testing],
            "core testing": testing,
            **{f"packages/{name}": self.files(f"packages/{name}/src/") for name in self.packages()},
            "shared/tests": self.files("shared/tests/"),
            "other tests": [
                file
                for file in self.files("tests/", "packages/", "ui/")
                if "/tests/" in f"/{file.path}"
            ],
            "ui": self.files("ui/src/"),
            "tools": self.files("tools/"),
        }


def working_tree(root: Path) -> Tree:
    """What is, or would be, committed."""
    listed = (
        _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        .decode()
        .split("\0")
    )
    paths = [path for path in listed if _is_read(path) and (root / path).is_file()]
    return Tree("working tree", {path: (root / path).read_text(encoding="utf-8") for path in paths})


def tree_at(root: Path, revision: str) -> Tree:
    """What a revision has."""
    texts = {}
    with tarfile.open(
        fileobj=io.BytesIO(_git(root, "archive", "--format=tar", revision))
    ) as archive:
        for member in archive:
            content = (
                archive.extractfile(member) if member.isfile() and _is_read(member.name) else None
            )
            if content is not None:
                texts[member.name] = content.read().decode("utf-8")
    return Tree(revision, texts)


def _is_read(path: str) -> bool:
    return path.endswith(".py") or path in ("README.md", "pyproject.toml")


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, check=True
    ).stdout


SIZES = (
    "tree",
    "at",
    "files",
    "lines",
    "code tokens",
    f"lines over {LONGEST_LINE}",
    "functions",
    f"mean body; bodies of up to {SHORT_BODY}",
    f"over {LONGEST_FUNCTION} lines",
    f"over {MOST_PARAMETERS} parameters",
    "value classes; fields",
    "functions with docstring",
)


def sizes(files: Sequence[File]) -> list[str]:
    """The cells of a row of the table of sizes, from `files` on."""
    lines = [line for file in files for line in file.lines]
    functions = [function for file in files for function in file.functions]
    values = [node for file in files for node in file.classes if is_value(node)]
    num_fields = sum(isinstance(entry, ast.AnnAssign) for node in values for entry in node.body)
    bodies = [function.body for function in functions]
    short = sum(body <= SHORT_BODY for body in bodies)
    count = max(1, len(functions))
    return [
        str(len(files)),
        f"{len(lines):,}",
        f"{sum(file.num_tokens for file in files):,}",
        f"{sum(len(line) > LONGEST_LINE for line in lines) / max(1, len(lines)):.1%}",
        f"{len(functions):,}",
        f"{sum(bodies) / count:.1f}; {short / count:.0%}",
        str(sum(function.lines > LONGEST_FUNCTION for function in functions)),
        str(sum(function.parameters > MOST_PARAMETERS for function in functions)),
        f"{len(values)}; {num_fields:,}",
        f"{sum(function.documented for function in functions) / count:.0%}",
    ]


def walk(files: Iterable[File], start: str) -> tuple[int, int]:
    """Functions and files of a walk that begins at `module: function` of the core; 0 and 0 if there
    is none."""
    modules = {module_of(file.path): _Names.of(file) for file in files}
    module, _, name = f"ditkit_core.{start}".partition(": ")
    reached: set[tuple[str, str]] = set()
    left = [(module, name)] if name in getattr(modules.get(module), "functions", {}) else []
    while left:
        if (stay := left.pop()) in reached:
            continue
        reached.add(stay)
        names = modules[stay[0]]
        for node in ast.walk(names.functions[stay[1]]):
            if isinstance(node, ast.Name):
                left += _targets(modules, stay[0], node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "self":
                    method = f"{stay[1].partition('.')[0]}.{node.attr}"
                    left += [(stay[0], method)] if method in names.functions else []
                else:
                    left += _targets(modules, stay[0], f"{node.value.id}.{node.attr}")
    return len(reached), len({module for module, _ in reached})


class _Names(NamedTuple):
    """What names mean in a module."""

    functions: Mapping[str, ast.AST]
    """Functions, and methods as `Class.method`."""
    imports: Mapping[str, str]
    """Dotted names by those that the module has for them."""

    @classmethod
    def of(cls, file: File) -> "_Names":
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        functions: dict[str, ast.AST] = {}
        for node in file.tree.body:
            if isinstance(node, kinds):
                functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                methods = [entry for entry in node.body if isinstance(entry, kinds)]
                functions |= {f"{node.name}.{method.name}": method for method in methods}
        imports = {
            name.asname or name.name: f"{node.module}.{name.name}"
            for node in file.nodes
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        return cls(functions, imports)


def _targets(modules: Mapping[str, _Names], module: str, name: str) -> list[tuple[str, str]]:
    """The function that a name means in a module, or what makes an object of a class; none if it is
    outside of the core, or not walked."""
    first, _, rest = name.partition(".")
    if (path := modules[module].imports.get(first)) is not None:
        if path in modules:  # `from ditkit_core.planner import partition`
            module, name = path, rest
        else:
            module, name = path.rpartition(".")[0], f"{path.rpartition('.')[2]}.{rest}".rstrip(".")
    if module not in modules or module.split(".")[1:2] and module.split(".")[1] in NOT_WALKED:
        return []
    made = (name, f"{name}.__init__", f"{name}.__post_init__")
    return [(module, key) for key in made if key in modules[module].functions]


SHAPES = (
    "at",
    "folders of the core",
    "most files in a folder",
    "modules in no folder",
    "lines of the layers contract",
    "imports between core modules",
    "import cycles",
    "imports that run up",
    "core modules that packages import",
    "public names defined twice",
    "modules with one importer",
    "lines of README",
    *(f"walk from {start.partition(': ')[2]}" for start in WALKS),
)


@dataclass(frozen=True)
class Shape:
    """How the core hangs together at one revision."""

    folders: Mapping[str, int]
    """As `folders_of`."""
    num_outside: int
    """Modules in no folder, `__init__` aside."""
    graph: Graph
    layers: Sequence[Sequence[str]]
    twice: Mapping[str, Sequence[str]]
    num_imported: int
    """Core modules that model packages import."""
    num_single: int
    """Core modules that one module alone imports, of the core or a package."""
    num_readme_lines: int
    walks: Sequence[tuple[int, int]]
    """Functions and files of each of `WALKS`."""

    @classmethod
    def of(cls, tree: Tree, groups: Mapping[str, Sequence[File]]) -> "Shape":
        core = groups["core"]
        modules = {module_of(file.path) for file in core}
        packages = [
            file for name in groups if name.startswith("packages/") for file in groups[name]
        ]
        graph = import_graph([*core, *packages])
        outside = [file.path for file in core if "/" not in file.path.removeprefix(CORE)]
        imported = {
            target
            for module, targets in graph.items()
            if module not in modules
            for target in targets
        }
        return cls(
            folders=folders_of(file.path for file in core),
            num_outside=len([path for path in outside if not path.endswith("__init__.py")]),
            graph={
                module: targets & modules for module, targets in graph.items() if module in modules
            },
            layers=layers_of(tree.texts.get("pyproject.toml", "")),
            twice=defined_twice(core),
            num_imported=len(imported & modules),
            num_single=single_importers({name: graph[name] & modules for name in graph}),
            num_readme_lines=len(tree.texts.get("README.md", "").splitlines()),
            walks=[walk(core, start) for start in WALKS],
        )

    def cells(self) -> list[str]:
        """The cells of a row of the table of shapes, from the second on."""
        inside = {name: count for name, count in self.folders.items() if name}
        numbers = [
            len({name.partition("/")[0] for name in inside}),
            max(inside.values(), default=0),
            self.num_outside,
            len(self.layers),
            sum(map(len, self.graph.values())),
            len(cycles(self.graph)),
            len(running_up(self.graph, self.layers)),
            self.num_imported,
            len(self.twice),
            self.num_single,
            self.num_readme_lines,
        ]
        walks = [f"{functions} in {files}" for functions, files in self.walks]
        return [*map(str, numbers), *walks]

    def lists(self) -> Iterator[str]:
        """What the numbers count, by name."""
        folders = [f"`{name or '(no folder)'}` {count}" for name, count in self.folders.items()]
        yield f"- files by folder: {', '.join(folders)}"
        for group in cycles(self.graph):
            yield f"- cycle: {', '.join(group)}"
        for edge in running_up(self.graph, self.layers):
            yield f"- runs up: {edge}"
        short = {
            name: ", ".join(module.partition(".")[2] for module in found)
            for name, found in self.twice.items()
        }
        named = [f"`{name}` ({modules})" for name, modules in short.items()]
        yield f"- defined twice: {', '.join(named) or 'none'}"


def function_lists(groups: Mapping[str, Sequence[File]]) -> Iterator[str]:
    """The functions that are too long, and those with too many parameters, the worst first."""
    every = [
        (function, file.path)
        for files in groups.values()
        for file in files
        for function in file.functions
    ]
    for what, value, most in (
        ("lines", lambda function: function.lines, LONGEST_FUNCTION),
        ("parameters", lambda function: function.parameters, MOST_PARAMETERS),
    ):
        over = sorted(
            ((value(function), f"{path}: {function.name}") for function, path in every),
            reverse=True,
        )
        named = [f"{count} `{name}`" for count, name in over if count > most]
        yield f"- over {most} {what}: {', '.join(named) or 'none'}"


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def measured(trees: Sequence[Tree]) -> Iterator[str]:
    """The lines of the report."""
    groups = {tree.name: tree.groups() for tree in trees}
    shapes = {tree.name: Shape.of(tree, groups[tree.name]) for tree in trees}
    yield from (row(SIZES), row(["---"] * 2 + ["---:"] * (len(SIZES) - 2)))
    for name in groups[trees[-1].name]:
        for tree in trees:
            yield row([name, tree.name, *sizes(groups[tree.name].get(name, []))])
    yield from ("", row(SHAPES), row(["---"] + ["---:"] * (len(SHAPES) - 1)))
    for tree in trees:
        yield row([tree.name, *shapes[tree.name].cells()])
    for tree in trees:
        yield from ("", f"At {tree.name}:", "")
        yield from function_lists(groups[tree.name])
        yield from shapes[tree.name].lists()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rev", action="append", default=[], metavar="REV", help="a revision to measure as well"
    )
    revisions = parser.parse_args().rev
    print(
        "\n".join(
            measured([*(tree_at(ROOT, revision) for revision in revisions), working_tree(ROOT)])
        )
    )


if __name__ == "__main__":
    main()
