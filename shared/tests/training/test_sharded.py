"""Several ranks that divide a model's weights and train it."""

import json
from pathlib import Path

import pytest
from sharded_of_toy import BOTH, DAILY, EVERY, WORLDS

from ditkit_core.testing.conformance_sharded import ShardedConformance


class TestSharded(ShardedConformance):
    script = Path(__file__).parents[1] / "support" / "sharded_of_toy.py"
    cases = DAILY
    sharded = WORLDS

    def test_a_layer_that_one_rank_alone_uses_is_trained_by_all(self, folder):
        """Its gradient reaches both ranks' rows, and no exchange waits for the rank that has none."""
        for rank in range(2):
            assert json.loads((folder / "seldom" / f"{rank}.json").read_text())["gradient"] > 0

    def test_whole_weights_that_are_read_are_still_the_trained_ones(self, folder):
        whole = dict(json.loads((folder / "seldom" / "0.json").read_text())["whole"])
        assert whole["embed.extra.weight"] == [32, 32] and len(whole) > 20


@pytest.mark.exhaustive
@pytest.mark.timeout(1000)
class TestEverySharded(ShardedConformance):
    """Every case in every world."""

    script = Path(__file__).parents[1] / "support" / "every_sharded_of_toy.py"
    sharded = (*EVERY, *BOTH)
    seconds = 900
