"""Checks of a model that is sharded over two ranks, under every policy: nothing changes, and no collective is added."""

from pathlib import Path
from typing import ClassVar

import pytest

from ditkit_core.testing.ranks import run_ranks_once
from ditkit_core.testing.sharded_steps import cases, check_step


class RanksConformance:
    """Inherit, and set `script`."""

    script: ClassVar[Path]
    """The work of each of two ranks: `as_rank(lambda: steps(spec, arch, items))`."""

    @pytest.mark.ranks
    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases())
    def test_policies_change_nothing_under_fsdp(self, tmp_path_factory: pytest.TempPathFactory, case: str) -> None:
        """The ranks run once for all cases: starting them takes seconds."""
        check_step(run_ranks_once(self.script, base=tmp_path_factory.getbasetemp()), case)
