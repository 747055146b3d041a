"""Several ranks that divide a model's weights and train it."""

import json
from pathlib import Path

import pytest
from sharded_of_toy import BOTH, DAILY, UNUSED, WORLDS

from ditkit_core.testing.conformance_sharded import EverySharded, ShardedConformance


def found_by(folder, rank):
    """What one of two ranks has found besides the training of the cases."""
    return json.loads((folder / "two" / f"{rank}.json").read_text())


@pytest.mark.ranks
@pytest.mark.slow
class TestSharded(ShardedConformance):
    script = Path(__file__).parents[1] / "support" / "sharded_of_toy.py"
    cases = DAILY
    sharded = WORLDS

    @pytest.mark.skipif(
        not UNUSED,
        reason="torch 2.11 cannot sum gradients that some ranks lack; docs/limitations.md",
    )
    def test_a_layer_that_one_rank_alone_uses_is_trained_by_all(self, folder):
        """Its gradient reaches both ranks' rows, and no exchange waits for the rank that has
        none."""
        for rank in range(2):
            assert found_by(folder, rank)["gradient"] > 0

    @pytest.mark.skipif(not UNUSED, reason="reads those of the test above")
    def test_whole_weights_that_are_read_are_still_the_trained_ones(self, folder):
        whole = dict(found_by(folder, 0)["whole"])
        assert whole["embed.extra.weight"] == [32, 32] and len(whole) > 20

    def test_ranks_that_run_a_forward_together_find_where_it_is_not_finite(self, folder):
        """Both name the weight of which one has the row, and the operation of the rank that
        computed it, not the exchange that brought it."""
        first, second = (found_by(folder, rank)["origins"] for rank in range(2))
        assert first == second and len(first) == 12
        for case, where in first.items():
            trouble, _, context, _ = case.split(", ")
            place = "block 0" if trouble == "weight" else "block 1"
            assert where["stage"] == place and where["weights"] == ["layers.0.mlp.0.weight"] * (
                trouble == "weight"
            ), case
            assert where["pass"] == ("backward" if trouble == "gradient" else "forward"), case
            assert where["operation"] == ("aten.addmm" if trouble == "weight" else "aten.mul"), case
            alone = context == "context 1" and trouble != "weight"
            assert where["micro_batch"] == alone and where["ids"] == [f"clip {alone:d}"], (
                "that of the second rank, or of all"
            )


class TestEverySharded(EverySharded):
    script = TestSharded.script.with_name("every_sharded_of_toy.py")
    sharded = (*EverySharded.sharded, *BOTH)
