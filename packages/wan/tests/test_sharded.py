"""Wan trained by several ranks that divide its weights."""

from pathlib import Path

import pytest
from sharded_of_wan import BOTH, CASES, FEW, WORLDS

from ditkit_core.testing.conformance_sharded import EverySharded, ShardedConformance


@pytest.mark.ranks
@pytest.mark.slow
class TestSharded(ShardedConformance):
    script = Path(__file__).parent / "support" / "sharded_of_wan.py"
    sharded = WORLDS
    cases = CASES


class TestEverySharded(EverySharded):
    script = TestSharded.script.with_name("every_sharded_of_wan.py")


@pytest.mark.exhaustive
class TestShardedVace(ShardedConformance):
    """Ranks that also share tokens, of both streams."""

    script = TestSharded.script.with_name("sharded_of_wan_vace.py")
    sharded = BOTH
    cases = FEW


@pytest.mark.exhaustive
class TestShardedReference(ShardedConformance):
    """Ranks that also share tokens, those of the reference in front among them."""

    script = TestSharded.script.with_name("sharded_of_wan_reference.py")
    sharded = BOTH
    cases = FEW


@pytest.mark.exhaustive
class TestShardedTimes(ShardedConformance):
    """Ranks that also share tokens, each with a time of its own: what modulates the blocks is divided, too."""

    script = TestSharded.script.with_name("sharded_of_wan_times.py")
    sharded = BOTH
    cases = FEW
