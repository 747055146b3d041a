"""The site of the documentation: every page of the repository, and references that are read off the
code.

    # the pages are then in dist/docs; index.html is the first
    uv run sphinx-build -W --keep-going -n -c docs . dist/docs

The sources are the repository itself, so the links between pages are those that work on GitHub.
docs/README.md has the order of the pages.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ditkit_core.commands.cli import ABOUT
from ditkit_core.commands.options import OPTIONS
from ditkit_core.config.cli_args import CommonOptions
from ditkit_core.config.schema import ConfigField, config_fields, config_sections, field_docs, plain
from ditkit_core.config.validation import expected
from ditkit_core.run.config import RunConfig

ROOT = Path(__file__).parents[1]

project = "ditkit"
html_title = "ditkit"
html_theme = "furo"
html_show_copyright = False
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
smartquotes_action = "qe"  # quotes and ellipses; two hyphens begin an option
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/**",
    "benchmarks/*.md",
    "packages/*/README.md",
    "packages/*/api.rst",
    "shared/README.md",
    "ui/README.md",
    "shared/tests/README.md",
    "tools/README.md",
]
exclude_patterns = [".*", "**/__pycache__", "dist", "runs"]
myst_heading_anchors = 4
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
nitpick_ignore_regex = [
    (r"py:.*", r"(?!ditkit_).*"),  # names of other libraries, whose indexes are on the network
    # private names, and variables of types
    (
        r"py:.*",
        r".*\.(_\w+|Content|Item|Matrices|Measurement|Module|Number|Prepared|Section|T|Taken|Tree|Value)",
    ),
]

# `bytes` in an annotation is the type, and not one of the attributes with this name
suppress_warnings = ["ref.python"]

_COLON = "\N{MODIFIER LETTER COLON}"
RESUME = {
    "free": "It may change when a run continues",
    "stated": "It may change when a run continues, which then says so",
    "refused": "It cannot change within a run",
}


class Modules(SphinxDirective):
    """The documented parts of modules, and of packages' modules: `.. modules:: ditkit_core.config
    ditkit_core.errors`."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """A section for each module."""
        return self.parse_text_to_nodes("\n".join(self._sections()), allow_section_headings=True)

    def _sections(self) -> Iterator[str]:
        for name in self.arguments[0].split():
            file = Path(import_module(name).__file__ or "")
            if file.name != "__init__.py":
                yield from _section(name)
                continue
            for module in sorted(file.parent.rglob("*.py")):
                below = module.relative_to(file.parent).with_suffix("").parts
                if not any(part.startswith("_") for part in below):
                    yield from _section(".".join((name, *below)))


def _section(name: str) -> Iterator[str]:
    yield from ("", name, "-" * len(name), "", f".. automodule:: {name}", "")


class Settings(SphinxDirective):
    """Every key of run files."""

    def run(self) -> list[nodes.Node]:
        """A section for each section of a run file."""
        return self.parse_text_to_nodes("\n".join(self._lines()), allow_section_headings=True)

    def _lines(self) -> Iterator[str]:
        known = config_fields(RunConfig)
        for section, kind in config_sections(RunConfig).items():
            title = f"[{section}]"
            yield from (
                "",
                title,
                "-" * len(title),
                "",
                _code(" ".join((kind.__doc__ or "").split())),
                "",
            )
            for key, field in known.items():
                if key.startswith(f"{section}."):
                    yield from (
                        f"``{key}``",
                        f"    {_code(field.doc)}",
                        "",
                        f"    {_accepted(field)}",
                        "",
                    )


class Options(SphinxDirective):
    """The options of a command: `.. options:: train`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """What it does, and a list of its options."""
        return self.parse_text_to_nodes("\n".join(self._lines()), allow_section_headings=True)

    def _lines(self) -> Iterator[str]:
        (command,) = self.arguments
        kind: type = CommonOptions if command == "all" else OPTIONS[command]
        yield from (ABOUT.get(command, "").format(prog=f"wan-{command}"), "")
        hints, docs = get_type_hints(kind), field_docs(kind)
        for field in fields(kind):
            value = "" if hints[field.name] is bool else " VALUE"
            yield from (
                f"``--{field.name.replace('_', '-')}{value}``",
                f"    {_code(docs[field.name])}",
                "",
            )


def _accepted(field: ConfigField) -> str:
    default = (
        ""
        if field.default is None
        else f"; default ``{json.dumps(plain(field.default), ensure_ascii=False)}``"
    )
    return f"Takes {expected(field.type)}{default}. {RESUME[field.resume]}."


def _code(text: str) -> str:
    """A docstring's Markdown code as that of reStructuredText."""
    return re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``\\ ", text)


def _convert(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    text = re.sub(r"(?:^ *\|.*\n?)+", _table, _code("\n".join(lines)), flags=re.MULTILINE)
    first, *rest = text.split("\n")
    # Napoleon takes `count: of what` under an attribute for a type and a description.
    lines[:] = [
        first.replace(":", _COLON) if what in ("attribute", "data", "property") else first,
        *rest,
    ]


def _restore(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def _table(found: re.Match[str]) -> str:
    """A table of Markdown as one of reStructuredText."""
    rows = [[cell.strip() for cell in row.strip(" |").split("|")] for row in found[0].splitlines()]
    made = ["", ".. list-table::", "   :header-rows: 1", ""]
    for head, *cells in rows[:1] + rows[2:]:
        made += [f"   * - {head}", *(f"     - {cell}" for cell in cells)]
    return "\n".join([*made, "", ""])


def _add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """The first page lists all others, by the headings and links of docs/README.md."""
    if name != root_doc:
        return
    contents = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for part in ("Overview\n[](README.md)", *contents.split("\n## ")[1:]):
        caption, _, text = part.partition("\n")
        pages = (re.sub(r"\.(md|rst)$", "", path) for path in re.findall(r"\]\(([^)#]+)\)", text))
        names = [(ROOT / "docs" / page).resolve().relative_to(ROOT).as_posix() for page in pages]
        if caption == "Models":  # a new package is listed nowhere
            files = [
                file
                for pattern in ("README.md", "api.rst")
                for file in sorted(ROOT.glob(f"packages/*/{pattern}"))
            ]
            names = list(
                dict.fromkeys(
                    [*names, *(file.relative_to(ROOT).with_suffix("").as_posix() for file in files)]
                )
            )
        source[0] += "\n".join(
            ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""]
        )


def _begin_at_the_readme(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_directive("modules", Modules)
    app.add_directive("settings", Settings)
    app.add_directive("options", Options)
    app.connect("source-read", _add_contents)
    app.connect("autodoc-process-docstring", _convert, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _restore, priority=600)
    app.connect("build-finished", _begin_at_the_readme)
