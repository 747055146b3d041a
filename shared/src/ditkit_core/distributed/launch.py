"""The place of this process among those that torchrun starts, from the environment that it sets."""

import os
from dataclasses import dataclass

from ditkit_core.errors import UserError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass
class Launch:
    """The place of a process among those that torchrun starts."""

    rank: int
    size: int
    local: int
    num_local: int


def launched() -> Launch | None:
    """This process's place; None if it is the only process."""
    values = [os.environ.get(name, "") for name in _NAMES]
    if not all(value.isdecimal() for value in values) or int(values[1]) < 2:
        return None
    return Launch(*map(int, values))


def check_launch() -> None:
    """Refuse one of several processes that does not know its place: each of them would train the
    whole run alone.

    Scripts that start processes with srun or mpirun set some of the variables, and DeepSpeed's
    launcher has another name for the last one.
    """
    missing = [name for name in _NAMES if not os.environ.get(name, "").isdecimal()]
    size = os.environ.get("WORLD_SIZE", "")
    if missing and size.isdecimal() and int(size) > 1:
        raise UserError(
            f"WORLD_SIZE = {size} is set without {' and '.join(missing)}; start the processes with "
            f"torchrun (torchrun --nproc-per-node N), which "
            "sets all of these, or unset WORLD_SIZE to train in one process"
        )


def local_rank() -> int:
    """The number of this process among those on this machine, which is its GPU's number; 0 for a
    process alone."""
    launch = launched()
    return 0 if launch is None else launch.local
