"""The gradients of replicas, and their time on links."""

import pytest

from ditkit_core.planner.replicas import replica_sums
from ditkit_core.planner.workload import Workload


@pytest.mark.parametrize("micro_batches", range(1, 14))
def test_one_rank_has_the_sets_of_a_process_alone(micro_batches):
    alone = Workload(micro_batches=micro_batches).rounds(trains_all=False)
    assert list(replica_sums(micro_batches, 1, adapts=True).gradients.rounds) == alone


def test_the_time_of_a_tree_is_its_depth_and_a_broadcast():
    for size, depth in ((2, 1), (8, 3), (64, 6)):
        sums = replica_sums(size, size, adapts=True)
        assert sums.seconds(lambda rank, other: 1.0, 10.0) == depth + 10
        assert sums.most_sent == 1 and sums.gradients.exchanged == 2
    sums = replica_sums(8, 8, adapts=True)
    assert sums.seconds(lambda rank, other: 1.0 + 100 * (rank // 4 != other // 4), 0.0) == 103, (
        "one level crosses"
    )


def test_a_rank_whose_sums_wait_for_those_of_others_has_several():
    assert replica_sums(8, 3, adapts=True).gradients.exchanged == 3
    assert replica_sums(8, 3, adapts=False).gradients.exchanged == 2
