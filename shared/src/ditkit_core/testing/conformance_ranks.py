"""Checks of a model that is sharded over two ranks, under every policy: nothing changes, and no
collective is added."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ditkit_core.testing.ranks import as_rank, once, run_ranks
from ditkit_core.testing.sharded_steps import Step, cases, check_step, steps
from ditkit_core.testing.suite_process import ProcessChecks


class RanksConformance(ProcessChecks):
    """Inherit next to the class with tiny items."""

    @classmethod
    def work(cls) -> None:
        """What each of two ranks does."""
        as_rank(lambda: steps(cls.spec, cls.arch, cls().items(2)))

    @pytest.mark.ranks
    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases())
    def test_policies_change_nothing_under_fsdp(
        self, tmp_path_factory: pytest.TempPathFactory, case: str
    ) -> None:
        """The ranks run once for all cases: starting them takes seconds."""
        check_step(_tables(self, tmp_path_factory.getbasetemp()), case)


class FewRanks(ProcessChecks):
    """A full fine-tune in fp32, kept and recomputed, for a family that runs the others nightly.

    Policies, adapters and dtypes meet FSDP2 in the engine, and the core's own model has all of
    them; that a layer reads the weights of another one shows in any case.
    """

    @classmethod
    def work(cls) -> None:
        """What each of two ranks does."""
        few: Any = {"trained": ("full",), "dtypes": ("fp32",), "chosen": ("none", "full")}
        as_rank(lambda: steps(cls.spec, cls.arch, cls().items(2), **few))

    def test_recomputing_changes_nothing_under_fsdp(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """And both ranks together are one with the joined batch."""
        tables = _tables(self, tmp_path_factory.getbasetemp())
        assert list(tables[0]) == ["full/fp32/none", "full/fp32/full"]
        for case in tables[0]:
            check_step(tables, case)


def _tables(checks: ProcessChecks, base: Path) -> list[Mapping[str, Step]]:
    script, arguments = checks.command()
    return list(
        once(base, checks.work_name(), lambda folder: run_ranks(script, *arguments, folder=folder))
    )
