"""Checks of a model that is sharded over two ranks, under every policy: nothing changes, and no
collective is added."""

import pytest

from ditkit_core.testing.ranks import as_rank, once, run_ranks
from ditkit_core.testing.sharded_steps import cases, check_step, steps
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
        script, arguments = self.command()
        tables = once(
            tmp_path_factory.getbasetemp(),
            self.work_name(),
            lambda folder: run_ranks(script, *arguments, folder=folder),
        )
        check_step(tables, case)
