"""How many ranks a plan is for."""

import pytest

from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.planner.rank_layout import PlannedLaunch, RankLayout, layout_of
from ditkit_core.run.config import RunConfig


def layout(
    num_gpus: int = 1, *, nproc: int = 0, nodes: int = 1, link: str = "", **flags
) -> RankLayout | None:
    config = resolve(
        RunConfig, flags={name.replace("_", ".", 1): value for name, value in flags.items()}
    )
    launch = PlannedLaunch(nproc=nproc, nodes=nodes, link=link)
    return layout_of(config.ranks, num_gpus, launch, devices=config.train.devices)


def test_without_flags_a_plan_is_of_one_process():
    assert layout(8) is None
    assert layout(8, train_devices=("cuda:0", "cuda:1")) is None


def test_each_gpu_has_a_rank_where_ranks_divide_something():
    assert layout(8, ranks_shard=8) == RankLayout(nproc=8, shard=8)
    assert layout(8, nodes=2, ranks_context=4) == RankLayout(nproc=8, nodes=2, context=4)
    assert layout(8, nproc=8) == layout(1, nproc=8) == RankLayout(nproc=8)


def test_micro_batches_are_divided_over_the_ranks_that_do_not_share_samples():
    assert RankLayout(nproc=8, nodes=8, context=8).micro_batches(20) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_gpus": 4, "nproc": 8}, "--gpus names 4 GPUs"),
        (
            {"num_gpus": 4, "ranks_shard": 8},
            "ranks.shard = 8 needs a multiple of 8 ranks, and this plan has 4",
        ),
        (
            {"nproc": 6, "ranks_context": 4, "ranks_shard": 2},
            "ranks.context = 4 needs a multiple of 4",
        ),
        ({"nproc": 2, "train_devices": ("cuda:0", "cuda:1")}, "train.devices"),
        (
            {"link": "pcie"},
            "--link pcie is between ranks, and this plan is of one process; add --nproc N",
        ),
        ({"nproc": -1}, "must be at least 1"),
        ({"nodes": 0}, "must be at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_a_remedy(given, words):
    with pytest.raises(UserError, match=words):
        layout(**given)
