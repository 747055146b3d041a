"""Who a process is among several."""

import torch.distributed as dist

from ditkit_core.engine.distributed import World, world


def test_a_process_alone_is_in_no_world():
    assert world() is None


def test_a_process_of_a_group_knows_its_rank_and_how_many_there_are():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert world() == World(rank=0, size=1)
    finally:
        dist.destroy_process_group()
