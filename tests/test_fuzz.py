"""Hostile input in fourteen kinds, a part of what `tools/faults/fuzz.py` tries: success or one
line, nothing that hangs or takes all memory."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import fuzz
from ditkit_core.errors import UserError
from fuzz import line, outcome_of, run_kind
from fuzz_models import ALL_KINDS
from workspace import ROOT

SLOWER = ("runs", "encoders", "models", "pictures")


def test_fourteen_kinds_are_tried() -> None:
    assert len(ALL_KINDS) == 14 and set(SLOWER) < set(ALL_KINDS)


class Faulty:
    """A kind whose cases have every fault."""

    def prepare(self, folder: Path) -> None:
        pass

    def use(self, draw: random.Random, folder: Path) -> None:
        assert not any(folder.iterdir())
        (folder / "x").write_text("left for the next case to find")
        fault = next(FAULT)
        if fault == "traceback":
            raise KeyError("x")
        if fault == "memory":
            bytearray(2**62)
        if fault == "no clear line":
            error = UserError("a")
            error.args = ("a\nb",)
            raise error
        if fault == "refused":
            raise UserError("no; fetch it again")


FAULT = iter(("traceback", "memory", "no clear line", "refused", "used"))


def test_a_fault_is_seen_as_what_it_is(tmp_path: Path) -> None:
    found = [outcome_of(Faulty(), "faulty", seed, tmp_path)[0] for seed in range(5)]
    assert found == ["traceback", "memory", "no clear line", "refused", "used"]


FIRST = [random.Random(f"endless {seed}").random() for seed in range(4)]


class Endless(Faulty):
    """A kind whose second case ends its process, and whose third does not end."""

    def use(self, draw: random.Random, folder: Path) -> None:
        case = FIRST.index(draw.random())
        if case == 1:
            os._exit(3)
        while case == 2:
            pass


def test_a_child_that_hangs_or_ends_costs_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "ALL_KINDS", {"endless": Endless})
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    row = run_kind("endless", range(4))
    assert row.outcomes == {"used": 2, "traceback": 1, "hang": 1} and row.cases == 4
    assert [fault.split(":")[:2] for fault in row.faults] == [["endless", "1"], ["endless", "2"]]
    assert "| endless | 4 | 2 | 0 | 1 | 1 | 0 | 0 |" in line("endless", row)


@pytest.mark.timeout(1500)  # of a machine that does much else
@pytest.mark.parametrize(
    "cases",
    [pytest.param(25, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(
    "kinds",
    [SLOWER, tuple(kind for kind in ALL_KINDS if kind not in SLOWER)],
    ids=["slower", "quicker"],
)
def test_nothing_hostile_gets_more_than_a_line(kinds: tuple[str, ...], cases: int) -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "faults" / "fuzz.py"),
        "--cases",
        str(cases),
        "--kind",
        *kinds,
    ]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert all(f"| {kind} | {cases} |" in ended.stdout for kind in kinds), ended.stdout
