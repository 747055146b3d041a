"""Writes a model package that works as written, for an author to fill in: installs, trains its
demo, exports, samples, and passes conformance.

    # packages/zed, found by its folder
    uv run tools/new_model.py zed --kind image
    # a project of its own
    uv run tools/new_model.py zed --kind video --standalone ../zed
    # several words: red-fox-train, packages/red_fox, class RedFox
    uv run tools/new_model.py red-fox --kind image

The package has a transformer of two blocks of its own. Each place that an author fills in is marked
with FILL IN and the number of the step; docs/adding_a_model.md explains the steps, and the
package's tests say which is next.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ditkit_core.errors import UserError
from ditkit_core.testing.filled_in import marks

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = Path(__file__).resolve().parent / "new_model"
RENAMED = {Path("README.txt"): Path("README.md"), Path("api.txt"): Path("api.rst")}
"""Files of the template that the site would take for pages of this repository."""
RESERVED = {"core", "test", "tests", "shared", "ditkit"}
PARAMETERS = 144_576
KINDS = {
    "image": {
        "SIZE_AND_RATE": "(1, 1024, 1024)",
        "DATA_SIZE": "height = 64\nwidth = 64",
        "LATENT_FRAMES": "1",
        "SUFFIX": "png",
    },
    "video": {
        "SIZE_AND_RATE": "(81, 480, 832),\n    fps=16.0",
        "DATA_SIZE": "frames = 9\nheight = 64\nwidth = 64",
        "LATENT_FRAMES": "2",
        "SUFFIX": "mp4",
    },
}


def main(arguments: list[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "name",
        help="name of the family, lower case: zed for ditkit-zed and zed-train; words are joined by -",
    )
    parser.add_argument("--kind", choices=sorted(KINDS), required=True, help="what it generates")
    parser.add_argument(
        "--standalone", type=Path, help="write a project of its own into this folder"
    )
    options = parser.parse_args(arguments)
    try:
        folder = write_package(options.name, options.kind, options.standalone)
    except UserError as error:
        print(f"new_model: {error}", file=sys.stderr)
        return 1
    print(f"wrote {folder}")
    install = "uv sync" if options.standalone is None else f"cd {folder} && uv sync"
    print(
        f"next: {install}, then `uv run {options.name.replace('_', '-')}-train --demo`, then `uv "
        f"run pytest {folder}/tests -n 2`"
    )
    print(f"{len(marks(folder))} places are marked with FILL IN: docs/adding_a_model.md")
    return 0


def write_package(name: str, kind: str, standalone: Path | None = None) -> Path:
    """Write a package.

    Args:
        name: Of the family: words joined by `-` or `_`. Commands and the distribution have it with
            `-`, folder and module with `_`.
        kind: `image` or `video`.
        standalone: The folder of a project outside of this repository; None writes into
            `packages/`.

    Returns:
        Its folder.

    Raises:
        UserError: If the name cannot be that of a package, or the folder exists.
    """
    if not re.fullmatch(r"(?=.{2,20}$)[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or name in RESERVED:
        raise UserError(
            f"{name!r} cannot name a family: use two to twenty lower-case letters and digits, such "
            f"as `zed`, or words joined by `-`"
        )
    module = name.replace("-", "_")
    folder = ROOT / "packages" / module if standalone is None else standalone.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists; choose another name or remove it")
    values = KINDS[kind] | {"NUM_PARAMETERS": f"{PARAMETERS:_}"}
    # renamed at the end, so that nothing is half-written
    written = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(written, ignore_errors=True)
    for file in sorted(
        path for path in TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ):
        relative = file.relative_to(TEMPLATE)
        if relative.name.startswith("encoders_"):
            if relative.stem != f"encoders_{kind}":
                continue
            relative = relative.with_name("encoders.py")
        relative = RENAMED.get(relative, relative)
        if relative.parts[0] == "src":
            relative = Path("src", f"ditkit_{module}", *relative.parts[1:])
        target = written / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            filled(file.read_text(encoding="utf-8"), name, values), encoding="utf-8", newline="\n"
        )
    shutil.copy(ROOT / "LICENSE", written / "LICENSE")
    (written / "src" / f"ditkit_{module}" / "py.typed").touch()
    if standalone is not None:
        _stand_alone(folder, written)
    _format(written, name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rmdir()  # empty, as was checked above
    written.replace(folder)
    return folder


def filled(text: str, name: str, values: dict[str, str]) -> str:
    """A file of the template with the family's name and the kind's values in their places."""
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    words = re.split("[-_]", name)
    module = "_".join(words)
    command = "-".join(words)
    title = "".join(word.title() for word in words)
    for theirs, ours in (
        ("ditkit_zed", f"ditkit_{module}"),
        ("ZED", module.upper()),
        ("Zed", title),
        ("zed", command),
    ):
        text = re.sub(
            rf"(?<![A-Za-z]){theirs}(?=[^a-z]|$)" if theirs != "Zed" else r"Zed", ours, text
        )
    return text


def ruff_options(name: str) -> list[str]:
    """The repository's rules, for a package that may be anywhere."""
    return [
        "--config",
        str(ROOT / "pyproject.toml"),
        "--config",
        f"lint.isort.known-first-party=['ditkit_core','ditkit_{name.replace('-', '_')}']",
    ]


def _format(folder: Path, name: str) -> None:
    """Sort imports and wrap lines, which the length of a name decides."""
    for command in (
        ["check", "--no-cache", "--fix", "--quiet"],
        ["format", "--no-cache", "--quiet"],
    ):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, *ruff_options(name), "."],
            cwd=folder,
            check=True,
        )


def _stand_alone(folder: Path, written: Path) -> None:
    """Make a project of a package that is `written` and will be in `folder`: the core is this
    clone's, until one is released."""
    project = written / "pyproject.toml"
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    markers = re.search(r"markers = \[.*?\n\]", settings, re.DOTALL)
    # of a library that has no wheel
    metadata = re.search(r"^# flash-attn.*?(?=^\n|\Z)", settings, re.DOTALL | re.MULTILINE)
    assert markers is not None and metadata is not None
    try:
        core = os.path.relpath(ROOT / "shared", folder)
    except ValueError:  # another drive of Windows
        core = str(ROOT / "shared")
    text = project.read_text(encoding="utf-8") + (
        "\n[dependency-groups]\n"
        'dev = ["ditkit-core[testing]", "pytest-timeout>=2.3", "pytest-xdist>=3.6"]\n\n'
        "[tool.uv.sources]\n# The clone that wrote this package. Remove it once ditkit-core is on "
        "the index that you use.\n"
        f'ditkit-core = {{ path = "{Path(core).as_posix()}", editable = true }}\n\n{metadata[0]}\n[tool.pytest.ini_options]\n'
        'addopts = ["--import-mode=importlib", "--strict-markers", "-m=not slow and not exhaustive and not gpu"]\n'
        f'testpaths = ["tests"]\ntimeout = 300\n{markers[0]}\n'
    )
    project.write_text(text, encoding="utf-8", newline="\n")
    (written / ".gitignore").write_text(
        ".venv/\n__pycache__/\nruns/\ndist/\n", encoding="utf-8", newline="\n"
    )


if __name__ == "__main__":
    sys.exit(main())
