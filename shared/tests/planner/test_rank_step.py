"""What a rank has of weights that it divides with others."""

import pytest
from made_profiles import products

from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.memory import ParameterRows, Partition, Profile, StageCost
from ditkit_core.planner.rank_layout import RankLayout, parse_links
from ditkit_core.planner.rank_step import RankStep, profile_of_rank, work_of_rank
from ditkit_core.planner.workload import Workload

ROWS = (ParameterRows(4096, 8192, False), ParameterRows(32, 16384, True))
BLOCK = StageCost(
    weights=ROWS[0].number * ROWS[0].bytes_each + 100,
    adapters=32 * 16384,
    gradients=32 * 16384,
    optimizer=2 * 32 * 16384,
    kept=8000,
    backward_extra=32 * 16384 + 4000,
    rows=ROWS,
    kernels_forward=products(10**12),
    kernels_backward=products(2 * 10**12),
)


def profile(num_blocks: int = 4) -> Profile:
    nothing = (0,) * (num_blocks + 1)
    return Profile(
        embed=StageCost(),
        blocks=(BLOCK,) * num_blocks,
        head=StageCost(),
        crossing=nothing,
        crossing_back=nothing,
    )


def step(layout: RankLayout, micro_batches: int) -> RankStep:
    return RankStep(
        layout=layout,
        profile=profile_of_rank(profile(), layout),
        division=Partition(devices=(0,) * 4),
        work=Workload(micro_batches=micro_batches),
        gpu=parse_gpus("h100")[0],
    )


def test_fewer_rows_than_ranks_are_padded_when_they_are_gathered():
    block = profile_of_rank(profile(), RankLayout(nproc=8, nodes=16, shard=128)).blocks[0]
    assert block.weights == 32 * 8192 + 100, "buffers are not divided"
    assert block.adapters == block.gradients == block.optimizer // 2 == 16384, "one row of 32"
    assert block.gathered == 4096 * 8192 + 128 * 16384


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_gradients_of_adapters_are_added_up_over_ranks_once_a_step(micro_batches):
    layout = RankLayout(nproc=2, shard=2)
    of_adapters, of_all = (
        work_of_rank(Workload(micro_batches=2 * micro_batches), layout, adapts=each)
        for each in (True, False)
    )
    assert of_adapters.micro_batches == of_all.micro_batches == micro_batches
    assert of_adapters.ranks.rounds[-1].again == (micro_batches > 1) and not any(
        each.again for each in of_all.ranks.rounds
    )


def test_arithmetic_hides_what_is_gathered_if_the_link_is_fast_enough():
    layout = RankLayout(nproc=8, nodes=4, shard=32)
    fast, slow = step(layout, 32).plan(parse_links("", layout)).times
    assert fast.exposed < 0.5 * sum(fast.exchanges) and slow.exposed > 0.9 * sum(slow.exchanges)
    assert fast.efficiency > 10 * slow.efficiency > 0
