"""Which of several processes this one is: the one module that asks torch.distributed.

The commands run in one process. A training loop of your own starts ranks with torchrun, and `fsdp.py` asks here. Whatever has to
know a rank later (who writes a save, who prints, which share of a step's micro-batches is whose) asks here too, so that a second way to
find it out never appears.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """The processes that train together."""

    rank: int
    """This one's number, from 0."""
    size: int
    """How many there are."""


def world() -> World | None:
    """The processes of the default process group; None where none was started, as in every command."""
    if not dist.is_initialized():
        return None
    return World(rank=dist.get_rank(), size=dist.get_world_size())
