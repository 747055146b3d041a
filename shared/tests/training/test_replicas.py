"""Several ranks that train one run as replicas."""

import json
from pathlib import Path

import pytest
from replicas_of_toy import DAILY, ELSEWHERE, EVERY, WORLDS

from ditkit_core.testing.conformance_replicas import ContinuedReplicas, index_of, losses
from ditkit_core.testing.replicas import CASES


class ReplicasOfToy(ContinuedReplicas):
    script = Path(__file__).parents[1] / "support" / "replicas_of_toy.py"
    worlds = WORLDS[:3]
    continued = DAILY
    elsewhere = ELSEWHERE

    def test_more_micro_batches_need_no_more_exchanges(self, folder):
        """Two replicas exchange gradients once a step, whether they add up two micro-batches each
        or four."""
        ranks = json.loads((folder / "ranks.json").read_text())["2"]
        names = "lora in bf16", "lora, eight micro-batches"
        four, eight = ([each[name]["exchanges"] for each in ranks] for name in names)
        assert four == eight and min(four) > 0

    @pytest.mark.parametrize("ranks", ["1 of 2", "2 of 2"])
    def test_ranks_that_share_tokens_train_what_one_process_trains(self, folder, ranks):
        """Sums over tokens are taken in another order, in fp32 or bf16."""
        names = json.loads((folder / "ranks.json").read_text())[ranks][0]
        assert set(names) == set(self.elsewhere)
        for name in names:
            expected, found = losses(folder / f"{name} on 1"), losses(folder / f"{name} on {ranks}")
            limit = 1e-2 if "bf16" in name else 1e-4
            for one, other in zip(expected, found, strict=True):
                assert other == pytest.approx(one, rel=limit), name

    def test_the_number_of_context_groups_changes_no_bit(self, folder):
        """Each is one replica of the run."""
        ranks = json.loads((folder / "ranks.json").read_text())
        for name in ranks["1 of 2"][0].keys() - {"full"}:
            assert (
                len(
                    {
                        each[name]["weights"]
                        for groups in ("1 of 2", "2 of 2")
                        for each in ranks[groups]
                    }
                )
                == 1
            )
            assert index_of(folder / f"{name} on 1 of 2") == index_of(
                folder / f"{name} on 2 of 2"
            ), name


@pytest.mark.ranks
@pytest.mark.slow
class TestReplicas(ReplicasOfToy):
    """A few cases on one to three ranks."""


@pytest.mark.exhaustive
class TestEveryReplicas(ReplicasOfToy):
    """Every case on up to four ranks, and each change of their number."""

    script = ReplicasOfToy.script.with_name("every_replicas_of_toy.py")
    worlds = WORLDS
    continued = EVERY
    elsewhere = tuple(CASES)
