"""The rank of this process: the only module that asks torch.distributed for it.

The commands run in one process. A training loop of your own starts ranks with torchrun, and `fsdp.py` asks this module. Later code that
needs a rank (which one writes a save, which one prints, which micro-batches it takes) asks here too, so that there is only one way to
find it.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """The processes that train together."""

    rank: int
    size: int


def world() -> World | None:
    """The default process group; None if none was started, as in every command."""
    if not dist.is_initialized():
        return None
    return World(rank=dist.get_rank(), size=dist.get_world_size())
