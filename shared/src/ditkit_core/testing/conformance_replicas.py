"""Checks of a model that several ranks train as replicas: their number changes no bit of an
adapter's training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from ditkit_core.testing import replicas
from ditkit_core.testing.ranks import once
from ditkit_core.testing.replicas import CASES, STEPS
from ditkit_core.testing.scripts import run_script
from ditkit_core.testing.suite_process import ProcessChecks


class ReplicaConformance(ProcessChecks):
    """Inherit next to the class with tiny items."""

    trains: ClassVar[Sequence[str]] = ("lora with dropout", "full")
    """Names of `CASES`."""
    worlds: ClassVar[Sequence[int]] = (1, 2)
    continued: ClassVar[Sequence[tuple[int, int]]] = ()
    """What `ContinuedReplicas` has."""

    @pytest.fixture
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder that the script writes; it runs once for all cases."""
        return run_once(tmp_path_factory.getbasetemp(), self)

    @classmethod
    def work(cls) -> None:
        """The cases in every world."""
        items = cls().items(4, ragged=True)
        replicas.main(
            cls.spec, cls.arch, items, worlds=cls.worlds, continued=cls.continued, cases=cls.trains
        )

    def test_any_number_of_ranks_trains_the_same_bits(self, folder: Path) -> None:
        """The index of a save has the digests of weights, optimizer, average and metrics, and the
        validation losses."""
        ranks = json.loads((folder / "ranks.json").read_text())
        for num in self.worlds:
            names = [name for name in ranks[str(num)][0] if CASES[name].trained != "full"]
            assert names
            for name in names:
                assert index_of(folder / f"{name} on {num}") == index_of(folder / f"{name} on 1"), (
                    name,
                    num,
                )
                for rank in ranks[str(num)]:
                    assert rank[name] | {"exchanges": 0} == ranks["1"][0][name], (name, num)

    def test_a_full_fine_tune_differs_by_the_order_of_sums_alone(self, folder: Path) -> None:
        """Losses and norms of six steps. A gradient that is zero but for rounding moves its weight
        by a whole AdamW step, so weights say less."""
        ranks = json.loads((folder / "ranks.json").read_text())
        expected = losses(folder / "full on 1")
        assert len(expected) == STEPS
        for num in self.worlds[1:]:
            assert len({rank["full"]["weights"] for rank in ranks[str(num)]}) == 1, (
                "ranks differ from each other"
            )
            actual = losses(folder / f"full on {num}")
            assert actual[0][0] == expected[0][0], "the first loss is of the same weights"
            for step, (one, other) in enumerate(zip(expected, actual, strict=True)):
                assert other == pytest.approx(one, rel=1e-4), (num, step)


class ContinuedReplicas(ReplicaConformance):
    """Also runs that go on with another number of ranks: data, generators and saves, which are the
    core's. A family runs them nightly."""

    worlds: ClassVar[Sequence[int]] = (1, 3)
    continued: ClassVar[Sequence[tuple[int, int]]] = ((3, 1),)

    def test_a_run_goes_on_with_another_number_of_ranks(self, folder: Path) -> None:
        """The save of a run that changed its number of ranks is the same as of a run that never
        did."""
        for pair in self.continued:
            self.check_continued(folder, *pair)

    @staticmethod
    def check_continued(folder: Path, first: int, second: int) -> None:
        """Check a run of two numbers of ranks."""
        name = "lora with dropout"
        assert index_of(folder / f"{name} on {first} then {second}") == index_of(
            folder / f"{name} on 1"
        ), (
            first,
            second,
        )


class EveryReplica(ContinuedReplicas):
    """Every case on up to four ranks."""

    trains = tuple(CASES)
    worlds = (1, 2, 3, 4)
    continued = tuple((first, second) for first in worlds for second in (1, 2, 3, 4))


def run_once(base: Path, work: Path | ProcessChecks, seconds: int = 280) -> Path:
    """The folder that a script wrote, or the process of some checks, once for all tests and
    workers."""
    script, arguments = (work, []) if isinstance(work, Path) else work.command()
    name = work.stem if isinstance(work, Path) else work.work_name()

    def run(folder: Path) -> str:
        run_script(script, folder, *arguments, seconds=seconds)
        return str(folder)

    return Path(once(base, name, run))


def losses(run: Path) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of each step of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        (line.get("loss", line.get("prior_loss")), line["grad_norm"])
        for line in lines
        if "grad_norm" in line
    ]


def index_of(run: Path) -> object:
    """The index of a run's last save, which has digests of everything in it."""
    return json.loads((run / "state" / f"step-{STEPS:06d}" / "state.json").read_text())
