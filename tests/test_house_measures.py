"""What tools/house_measures.py counts, on small texts."""

import shutil
import subprocess

import pytest

from house_measures import (
    CORE,
    File,
    Shape,
    Tree,
    cycles,
    defined_twice,
    folders_of,
    import_graph,
    layers_of,
    measured,
    running_up,
    single_importers,
    sizes,
    tree_at,
    walk,
    working_tree,
)


def files(texts):
    return [File.parse(f"{CORE}{path}", text) for path, text in texts.items()]


def graph(texts):
    return import_graph(files(texts))


def test_parameters_are_those_that_a_caller_gives():
    (file,) = files(
        {"a.py": "class A:\n def f(self, a, /, b, *c, d=1, **e): ...\nasync def g(b, cls): ...\n"}
    )
    assert sorted((function.name, function.parameters) for function in file.functions) == [
        ("f", 3),
        ("g", 2),
    ]


def test_a_function_is_as_long_as_from_its_def_to_its_last_line():
    (file,) = files(
        {
            "a.py": "@cache\ndef f():\n    def g():\n        'Said.'\n        return (\n            1\n        )\n"
        }
    )
    found = {function.name: (function.lines, function.documented) for function in file.functions}
    assert found == {"f": (6, False), "g": (5, True)}


def test_the_row_of_sizes_has_every_count():
    text = (
        '"""One.\n\nThree."""\n# alone\n@dataclass\nclass A:\n    x: int\n    """Of A."""\n\n\n'
        f"class B: ...\n\n\ndef f(model: Any) -> None:\n    {'y' * 97} = 1\n    return 'y'\n"
    )
    cells = sizes(files({"a.py": text, "b.py": "x = 1\n", "c.py": ""}))
    assert cells == ["3", "17", "30", "5.9%", "1", "2.0; 100%", "0", "0", "1; 1", "0%"]


def test_a_walk_follows_names_into_other_files_and_back():
    texts = {
        "a.py": "from ditkit_core.b import Thing, g\nfrom ditkit_core import c\ndef f(x):\n"
        "    g(); x.unknown(); return Thing(c.h)\ndef other(): ...\n",
        "b.py": "from ditkit_core.io import print\ndef g(): print()\nclass Thing:\n"
        "    def __init__(self): self.more()\n    def more(self): ...\n    def less(self): ...\n",
        "c.py": "from ditkit_core.a import f\ndef h(): return f\n",
        "io.py": "def print(): ...\n",
    }
    # f, g, __init__, more, h
    assert walk(files(texts), "a: f") == (5, 3)
    assert walk(files(texts), "a: other") == (1, 1)
    assert walk(files(texts), "a: gone") == walk(files(texts), "gone: f") == (0, 0)


def test_public_names_of_two_modules_are_found_and_methods_are_not():
    texts = {
        "a.py": "class Entry:\n def read(self): ...\ndef read(): ...\ndef _own(): ...\n",
        "b/c.py": "def read(): ...\ndef _own(): ...\nif True:\n def Entry(): ...\n",
        "d.py": "@overload\ndef once(x): ...\ndef once(x): ...\n",
    }
    assert defined_twice(files(texts)) == {"read": ["ditkit_core.a", "ditkit_core.b.c"]}


def test_imports_are_found_in_every_spelling_and_place():
    texts = {
        "__init__.py": "",
        "a.py": "import ditkit_core.b.c, os\nimport ditkit_core\n",
        "b/__init__.py": "from . import c\n",
        "b/c.py": "from ditkit_core import a\nfrom ditkit_core.b import THING\n",
        "b/d.py": "def late():\n    from .c import f\n    from .. import a\n    from ..a import g\n",
    }
    assert graph(texts) == {
        "ditkit_core": set(),
        "ditkit_core.a": {"ditkit_core.b.c"},
        "ditkit_core.b": {"ditkit_core.b.c"},
        "ditkit_core.b.c": {"ditkit_core.a", "ditkit_core.b"},
        "ditkit_core.b.d": {"ditkit_core.b.c", "ditkit_core.a"},
    }


def test_cycles_are_groups_of_modules_and_a_late_import_closes_one():
    texts = {
        "a.py": "from ditkit_core.b import x\n",
        "b.py": "from ditkit_core.c import x\n",
        "c.py": "def late():\n    from ditkit_core.a import x\n",
        "d.py": "from ditkit_core.a import x\nfrom ditkit_core.e import x\n",
        "e.py": "from ditkit_core.d import x\n",
    }
    assert cycles(graph(texts)) == [
        ["ditkit_core.a", "ditkit_core.b", "ditkit_core.c"],
        ["ditkit_core.d", "ditkit_core.e"],
    ]
    assert cycles(graph({**texts, "c.py": "", "e.py": ""})) == []


PYPROJECT = """
[[tool.importlinter.contracts]]
type = "forbidden"
[[tool.importlinter.contracts]]
type = "layers"
containers = ["ditkit_core.data"]
layers = ["x"]
[[tool.importlinter.contracts]]
type = "layers"
containers = ["ditkit_core"]
layers = ["commands", "(data) | nn", "errors"]
"""


@pytest.mark.parametrize("inside", [".py", "/inner/file.py"], ids=["flat", "folders"])
def test_imports_that_run_up_are_named(inside):
    module = inside.removesuffix(".py").replace("/", ".")
    texts = {
        f"commands{inside}": f"from ditkit_core.data{module} import x\nfrom ditkit_core import errors\n",
        f"data{inside}": f"def f():\n    from ditkit_core.nn{module} import x\n",
        f"nn{inside}": "from ditkit_core.errors import x\n",
        "errors.py": f"from ditkit_core.commands{module} import x\n",
    }
    layers = layers_of(PYPROJECT)
    assert layers == [["commands"], ["data", "nn"], ["errors"]]
    assert running_up(graph(texts), layers) == [
        f"ditkit_core.data{module} -> ditkit_core.nn{module}",
        f"ditkit_core.errors -> ditkit_core.commands{module}",
    ]
    own = {
        **texts,
        f"data{inside}": "",
        "data/other.py": f"from ditkit_core.data{module} import x\n",
        "errors.py": "",
    }
    assert running_up(graph(own), layers) == []


def test_files_are_counted_by_the_folder_that_they_are_in():
    paths = ["__init__.py", "errors.py", "data/__init__.py", "data/scan.py", "data/media/video.py"]
    assert folders_of(CORE + path for path in paths) == {"": 2, "data": 2, "data/media": 1}
    texts = {CORE + path: "" for path in paths}
    texts |= {
        "packages/wan/src/ditkit_wan/spec.py": "from ditkit_core.data.scan import x\n",
        "README.md": "a\nb\n",
    }
    tree = Tree("now", {**texts, "pyproject.toml": PYPROJECT})
    numbers = ["1", "2", "1", "3", "0", "0", "0", "1", "0", "1", "2"]
    assert Shape.of(tree, tree.groups()).cells() == [*numbers, *["0 in 0"] * 3]


def test_a_module_with_one_importer_is_counted():
    texts = {
        "a.py": "",
        "b.py": "import ditkit_core.a\n",
        "c.py": "import ditkit_core.a, ditkit_core.b\n",
    }
    assert single_importers(graph(texts)) == 1


@pytest.mark.skipif(shutil.which("git") is None, reason="reads revisions with git")
def test_a_revision_is_measured_next_to_the_working_tree(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    def core(text):
        file = tmp_path / CORE / "a.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    core("x = 1\n")
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=n@localhost", "commit", "-qm", "first")
    core("x = 1\ny = 2\n")
    (tmp_path / CORE / "testing").mkdir()
    (tmp_path / CORE / "testing" / "b.py").write_text("def f(a, b, c, d, e, f, g, h, i): ...\n")
    lines = list(measured([tree_at(tmp_path, "HEAD"), working_tree(tmp_path)]))
    rows = [
        [cell.strip() for cell in line.split("|")[1:5]]
        for line in lines
        if line.startswith("| core")
    ]
    assert rows == [
        ["core", "HEAD", "1", "1"],
        ["core", "working tree", "1", "2"],
        ["core testing", "HEAD", "0", "0"],
        ["core testing", "working tree", "1", "1"],
    ]
    over = [line for line in lines if line.startswith("- over 8 parameters")]
    assert over == ["- over 8 parameters: none", f"- over 8 parameters: 9 `{CORE}testing/b.py: f`"]
