"""Who a process is among several, and what each works on."""

import pytest
import torch
import torch.distributed as dist

from ditkit_core.distributed.launch import launched, local_rank
from ditkit_core.distributed.ranks import Ranks, RanksConfig, world
from ditkit_core.distributed.torchrun import current_ranks
from ditkit_core.errors import UserError


def test_a_process_alone_is_in_no_world():
    assert world() is None and launched() is None and local_rank() == 0
    assert current_ranks() == Ranks(rank=0, size=1)


def test_a_process_of_a_group_knows_its_rank_and_how_many_there_are():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert world() == Ranks(rank=0, size=1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [8, 9, 17])
def test_every_item_has_one_owner_and_shares_differ_by_one(size, count):
    shares = [Ranks(rank, size).share(count) for rank in range(size)]
    assert [item for share in shares for item in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for rank, share in enumerate(shares):
        assert all(Ranks(0, size).owner(item, count) == rank for item in share)


@pytest.mark.parametrize("size, context", [(4, 2), (6, 3), (6, 2), (8, 8)])
def test_ranks_of_a_context_group_work_on_the_same_items(size, context):
    ranks = [Ranks(rank, size, context=context) for rank in range(size)]
    groups = [ranks[first : first + context] for first in range(0, size, context)]
    assert all(each.share(9) == group[0].share(9) for group in groups for each in group)
    assert [item for group in groups for item in group[0].share(9)] == list(range(9))
    for each in ranks:
        owners = [each.owner(item, 9) for item in each.share(9)]
        assert set(owners) == {each.rank}, "of a group, the rank at its own place"
        assert [kept for _, kept in each.even_share(9)].count(True) == len(each.share(9))
        assert len(each.even_share(9)) == -(-9 // len(groups))


def test_groups_that_leave_ranks_over_are_refused_with_those_that_do_not():
    with pytest.raises(
        UserError,
        match=r"context = 4 does not divide 6 ranks .* set it to 1, 2, 3 or 6, or start a multiple of 4",
    ):
        Ranks(0, 6).grouped(4)
    assert Ranks(0, 6).grouped(1) == Ranks(0, 6)


def test_a_process_alone_exchanges_nothing():
    ranks = Ranks()
    assert ranks.all_reduce(torch.ones(2)).tolist() == [1, 1]
    assert ranks.all_gather_object({"a": 1}) == [{"a": 1}] and ranks.broadcast_object(3) == 3
    assert ranks.on_first(lambda: "made") == "made"
    assert ranks.any(True) and not ranks.barrier()
    assert ranks.bytes_sent == 0 and ranks.is_first


def test_a_timeout_below_a_second_is_refused():
    with pytest.raises(UserError, match=r"ranks.timeout = 0.5 must be at least 1 second"):
        RanksConfig(timeout=0.5)


@pytest.mark.parametrize("name", ["ditkit", "torch", "configuration", "data", "base"])
def test_a_rank_that_differs_in_something_is_refused_with_its_machine(name):
    own = {"ditkit": "0.1", "torch": "2.15", "configuration": "a1", "data": "b2", "base": "c3"}

    class First(Ranks):
        def all_gather_object(self, value):
            return [value, value, {**value, "host": "elsewhere", name: "another"}]

    with pytest.raises(
        UserError,
        match=rf"rank 2 on elsewhere has another {name} \(another\) than rank 0 on \S+ \({own[name]}\)",
    ):
        First(0, 3).check_same(own)


def test_of_a_long_setting_that_differs_the_beginning_is_said():
    class First(Ranks):
        def all_gather_object(self, value):
            return [value, {**value, "sample.prompts": "a" * 5000}]

    with pytest.raises(
        UserError,
        match=r"rank 1 on \S+ has another sample.prompts \(a{80}\.\.\.\) than rank 0 on \S+ \(\[\]\)",
    ):
        First(0, 2).check_same({"sample.prompts": "[]"})
