"""The tables of the pages in docs/.

    # print them all
    uv run tools/docs/doc_tables.py
    # print one
    uv run tools/docs/doc_tables.py --only audit-wan
    # put them between the markers of the pages (30 minutes on a quiet machine)
    uv run tools/docs/doc_tables.py --write
    uv run tools/docs/doc_tables.py --write --only places
    # compare the pages with the code: takes seconds, measures nothing
    uv run tools/docs/doc_tables.py --check

Some tables are read off the code, some are planned (fake tensors: no weights, no GPU), some
measured on this machine's CPU. A line below those says when and on what. Each is written as soon as
it is made, and one that fails leaves the page as it is.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ditkit_core.errors import UserError
from doc_data import control_columns, metadata_columns
from doc_models import SPECS, models
from doc_planned import budgets, kept
from doc_precision import NAMES, audited, backends, places, presets, references
from doc_programs import programs
from doc_ranks import scaled
from doc_recipes import recipes
from marked import Markers, between, replaced

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "tools" / "bench"
PROGRAMS = Path(sys.executable).parent
CHECKPOINTING, PRECISION, DATA, RANKS = (
    ROOT / "docs" / f"{name}.md" for name in ("checkpointing", "precision", "data", "ranks")
)
WAN_PAGE = ROOT / "packages" / "wan" / "README.md"
EXPORT = ROOT / "docs" / "export.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
RECIPES = ROOT / "docs" / "recipes" / "README.md"
AUDITS = ROOT / "benchmarks" / "precision_cpu.md"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a page."""

    name: str
    page: Path
    make: Callable[[], Iterator[str]]
    """Its lines."""
    kind: str
    """`read` off the code, `planned`, or `measured`."""

    @property
    def markers(self) -> Markers:
        """The lines around it."""
        return (
            f"<!-- {self.name}: written by tools/docs/doc_tables.py -->",
            f"<!-- end of {self.name} -->",
        )

    @property
    def is_cheap(self) -> bool:
        """Whether it is compared with the code on every test run."""
        return self.kind == "read"


def printed(script: str, *arguments: str) -> Iterator[str]:
    """The output of a benchmark, with its table after the other lines.

    Raises:
        UserError: If it fails; the message has its last line.
    """
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise UserError(
            f"{script} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
        )
    lines = done.stdout.strip().splitlines()
    yield " ".join(line for line in lines if not line.startswith("|"))
    yield ""
    yield from (line for line in lines if line.startswith("|"))


def audit_of_the_demo(program: str) -> Iterator[str]:
    """`--demo --audit-precision` of a command, in a temporary folder.

    Raises:
        UserError: If it fails; the message has its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(PROGRAMS / program),
            "--demo",
            "--audit-precision",
            "--json",
            "--run.folder",
            "demo",
        ]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, encoding="utf-8", check=False
        )
    if done.returncode:
        raise UserError(
            f"{program} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
        )
    yield from audited(done.stdout)


TABLES = (
    Table(name="models", page=CONFIGURATION, kind="read", make=models),
    Table(name="backends", page=CHECKPOINTING, kind="read", make=backends),
    Table(name="places", page=PRECISION, kind="read", make=places),
    Table(name="references", page=AUDITS, kind="read", make=references),
    Table(name="metadata-columns", page=DATA, kind="read", make=metadata_columns),
    Table(name="control-columns", page=WAN_PAGE, kind="read", make=control_columns),
    Table(name="programs", page=EXPORT, kind="read", make=partial(programs, SPECS, NAMES)),
    Table(name="kept-wan", page=CHECKPOINTING, kind="planned", make=lambda: kept("wan")),
    Table(name="kept-flux2", page=CHECKPOINTING, kind="planned", make=lambda: kept("flux2")),
    Table(name="ranks", page=RANKS, kind="planned", make=scaled),
    Table(name="recipes", page=RECIPES, kind="planned", make=recipes),
    Table(name="budgets", page=CHECKPOINTING, kind="planned", make=budgets),
    Table(name="presets", page=PRECISION, kind="measured", make=presets),
    Table(name="audit-wan", page=AUDITS, kind="measured",
    make=lambda: audit_of_the_demo("wan-train")),
    Table(name="audit-flux2", page=AUDITS, kind="measured",
    make=lambda: audit_of_the_demo("flux2-train")),
    Table(name="rounding", page=PRECISION, kind="measured",
    make=lambda: printed("bench_rounding.py")),
)  # fmt: skip


def section(table: Table) -> str:
    """The text between a table's markers."""
    lines = ["", *table.make(), ""]
    if table.kind != "read":
        lines += [stamp(table), ""]
    return "\n".join(lines)


def stamp(table: Table) -> str:
    """When, how, and on what."""
    today, version = datetime.date.today().isoformat(), torch.__version__.partition("+")[0]
    words = (
        f"`uv run tools/docs/doc_tables.py --write --only {table.name}`, torch {version}, {today}"
    )
    if table.kind == "planned":
        return f"Planned, not measured: {words}."
    return f"Measured: {words}; {processor()}, one thread of {os.cpu_count() or 1} cores."


def processor() -> str:
    """The name of the machine's processor."""
    names = Path("/proc/cpuinfo")
    found = names.read_text(encoding="utf-8").splitlines() if names.is_file() else []
    return next(
        (line.partition(": ")[2] for line in found if line.startswith("model name")),
        platform.processor(),
    )


def stale(table: Table) -> bool:
    """Whether its page differs from the code."""
    return (
        between(table.page.read_text(encoding="utf-8"), table.markers, table.page.name)
        != f"\n{section(table)}\n"
    )


def main() -> int:
    """Print, write or check the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", choices=[table.name for table in TABLES], help="this table alone")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--write", action="store_true", help="put them between the markers of the pages"
    )
    mode.add_argument(
        "--check",
        action="store_true",
        help="compare those that are read off the code; exits with 1 if one differs",
    )
    args = parser.parse_args()
    chosen = [table for table in TABLES if args.only in (None, table.name)]
    if args.check:
        old = [table.name for table in chosen if table.is_cheap and stale(table)]
        print(
            f"not as the code has it today: {', '.join(old)}" if old else "as the code has it today"
        )
        return int(bool(old))
    failed = 0
    for table in chosen:
        try:
            made = section(table)
            if args.write:
                text = table.page.read_text(encoding="utf-8")
                table.page.write_text(
                    replaced(text, table.markers, made, table.page.name), encoding="utf-8"
                )
        except UserError as error:
            print(f"{table.name}: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        print(
            f"{table.name}: written to {table.page.relative_to(ROOT)}" if args.write else made,
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
