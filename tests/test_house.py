"""Rules that a machine can check: what library code never does, and what the repository never
holds."""

import ast
import builtins
import importlib
import re
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from ditkit_core.testing.filled_in import marks, next_step
from ditkit_core.testing.suites import SUITES
from house_measures import CORE, defined_twice, folders_of
from workspace import MEMBERS, MODELS, ROOT, read_toml, source, text_files

SOURCES = [file for member in MEMBERS for file in member.modules]
MODULES_IN_NO_FOLDER = ("errors.py", "execution.py")
GIVEN_NAMES = {
    "encode": ("api.encode", "encoding.encode"),  # names of the library's door
    "plan": ("api.plan", "planner.plan"),
    "sample": ("api.sample", "commands.sample"),
    "main": ("diagnostics.verification.worker", "previews.worker"),  # of programs
    **dict.fromkeys(
        ("forward", "backward"),
        tuple(
            f"nn.kernels.{name}"
            for name in ("gated_sum", "gated_unit", "modulated_norm", "norm_rotation")
        ),
    ),
}
"""Names that several modules define because something else calls each of them by it."""
RANKS = ("distributed/", "testing/")
"""Modules and folders of the core that use torch.distributed."""
PLACES_OF_RANKS = (
    "commands/",
    "distributed/",
    "encoding/",
    "engine/devices",
    "previews/",
    "run/",
    "testing/",
)
"""Those that ask which of the ranks this process is. All others are given that as a value, or do
not know of ranks."""
LIBRARY_ERRORS = "ditkit_core/errors"
"""The one module that catches every exception: what a library raises at a foreign file, or a
service behind it (`given_to_library`)."""


_FORBIDDEN_KINDS = (ast.Import, ast.ImportFrom, ast.Call, ast.ExceptHandler, ast.Attribute)
_KINDS_WITH_RANKS = (ast.Import, ast.ImportFrom, ast.Call, ast.Constant, ast.Attribute)


def core():
    """The files of the core with those for tests."""
    return [source(file) for file in SOURCES if CORE in file.as_posix()]


def library():
    """The files of the core without those for tests."""
    return [file for file in core() if not file.path.startswith(f"{CORE}testing/")]


def where(file: Path, node: ast.AST) -> str:
    return f"{file.relative_to(ROOT)}:{node.lineno}"


def forbidden(node: ast.AST) -> str | None:
    """What is wrong with one node of library code, or None."""
    # Of a million nodes most are of other kinds.
    if not isinstance(node, _FORBIDDEN_KINDS):
        return None
    match node:
        case ast.Import(names=names) if any(
            name.name.split(".")[0] in ("pickle", "cloudpickle", "dill") for name in names
        ):
            return "pickle: reading one runs the code in it"
        case ast.ImportFrom(module="pickle" | "cloudpickle" | "dill"):
            return "pickle: reading one runs the code in it"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save")):
            return "torch.load and torch.save pickle; use safetensors"
        case ast.Call(func=ast.Name(id="hasattr")):
            return "hasattr: the type says what it has"
        case ast.Call(keywords=keywords) if any(
            word.arg == "trust_remote_code"
            and not (isinstance(word.value, ast.Constant) and word.value.value is False)
            for word in keywords
        ):
            return "trust_remote_code"
        case (
            ast.ExceptHandler(type=None)
            | ast.ExceptHandler(type=ast.Name(id="Exception" | "BaseException"))
        ):
            return "broad except: name what can happen"
        case ast.Attribute(
            value=ast.Name(id="os"), attr="fork" | "kill" | "getuid" | "mkfifo" | "setsid"
        ):
            return f"os.{node.attr}: not on every system"
        case _:
            return None


def test_the_rules_see_what_they_forbid():
    guilty = """
import pickle
from pickle import loads
import os.path, dill
torch.load(path)
hasattr(model, "blocks")
AutoModel.from_pretrained(name, trust_remote_code=True)
AutoModel.from_pretrained(name, trust_remote_code=flag)
try: ...
except: ...
try: ...
except Exception as error: ...
os.fork()
"""
    found = [node.lineno for node in ast.walk(ast.parse(guilty)) if forbidden(node)]
    assert sorted(found) == [2, 3, 4, 5, 6, 7, 8, 10, 12, 13]
    innocent = "from_pretrained(n, trust_remote_code=False)\nos.replace(a, b)\ntry: ...\nexcept (OSError, ValueError): ...\n"
    assert not [node for node in ast.walk(ast.parse(innocent)) if forbidden(node)]


def test_library_code_does_nothing_forbidden():
    found, allowed = [], []
    for file in SOURCES:
        of_file = [
            f"{where(file, node)}: {reason}"
            for node in source(file).nodes
            if (reason := forbidden(node))
        ]
        if f"{file.parent.name}/{file.stem}" == LIBRARY_ERRORS:
            allowed.append(of_file.pop())
        found += of_file
    assert found == []
    (only,) = allowed
    assert "broad except" in only


def test_exceptions_that_docstrings_name_are_there():
    """Ours, Python's, or something that some module of ours imports."""
    kinds = (ast.ClassDef, ast.alias, ast.FunctionDef, ast.Module)
    nodes = [
        (file.name, node)
        for file in SOURCES
        for node in source(file).nodes
        if isinstance(node, kinds)
    ]
    known = {node.name for _, node in nodes if isinstance(node, (ast.ClassDef, ast.alias))} | set(
        dir(builtins)
    )
    found = [
        (file, name)
        for file, node in nodes
        if not isinstance(node, ast.alias)
        for name in re.findall(
            r"^    (\w+): ",
            (ast.get_docstring(node) or "").partition("\nRaises:\n")[2],
            re.MULTILINE,
        )
    ]
    assert len(found) > 100
    assert [f"{file}: {name}" for file, name in found if name not in known] == []


def uses_ranks(node: ast.AST) -> str:
    """Whether a node uses torch.distributed, or asks which rank this process is."""
    if not isinstance(node, _KINDS_WITH_RANKS):
        return ""
    match node:
        case ast.ImportFrom(
            module="ditkit_core.distributed.torchrun" | "ditkit_core.distributed.launch"
        ):
            return "asks"
        case ast.Constant(value="WORLD_SIZE" | "LOCAL_RANK" | "LOCAL_WORLD_SIZE"):
            return "asks"
        case (
            ast.Call(func=ast.Name(id="distributed"))
            | ast.Attribute(value=ast.Name(id="torch"), attr="distributed")
        ):
            return "uses"
        case ast.ImportFrom(module=str(module)) if module.startswith("torch.distributed"):
            return "uses"
        case ast.Import(names=names) if any(
            name.name.startswith("torch.distributed") for name in names
        ):
            return "uses"
        case _:
            return ""


COMMAND = re.compile(r"    (?:# |(?:[A-Z]+=\S+ )?uv run |python |    --)")
"""A line of a docstring that says how a program is started: a command, or a comment before it."""


def examples(docstring: str) -> list[str]:
    """The paragraphs of a docstring that are indented in all lines."""
    return [
        paragraph
        for paragraph in docstring.split("\n\n")
        if all(line.startswith("    ") for line in paragraph.splitlines())
    ]


def test_examples_in_docstrings_are_programs_and_how_tools_start_are_commands():
    """Not run together by whoever wraps lines: an example of two statements keeps two lines."""
    assert examples("One.\n\n    a = 1\n    b = 2\n\nTwo.") == ["    a = 1\n    b = 2"]
    num_examples = num_lines = 0
    for file in library():
        for node in file.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for example in examples(ast.get_docstring(node) or ""):
                    ast.parse(textwrap.dedent(example), f"{file.path}: {node.name}")
                    num_examples += 1
    for path in sorted((ROOT / "tools").rglob("*.py")):
        if "new_model/" in path.as_posix():
            continue  # the template of a package
        for example in examples(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""):
            wrong = [line for line in example.splitlines() if not COMMAND.match(line)]
            assert not wrong, f"{path}: {wrong}"
            num_lines += len(example.splitlines())
    assert num_examples >= 6 and num_lines >= 60


def test_few_modules_know_ranks_and_no_model_does():
    """A model declares its streams of tokens; the training loop takes its ranks as a value."""
    found: dict[str, set[str]] = {"asks": set(), "uses": set()}
    for file in SOURCES:
        path = file.relative_to(ROOT).with_suffix("").as_posix().partition("/src/")[2]
        for kind in {uses_ranks(node) for node in source(file).nodes} - {""}:
            found[kind].add(path)
    for kind, places in (("uses", RANKS), ("asks", PLACES_OF_RANKS)):
        assert len(found[kind]) > 5
        known = tuple(f"ditkit_core/{place}" for place in places)
        assert [path for path in sorted(found[kind]) if not path.startswith(known)] == []
    guilty = "import torch.distributed as dist\nfrom torch.distributed.tensor import DTensor\ntorch.distributed.get_rank()\ndistributed()"
    assert [uses_ranks(node) for node in ast.walk(ast.parse(guilty))].count("uses") == 4


def test_the_core_defines_no_public_name_twice():
    twice = defined_twice(library())
    known = {
        name: [f"ditkit_core.{module}" for module in modules]
        for name, modules in GIVEN_NAMES.items()
    }
    assert twice == known


def test_every_folder_of_the_core_has_an_introduction_and_few_modules_are_in_none():
    inits = {
        file.parent: file
        for file in SOURCES
        if file.name == "__init__.py" and CORE in f"{file.as_posix()}"
    }
    outside = {
        file.path.removeprefix(CORE) for file in core() if "/" not in file.path.removeprefix(CORE)
    }
    assert outside == {"__init__.py", *MODULES_IN_NO_FOLDER}
    for folder, file in inits.items():
        if folder.name != CORE.rstrip("/").rpartition("/")[2]:
            text = file.read_text(encoding="utf-8")
            # In characters: how wide lines are does not make an introduction shorter.
            assert len(ast.parse(text).body) == 1 and text.count("\n") >= 3 and len(text) <= 520, (
                file
            )


def layers_of_the_core() -> list[list[str]]:
    """The folders of each line of the contract between folders, from the top."""
    contracts = read_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each["type"] == "layers"]
    return [line.split(" | ") for line in layers]


def wrong_in_introduction(folder: str, text: str) -> list[str]:
    """Files to start at that are not there, and folders to import that are not those of the next
    line of the contract."""
    layers = layers_of_the_core()
    (line,) = [index for index, names in enumerate(layers) if folder.partition("/")[0] in names]
    said = re.search(r"the folders from (.+?) downwards", text)
    below = set(re.findall(r"\w+", said[1])) - {"and"} if said else set()
    sentence = re.search(r"Start (?:reading )?at (.+?)\.(?:\s|$)", text, re.DOTALL)
    assert sentence is not None, folder
    started = re.findall(r"[\w/]+(?:\.py|/)(?!\w)", sentence[1])
    assert started, folder
    return [
        *(name for name in started if not (ROOT / CORE / folder / name).exists()),
        *(name for name in sorted(below) if name not in layers[line + 1]),
    ]


def test_an_introduction_names_files_that_are_there_and_the_folders_below():
    texts = {
        folder: ROOT / CORE / folder / "__init__.py"
        for folder in folders_of(file.path for file in core())
    }
    texts = {folder: file.read_text(encoding="utf-8") for folder, file in texts.items() if folder}
    assert len(texts) > 10 and sum("downwards" in text for text in texts.values()) > 10
    assert {
        folder: wrong
        for folder, text in texts.items()
        if (wrong := wrong_in_introduction(folder, text))
    } == {}
    guilty = "It may import the folders from planner and run downwards. Start reading at gone.py, then attention/."
    assert wrong_in_introduction("nn", guilty) == ["gone.py", "planner", "run"]


def test_no_file_names_a_folder_of_somebodys_machine():
    own = "|".join(
        re.escape(str(folder)) for folder in (ROOT, Path.home()) if len(folder.parts) > 1
    )
    machine = re.compile(
        rf"(?:{own})\b|(?<![\w.~:/])/(?:root|work|home/\w+|Users/\w+)/|[A-Z]:\\+Users\\"
    )
    assert machine.search("see /ho" + "me/somebody/models") and machine.search(
        "C:\\Us" + "ers\\somebody"
    )
    found = []
    for file in text_files():
        text = file.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines() if machine.search(text) else (), start=1):
            if machine.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_helper_modules_next_to_the_tests_have_names_of_their_own():
    folders = [
        ROOT / "tests",
        ROOT / "tools",
        *(ROOT / "tools").glob("*/"),
        *(member.folder / "tests" / "support" for member in MEMBERS),
    ]
    names = Counter(
        file.stem for folder in folders for file in folder.glob("*.py") if file.stem != "conftest"
    )
    helpers = {name: count for name, count in names.items() if not name.startswith("test_")}
    assert "workspace" in helpers
    assert [name for name, count in helpers.items() if count > 1] == []


def test_every_test_is_collected_under_a_strict_name():
    """A test file that pytest does not see passes for ever."""
    for member in MEMBERS:
        for file in (member.folder / "tests").rglob("*.py"):
            defines = re.search(
                r"^def test_|^class Test", file.read_text(encoding="utf-8"), re.MULTILINE
            )
            assert not defines or file.name.startswith("test_"), (
                f"{file.relative_to(ROOT)} holds tests that are not collected"
            )


def suites() -> set[str]:
    """The classes of `ditkit_core/testing` that a family subclasses: `Conformance`, and those that
    are no part of it."""
    trees = [
        ast.parse(file.read_text(encoding="utf-8"))
        for file in (ROOT / CORE / "testing").glob("conformance*.py")
    ]
    classes = {
        node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    }
    parts = {base.id for name in ("Conformance", "CoreChecks") for base in classes[name].bases}
    return {name for name in classes if name.endswith(("Conformance", "Checks"))} - parts


@pytest.mark.parametrize("member", MODELS, ids=lambda member: member.name)
def test_a_family_passes_every_suite_of_the_core(member):
    spec = importlib.import_module(f"{member.package}.cli").FAMILY.spec().architecture
    divides_tokens = any(map(spec.token_streams, spec.presets.values()))
    tests = "".join(
        file.read_text(encoding="utf-8") for file in (member.folder / "tests").rglob("*.py")
    )
    wanted = suites() - (set() if divides_tokens else {"ContextConformance"})
    if re.search(r"\bEverySuite\b", tests):
        passed = {base.__name__ for suite in SUITES.values() for base in suite.checks.__mro__}
        wanted -= {"Conformance", *passed}
        if re.search(r"^    diffusers = \w", tests, re.MULTILINE):
            wanted -= {"PeerChecks"}
    # As the generator wrote it: an author comes to the other suites with the last steps.
    if marks(member.folder):
        pytest.skip(next_step(member.folder))
    lacking = sorted(name for name in wanted if not re.search(rf"\b{name}\b", tests))
    assert not lacking, (
        f"subclass in {member.folder.relative_to(ROOT)}/tests, as the other families do: "
        f"{', '.join(lacking)}"
    )


def test_what_needs_a_gpu_runs_on_a_stand_in_as_well():
    """A body that only a GPU runs may never have run: the fixture `gpu` gives it both, and nothing
    else marks it."""
    marked = [
        file
        for file in text_files()
        if file.suffix == ".py" and "pytest.mark." + "gpu" in file.read_text("utf-8")
    ]
    assert [file.name for file in marked] == ["gpu.py"]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_every_member_carries_the_licence_and_says_that_it_is_typed(member):
    assert (member.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (member.source / "py.typed").is_file()


def test_lines_of_prose_on_pages_have_at_most_120_characters():
    """Tables, code, pictures, what programs write and the marks of figures' sources are as wide as
    they are."""
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/recipes/*.md")]
    pages += [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    pages += [ROOT / folder / "README.md" for folder in ("shared", "shared/tests", "tools", "ui")]
    assert len(pages) > 20
    written = re.compile(
        r"^```.*?^```$|^<!-- .*?: written by .*?^<!-- end of ", re.DOTALL | re.MULTILINE
    )
    for page in pages:
        text = re.sub(r"<!-- from .*? -->", "", written.sub("", page.read_text(encoding="utf-8")))
        lines = [line for line in text.splitlines() if not line.startswith(("|", "![", "[!["))]
        wide = [line for line in lines if len(line) > 120]
        assert wide == [], page
