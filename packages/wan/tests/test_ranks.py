"""Wan on two ranks: sharded, under every policy."""

from pathlib import Path

from ditkit_core.testing.conformance_ranks import RanksConformance


class TestRanks(RanksConformance):
    script = Path(__file__).parent / "support" / "ranks_of_wan.py"
