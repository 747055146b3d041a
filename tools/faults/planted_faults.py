"""Small faults, planted one at a time into a copy of the tree: which test finds each.

    uv run tools/faults/planted_faults.py --out faults.jsonl                    # all: an hour of one core
    uv run tools/faults/planted_faults.py --out faults.jsonl --only planner lock     # areas, or words of names
    uv run tools/faults/planted_faults.py --page faults.jsonl > benchmarks/planted_faults.md

A green suite says little until one knows what it would not see. The sixty faults of
`planted_faults.toml` are of kinds that people make: a wrong sign, an index off by one, a key that
is not in an identity, a state that is not saved, a wait that is not made. The default tests run
over each, the likely files first and then all of the area. A fault that none finds asks for a test.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".toml")
CORE, TESTS = "shared/src/ditkit_core/", "shared/tests/"
AREAS: Mapping[str, Sequence[str]] = {
    "engine": ("engine", "training", "testing/test_conformance.py"),
    "training": ("training", "run", "commands/test_train.py", "testing/test_conformance.py"),
    "adapters": ("adapters", "run", "previews", "testing/test_conformance.py"),
    "data": ("data", "encoding", "run", "commands/test_data_in_a_run.py"),
    "planner": ("planner", "run/plans", "commands/test_plan.py", "commands/test_fit.py"),
    "families": (),  # the tests of its package
}
"""What is run where the likely tests find nothing."""
SECONDS = 900
"""Longest run of pytest: a fault may hang."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


class Fault(NamedTuple):
    """A change of one file, and where it should be found."""

    area: str
    name: str
    file: Path
    old: str
    new: str
    tests: Sequence[Path]
    since: date | None
    """When the tests that find it were written, if it was planted before."""

    def planted(self, tree: Path) -> str:
        """The text of its file with the fault; `ValueError` if the tree no longer has the old
        text, once."""
        text = (tree / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {text.count(self.old)} times")
        return text.replace(self.old, self.new)

    def wider(self) -> Sequence[Path]:
        """The tests of its area."""
        if self.area == "families":
            return [Path(*self.file.parts[:2], "tests"), Path(TESTS, "families")]
        return [Path(TESTS, name) for name in AREAS[self.area]]

    def row(self, test: str, where: str, seconds: float) -> dict[str, Any]:
        """What is written of it: the test that found it, and where that is; empty for none."""
        row = {"area": self.area, "name": self.name, "file": str(self.file), "found": test}
        return row | {"where": where, "cpu_seconds": round(seconds)}


def _from_root(path: str, folder: str) -> Path:
    return Path(path if path.startswith(("packages/", "tests/")) else folder + path)


def faults() -> Iterator[Fault]:
    """The faults of the table."""
    for area, rows in tomllib.loads(TABLE.read_text(encoding="utf-8")).items():
        for row in rows:
            tests = [_from_root(path, TESTS) for path in row["tests"]]
            file = _from_root(row["file"], CORE)
            yield Fault(area, row["name"], file, row["old"], row["new"], tests, row.get("since"))


def copy_tree(folder: Path) -> None:
    """Copy what git knows of the work tree, files that are not yet added included."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def preload() -> None:
    """Import what most tests import, so that each run begins as a fork that has it. Nothing of the
    tree: a fault may be in it."""
    # as conftest.py sets them, before torch starts
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    for name in ("torch", "peft", "transformers"):
        importlib.import_module(name)


def first_failure(tree: Path, tests: Sequence[Path | str]) -> str:
    """The first of these tests that fails in a tree, or how pytest ended; empty if all pass."""
    output = tree / "pytest.txt"
    process = multiprocessing.get_context("fork").Process(
        target=_run_tests, args=(tree, output, [str(test) for test in tests])
    )
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
        return f"no end within {SECONDS} s"
    if process.exitcode in (0, 5):  # 5: nothing is left to run
        return ""
    text = output.read_text(encoding="utf-8", errors="replace")
    if failed := _FAILED.search(text):
        return failed[1]
    raise RuntimeError(f"pytest ended with {process.exitcode}:\n{text[-3000:]}")


def _run_tests(tree: Path, output: Path, tests: Sequence[str]) -> None:
    """Run pytest in this process, a fork, with the tree's sources in front of the installed
    ones."""
    os.setpgid(0, 0)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sources = [tree / "shared" / "src", *sorted(tree.glob("packages/*/src")), tree / "ui" / "src"]
    sys.path[:0] = map(str, sources)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, sources))
    import pytest

    # plugins of libraries that `preload` has imported
    harmless = "-Wignore::pytest.PytestAssertRewriteWarning"
    code = pytest.main(["-x", "-q", "-n0", "-pno:cacheprovider", harmless, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def look_for(fault: Fault, tree: Path, tests: Sequence[Path]) -> tuple[str, float]:
    """Plant a fault into a tree, run tests, and take it out. Returns the test that found it, and
    seconds of processor time."""
    file, before = tree / fault.file, _processor_seconds()
    sound = file.read_text(encoding="utf-8")
    file.write_text(fault.planted(tree), encoding="utf-8")
    try:
        return first_failure(tree, tests), _processor_seconds() - before
    finally:
        file.write_text(sound, encoding="utf-8")


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def found(chosen: Sequence[Fault], tree: Path) -> Iterator[dict[str, Any]]:
    """A row for each fault: first those that the likely tests find."""
    missed: list[tuple[Fault, float]] = []
    for fault in chosen:
        test, seconds = look_for(fault, tree, fault.tests)
        if test:
            yield fault.row(test, "likely tests", seconds)
        else:
            print(f"not found by the likely tests: {fault.area}, {fault.name}", file=sys.stderr)
            missed.append((fault, seconds))
    for fault, before in missed:
        test, seconds = look_for(fault, tree, [t for t in fault.wider() if t not in fault.tests])
        yield fault.row(test, "area" if test else "", before + seconds)


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of what was found; a fault that was tried again has its last row."""
    last = {row["name"]: row for row in rows}
    tried = [fault for fault in faults() if fault.name in last]
    newest = rows[-1]
    first = sum(fault.since is None for fault in tried)
    lines = [
        "# Planted faults",
        "",
        "`uv run tools/faults/planted_faults.py` plants small faults, one at a time, into a copy of the",
        f"tree ({len(tried)} of them, at commit {newest['commit']} on {newest['date']}). Default tests run over each: the",
        f"likely files, then all of the area. {first} are found by tests that were there; for those marked * one was",
        "written, which fails with the fault alone.",
        "",
        "| area | fault | file | found by | CPU s |",
        "|---|---|---|---|---:|",
    ]
    for fault in tried:
        row = last[fault.name]
        found = f"`{row['found'].removeprefix(TESTS)}`" if row["found"] else "nothing"
        name = fault.name + " *" * (fault.since is not None)
        file = row["file"].removeprefix(CORE)
        cells = (fault.area, name, f"`{file}`", found, str(row["cpu_seconds"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file to which each result is added")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="areas, or words of names")
    parser.add_argument("--page", type=Path, metavar="FILE", help="print the page of results")
    options = parser.parse_args()
    if options.page:
        lines = options.page.read_text(encoding="utf-8").splitlines()
        print(page([json.loads(line) for line in lines]), end="")
        return
    head = ("git", "rev-parse", "--short=8", "HEAD")
    commit = subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree, finders = Path(folder), list[str]()
        copy_tree(tree)
        preload()
        only = set(options.only or ())
        chosen = [f for f in faults() if not only or only & {f.area, f.name, *f.name.split()}]
        if not chosen:
            parser.error(f"no area and no word of a fault's name is {' or '.join(sorted(only))}")
        for row in found(chosen, tree):
            row |= {"commit": commit.strip(), "date": datetime.now(UTC).date().isoformat()}
            finders.append(row["found"])
            print(json.dumps(row), flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
        finders = [test for test in finders if "::" in test]
        if finders and (wrong := first_failure(tree, finders)):
            sys.exit(f"{wrong} fails without a fault: what it found does not count")


if __name__ == "__main__":
    main()
