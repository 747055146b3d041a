"""The processes that train one run together, and what they exchange. `torchrun.py` connects them.

A process alone is rank 0 of 1: it divides nothing and waits for nobody, so that callers need no second path.
"""

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The `[ranks]` section, for a run that torchrun starts as several processes. Nothing in it changes a result."""

    timeout: float = setting(120.0, resume="free")
    """Seconds without a heartbeat of a process after which the run ends. A process that works may take any time."""

    def __post_init__(self) -> None:
        if not self.timeout >= 1:
            raise UserError(f"ranks.timeout = {self.timeout:g} must be at least 1 second")


class RankLost(UserError):
    """Another process of the run ended, or cannot be reached."""


@dataclass
class Ranks:
    """The place of this process among those that train the run; the default is a process alone."""

    rank: int = 0
    """From 0; rank 0 alone prints and writes."""
    size: int = 1
    seconds_waited: float = 0.0
    """Spent in exchanges so far, which is mostly waiting for slower ranks."""
    bytes_sent: int = 0
    """Given to exchanges so far."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Those of `count` consecutive items that this rank works on; the ranks' shares differ by at most one."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def owner(self, item: int, count: int) -> int:
        """The rank whose share of `count` items has this one."""
        return ((item + 1) * self.size - 1) // count

    def all_reduce(self, numbers: "Tensor") -> "Tensor":
        """The sum of the ranks' tensors, which is exact where all but one rank have zeros."""
        if self.size == 1:
            return numbers
        total = numbers.clone()
        with self._exchange(total):
            distributed().all_reduce(total)
        return total

    def send(self, tensor: "Tensor", to: int) -> None:
        """Send a tensor to a rank that receives it."""
        with self._exchange(tensor):
            distributed().send(tensor, to)

    def recv(self, buffer: "Tensor", source: int) -> "Tensor":
        """The tensor that a rank sent, in `buffer`."""
        with self._exchange():
            distributed().recv(buffer, source)
        return buffer

    def broadcast(self, tensor: "Tensor") -> "Tensor":
        """The first rank's tensor, written into this one on the others."""
        if self.size > 1:
            with self._exchange(tensor if self.is_first else None):
                distributed().broadcast(tensor, 0)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        import torch

        return bool(self.all_reduce(torch.tensor([float(flag)])) > 0)

    def total(self, numbers: Iterable[float]) -> float:
        """The sum of whole numbers over all ranks."""
        import torch

        return float(self.all_reduce(torch.tensor(float(sum(numbers)), dtype=torch.float64)))

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.any(False)

    def all_gather_object(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks; JSON must be able to store it."""
        if self.size == 1:
            return [value]
        import torch

        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(text)
        lengths = [int(length) for length in self.all_reduce(sizes)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        found = [torch.empty_like(padded) for _ in range(self.size)]
        with self._exchange(padded):
            distributed().all_gather(found, padded)
        return [json.loads(each[:length].numpy().tobytes()) for each, length in zip(found, lengths, strict=True)]

    def broadcast_object(self, value: T) -> T:
        """The first rank's value; JSON must be able to store it."""
        return cast(T, self.all_gather_object(value if self.is_first else None)[0])

    def on_first(self, work: Callable[[], T]) -> T:
        """The result of work that only the first rank does, while the others wait however long; JSON must be able to store it."""
        return cast(T, self.broadcast_object(work() if self.is_first else None))

    def first_rank_first(self, work: Callable[[], T]) -> T:
        """Do work on the first rank, and then on the others, which find its files."""
        if self.is_first:
            result = work()
            self.barrier()
            return result
        self.barrier()
        return work()

    def check_same(self, about: Mapping[str, str]) -> None:
        """Refuse ranks that differ from the first in something that must be the same, by name.

        Raises:
            UserError: With the first difference; on all ranks.
        """
        found = self.all_gather_object({"host": socket.gethostname(), **about})
        for rank, each in enumerate(found):
            for name, value in each.items():
                if name != "host" and value != found[0][name]:
                    raise UserError(
                        f"rank {rank} on {each['host']} has another {name} ({value}) than rank 0 on {found[0]['host']} ({found[0][name]}); "
                        "start every rank with the same command, files and versions"
                    )

    @contextmanager
    def _exchange(self, tensor: "Tensor | None" = None) -> Iterator[None]:
        """Count an exchange, and name what its failure means."""
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            from ditkit_core.io.memory import is_out_of_memory

            if is_out_of_memory(error):
                raise
            raise RankLost(
                f"the connection to another rank broke ({reason_of(error)}): that process ended, its own message or torchrun's summary says "
                "why; the same command continues from the last save"
            ) from error
        self.seconds_waited += time.perf_counter() - began
        self.bytes_sent += 0 if tensor is None else tensor.nbytes


def world() -> Ranks | None:
    """The ranks of the process group, whoever started it; None if there is none. For training loops of your own (`engine/fsdp.py`)."""
    dist = distributed()
    return Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def reason_of(error: Exception) -> str:
    """The first line of torch's message, without the place in its source."""
    return str(error).splitlines()[0].rpartition("] ")[2][:100]


def distributed() -> Any:
    """torch.distributed, imported now: help and mistakes do without torch."""
    import torch.distributed

    return torch.distributed
