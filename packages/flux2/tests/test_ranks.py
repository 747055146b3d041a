"""FLUX.2 on two ranks: sharded, under every policy."""

from pathlib import Path

import pytest

from ditkit_core.testing.conformance_ranks import RanksConformance


@pytest.mark.exhaustive  # each change runs Wan's
class TestRanks(RanksConformance):
    script = Path(__file__).parent / "support" / "ranks_of_flux2.py"
