"""Wan trained by several ranks that divide its weights."""

from pathlib import Path

import pytest
from sharded_of_wan import CASES, WORLDS

from ditkit_core.testing.conformance_sharded import ShardedConformance


@pytest.mark.slow
class TestSharded(ShardedConformance):
    script = Path(__file__).parent / "support" / "sharded_of_wan.py"
    sharded = WORLDS
    cases = CASES
