"""Where the tests' processor time goes:

    uv run tools/bench/tests_cpu.py > benchmarks/tests_cpu.md

Runs pytest with itself as a plugin, and prints a page: seconds of processor time by phase, by
folder and by file. Children that ended count with the test that waited for them. Everything after
`--` goes to pytest: `uv run tools/bench/tests_cpu.py -- packages/wan -n 1`.
"""

import argparse
import collections
import csv
import datetime
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROWS = "DITKIT_TESTS_CPU"
"""The variable that names the folder into which each process of pytest writes its rows."""

PHASES = {
    "imports": "start of a process: pytest, plugins, conftest",
    "collection": "imports of test modules, and the list of cases",
    "setup": "worlds that fixtures build",
    "call": "the tests",
    "teardown": "what fixtures remove",
    "reports": "pytest's and xdist's own: scheduling and reports",
}


class Row(NamedTuple):
    """Processor time of one phase of one test, or of a process (`test` is then empty)."""

    phase: str
    test: str
    seconds: float


def processor_time() -> float:
    """Returns seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Clock:
    """The plugin: a row for each phase of this process, written to `path` at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []

    def timed(self, phase: str, test: str = "") -> Generator[None, object, object]:
        start = processor_time()
        result = yield
        self.rows.append(Row(phase, test, processor_time() - start))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        self.rows.append(Row("imports", "", processor_time()))
        return (yield from self.timed("collection"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.timed("setup", item.nodeid))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.timed("call", item.nodeid))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.timed("teardown", item.nodeid))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        total = processor_time()
        if session.config.getoption("numprocesses", None):
            # The processes of xdist are children of this one, and count for themselves.
            usage = resource.getrusage(resource.RUSAGE_SELF)
            total = usage.ru_utime + usage.ru_stime
        self.rows.append(Row("reports", "", total - sum(row.seconds for row in self.rows)))
        with self.path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t").writerows(self.rows)


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get(ROWS)
    if folder:
        process = os.environ.get("PYTEST_XDIST_WORKER", "main")
        config.pluginmanager.register(Clock(Path(folder, f"{process}.tsv")), "ditkit-tests-cpu")


def read(folder: Path) -> list[Row]:
    """Returns the rows of all processes."""
    rows = []
    for path in sorted(folder.glob("*.tsv")):
        with path.open(newline="") as file:
            rows += [Row(row[0], row[1], float(row[2])) for row in csv.reader(file, delimiter="\t")]
    return rows


def table(title: str, rows: Iterable[Row], key: Callable[[Row], str], most: int) -> Iterable[str]:
    """Yields a table of seconds and cases by `key`, the largest first."""
    seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    cases: collections.Counter[str] = collections.Counter()
    for row in rows:
        seconds[key(row)] += row.seconds
        cases[key(row)] += row.phase == "call"
    yield from ("", f"| {title} | CPU-s | cases |", "|---|---:|---:|")
    for name, value in sorted(seconds.items(), key=lambda item: -item[1])[:most]:
        yield f"| {name} | {value:.1f} | {cases[name] or ''} |"


def folder_of(row: Row) -> str:
    parts = row.test.partition("::")[0].split("/")
    return f"`{'/'.join(parts[: 3 if parts[0] == 'shared' else 2])}`"


def page(rows: Sequence[Row], arguments: Sequence[str]) -> Iterable[str]:
    """Yields the lines of the page."""
    tests = [row for row in rows if row.test]
    command = " ".join(["uv run pytest", *arguments])
    yield from ("# Processor time of the tests", "")
    seconds, cases = sum(row.seconds for row in rows), sum(row.phase == "call" for row in rows)
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    yield f"`{command}` on {datetime.date.today()}, {machine}:"
    yield f"**{seconds:.0f} CPU-s**, {cases} cases."
    yield "Written by `uv run tools/bench/tests_cpu.py`."
    yield from table("phase", rows, lambda row: f"{row.phase}: {PHASES[row.phase]}", len(PHASES))
    yield from table("folder", tests, folder_of, 60)
    yield from table("file", tests, lambda row: f"`{row.test.partition('::')[0]}`", 25)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of pytest")
    arguments = parser.parse_args().arguments
    here = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {ROWS: folder, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "pytest", "-q", "-p", here.stem, *arguments]
        root = here.parents[2]
        done = subprocess.run(command, check=False, env=environment, cwd=root, stdout=sys.stderr)
        print(*page(read(Path(folder)), arguments), sep="\n")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
