"""Wan on two ranks: sharded, under every policy."""

from pathlib import Path

import pytest

from ditkit_core.testing.ranks import run_ranks_once
from ditkit_core.testing.sharded_steps import cases, check_step

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "support" / "ranks_of_wan.py"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return run_ranks_once(SCRIPT, base=tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("case", cases())
def test_policies_change_nothing_under_fsdp(tables, case):
    check_step(tables, case)
