"""Who a process is among several, and what each works on."""

import pytest
import torch
import torch.distributed as dist

from ditkit_core.errors import UserError
from ditkit_core.io.ranks import Ranks, RanksConfig, world
from ditkit_core.io.torchrun import current_ranks, launched, local_rank


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


def test_a_process_alone_exchanges_nothing():
    ranks = Ranks()
    assert ranks.all_reduce(torch.ones(2)).tolist() == [1, 1]
    assert ranks.all_gather_object({"a": 1}) == [{"a": 1}] and ranks.broadcast_object(3) == 3
    assert ranks.on_first(lambda: "made") == ranks.first_rank_first(lambda: "made") == "made"
    assert ranks.any(True) and not ranks.barrier()
    assert ranks.bytes_sent == 0 and ranks.is_first


@pytest.mark.parametrize("rank, size", [("0", "1"), ("x", "2"), ("0", "")])
def test_what_is_no_launch_of_several_is_a_process_alone(monkeypatch, rank, size):
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    assert launched() is None


def test_the_gpu_of_a_rank_is_that_of_its_number_on_the_machine(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert local_rank() == 1


def test_a_timeout_below_a_second_is_refused():
    with pytest.raises(UserError, match=r"ranks.timeout = 0.5 must be at least 1 second"):
        RanksConfig(timeout=0.5)
