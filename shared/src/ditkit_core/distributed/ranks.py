"""The processes that train one run together, and what they exchange. `torchrun.py` connects them.

A process alone is rank 0 of 1: it divides nothing and waits for nobody, so that callers need no
second path.
"""

import atexit
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError, argument

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

WITHOUT_LIMIT = timedelta(days=365)
"""Of exchanges: a rank may encode, compile or generate samples for hours."""


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The `[ranks]` section, for a run that torchrun starts as several processes. It changes
    results only by roundings."""

    shard: int = setting(1, resume="free")
    """Number of ranks that divide weights, gradients and optimizer state among themselves (FSDP2);
    with more ranks in all, each such group has the whole model. 1 gives every rank the whole model.
    """
    context: int = setting(1, resume="free")
    """Number of ranks that share the tokens of each sample, and so its activations: for samples too
    large for one GPU."""
    timeout: float = setting(120.0, resume="free")
    """Seconds without a heartbeat of a process after which the run ends. A process that works may
    take any time."""

    @property
    def group_size(self) -> int:
        """Number of ranks that divide weights or tokens: a run has a multiple of it."""
        return max(self.shard, self.context)

    def __post_init__(self) -> None:
        for name in ("shard", "context"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{argument(f'ranks.{name}')} = {getattr(self, name)} must be at least 1"
                )
        small, large = sorted((self.shard, self.context))
        if large % small:
            raise UserError(
                f"{argument('ranks.shard')} = {self.shard} and {argument('ranks.context')} = "
                f"{self.context} do not nest; one must be a multiple of the other"
            )
        if not self.timeout >= 1:
            raise UserError(
                f"{argument('ranks.timeout')} = {self.timeout:g} must be at least 1 second"
            )


class RankLost(UserError):
    """Another process of the run ended, or cannot be reached."""


@dataclass
class Ranks:
    """The place of this process among those that train the run; the default is a process alone."""

    rank: int = 0
    """From 0; rank 0 alone prints and writes."""
    size: int = 1
    shard: int = 1
    """Ranks that divide the weights among themselves: `ranks.shard`."""
    seconds_waited: float = 0.0
    """Spent in exchanges so far, which is mostly waiting for slower ranks."""
    bytes_sent: int = 0
    """Sent to other ranks so far, as rings send them: a rank keeps its own part."""
    step: int = 0
    """The step that is being trained, counted from 1, for messages of a failure; 0 outside of
    training. `begin_step` sets it."""
    leads: bool = False
    """Whether this is the first rank in work of its own that the others help with: `on_first`."""
    context: int = 1
    """Number of consecutive ranks that share the tokens of each sample: a context group. All of
    them work on the same items."""
    group: Any = field(default=None, repr=False, compare=False)
    """torch's process group of this rank's context group; `grouped` makes it."""
    meshes: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """torch's meshes of these ranks by kind of device and `shard`; `distributed/division.py:
    mesh_of` makes them."""
    on_step: Callable[[int], None] | None = field(default=None, repr=False, compare=False)
    """Called with each step before it is trained."""
    channel: Any = field(default=None, repr=False, compare=False)
    """torch's process group of all ranks that `all_reduce` and exchanges of objects go over; None
    for the one of training."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    @property
    def num_groups(self) -> int:
        """Number of context groups, among which items are divided; the number of ranks if each is a
        group of its own."""
        return self.size // self.context

    @property
    def group_index(self) -> int:
        """The number of this rank's context group, from 0."""
        return self.rank // self.context

    @property
    def group_rank(self) -> int:
        """The number of this rank within its context group, from 0; the one at 0 contributes what
        only one of a group may."""
        return self.rank % self.context

    def begin_step(self, step: int) -> None:
        """Set the step that is being trained; 0 after training."""
        self.step = step
        if self.on_step is not None:
            self.on_step(step)

    def grouped(self, context: int) -> "Ranks":
        """These ranks in context groups of so many; all ranks call it at once."""
        if context == 1:
            return self
        if self.size % context:
            fitting = [str(number) for number in range(1, self.size + 1) if self.size % number == 0]
            raise UserError(
                f"{argument('ranks.context')} = {context} does not divide {self.size} ranks into "
                f"groups; set it to {', '.join(fitting[:-1])} or "
                f"{fitting[-1]}, or start a multiple of {context} processes"
            )
        group, _ = distributed().new_subgroups(context, timeout=WITHOUT_LIMIT)
        return replace(self, context=context, group=group)

    def share(self, count: int) -> range:
        """The items among `count` consecutive ones that this rank's context group works on; shares
        differ by at most one."""
        return range(
            self.group_index * count // self.num_groups,
            (self.group_index + 1) * count // self.num_groups,
        )

    def even_share(self, count: int) -> list[tuple[int, bool]]:
        """The share, for ranks that must all work on equally many: with stand-ins at its end, which
        are marked False and do not count."""
        share, most = self.share(count), -(-count // self.num_groups)
        return [(item, True) for item in share] + [(share[-1] if share else 0, False)] * (
            most - len(share)
        )

    def owner(self, item: int, count: int) -> int:
        """The rank whose share of `count` items has this one; of its context group, the one at this
        rank's place."""
        return ((item + 1) * self.num_groups - 1) // count * self.context + self.group_rank

    def all_reduce(self, numbers: "Tensor", group: Any = None) -> "Tensor":
        """The sum of the tensors of all ranks, or of a group's ranks; it is exact where all but one
        rank have zeros."""
        if self.size == 1:
            return numbers
        total = numbers.clone()
        with self.exchange(_summed(total, distributed().get_world_size(group or self.channel))):
            distributed().all_reduce(total, group=group or self.channel)
        return total

    def gather(self, tensor: "Tensor", into: "list[Tensor] | None", group: Any) -> None:
        """Send a tensor to the first rank, which gets the tensors of its group in `into`."""
        with self.exchange(0 if into else tensor.nbytes):
            distributed().gather(tensor, into, dst=0, group=group)

    def sum_of_groups(self, numbers: "Tensor") -> "Tensor":
        """The sum of the context groups' tensors; all ranks of a group have the same one."""
        return self.all_reduce(
            numbers if self.group_rank == 0 else numbers.new_zeros(numbers.shape)
        )

    def mean_in_group(self, tensor: "Tensor") -> "Tensor":
        """The mean of the tensors of this context group's ranks, written into this one."""
        if self.context > 1:
            with self.exchange(_summed(tensor, self.context)):
                distributed().all_reduce(tensor, group=self.group)
            tensor /= self.context
        return tensor

    def all_to_all(self, parts: "Tensor") -> "Tensor":
        """What each rank of the context group has for this one.

        Args:
            parts: [context, ...], contiguous: what this rank has for each of them.
        """
        import torch

        received = torch.empty_like(parts)
        # as bytes: gloo does not know every dtype
        with self.exchange(parts.nbytes - parts.nbytes // self.context):
            distributed().all_to_all_single(
                received.view(torch.uint8), parts.view(torch.uint8), group=self.group
            )
        return received

    def all_gather(self, part: "Tensor") -> "Tensor":
        """The tensors of the context group's ranks, [context, ...]."""
        import torch

        gathered = part.new_empty(self.context, *part.shape)
        into, part_bytes = (x.reshape(-1).view(torch.uint8) for x in (gathered, part))
        with self.exchange(part_bytes.nbytes * (self.context - 1)):
            distributed().all_gather_into_tensor(into, part_bytes, group=self.group)
        return gathered

    def send(self, tensor: "Tensor", to: int) -> None:
        """Send a tensor to a rank that receives it."""
        with self.exchange(tensor.nbytes):
            distributed().send(tensor, to)

    def recv(self, buffer: "Tensor", source: int) -> "Tensor":
        """The tensor that a rank sent, in `buffer`."""
        with self.exchange(0):
            distributed().recv(buffer, source)
        return buffer

    def broadcast(self, tensor: "Tensor", source: int = 0, group: Any = None) -> "Tensor":
        """The tensor of the first rank, or of the one at a place of a group, written into this one
        on the others."""
        if self.size > 1:
            with self.exchange(tensor.nbytes if distributed().get_rank(group) == source else 0):
                distributed().broadcast(tensor, group=group, group_src=source)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        import torch

        return bool(self.all_reduce(torch.tensor([float(flag)])) > 0)

    def total(self, numbers: Iterable[float]) -> float:
        """The sum of whole numbers over the context groups."""
        import torch

        return float(self.sum_of_groups(torch.tensor(float(sum(numbers)), dtype=torch.float64)))

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
        buffers = [torch.empty_like(padded) for _ in range(self.size)]
        with self.exchange(padded.nbytes * (self.size - 1)):
            distributed().all_gather(buffers, padded, group=self.channel)
        return [
            json.loads(buffer[:length].numpy().tobytes())
            for buffer, length in zip(buffers, lengths, strict=True)
        ]

    def broadcast_object(self, value: T) -> T:
        """The first rank's value; JSON must be able to store it."""
        return cast(T, self.all_gather_object(value if self.is_first else None)[0])

    def on_first(self, work: Callable[[], T], help: Callable[[str], None] | None = None) -> T:
        """The result of work that only the first rank does, while the others wait however long;
        JSON must be able to store it.

        `help` is called on the others with each text that the work passes to `ask`.
        """
        if self.size == 1:
            return work()
        if help is None:
            return cast(T, self.broadcast_object(work() if self.is_first else None))
        if self.is_first:
            self.leads = True
            try:
                result = work()
            finally:
                self.leads = False
            self.broadcast_object({"done": result})
            return result
        message: dict[str, Any] = self.broadcast_object({})
        while "ask" in message:
            help(message["ask"])
            message = self.broadcast_object({})
        return cast(T, message["done"])

    def ask(self, request: str) -> None:
        """Have the other ranks help with the first rank's work."""
        assert self.leads, request
        self.broadcast_object({"ask": request})

    def check_same(self, about: Mapping[str, str]) -> None:
        """Refuse ranks that differ from the first in something that must be the same, by name."""
        by_rank = self.all_gather_object({"host": socket.gethostname(), **about})
        for rank, facts in enumerate(by_rank):
            for name, value in facts.items():
                if name != "host" and value != (first := by_rank[0].get(name, "none")):
                    raise UserError(
                        f"rank {rank} on {facts['host']} has another {name} ({_shortened(value)}) "
                        f"than rank 0 on {by_rank[0]['host']} ({_shortened(first)}); start every "
                        "rank with the same command, files and versions"
                    )

    def check_own_gpu(self, local: int) -> None:
        """Refuse two processes on one GPU, as two torchruns on one machine start them; NCCL would
        end them as if one was lost.

        Args:
            local: The number of this process's GPU.
        """
        import torch

        uuid = (
            str(torch.cuda.get_device_properties(local).uuid) if torch.cuda.is_available() else ""
        )
        by_rank, users = self.all_gather_object([socket.gethostname(), uuid]), dict[str, int]()
        for rank, (host, gpu) in enumerate(by_rank):
            if gpu and (other := users.setdefault(gpu, rank)) != rank:
                raise UserError(
                    f"ranks {other} and {rank} on {host} use the same GPU ({gpu}); start one "
                    "torchrun on each machine, with --nproc-per-node of at most its GPUs"
                )

    @contextmanager
    def exchange(self, num_bytes: int) -> Iterator[None]:
        """Count an exchange in which this rank sends so many bytes, and name what its failure
        means."""
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            from ditkit_core.io.memory import is_out_of_memory

            if is_out_of_memory(error):
                raise
            raise lost_in(error) from error
        self.seconds_waited += time.perf_counter() - began
        self.bytes_sent += num_bytes


def _summed(tensor: "Tensor", size: int) -> int:
    """Bytes that a rank sends for a sum that all ranks get."""
    return 2 * tensor.nbytes * (size - 1) // size


def world() -> Ranks | None:
    """The ranks of the process group, whoever started it; None if there is none. For training loops
    of your own (`distributed/fsdp.py`)."""
    dist = distributed()
    return Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def _shortened(value: str) -> str:
    return value if len(value) <= 80 else f"{value[:80]}..."


def is_broken_exchange(error: Exception) -> bool:
    """Whether an exchange of torch's own failed, such as FSDP2's exchanges, which do not go through
    `Ranks`."""
    return isinstance(error, distributed().DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def lost_in(error: Exception) -> RankLost:
    """What the failure of an exchange means."""
    return RankLost(
        f"the connection to another rank broke ({reason_of(error)}): that process ended, its own "
        "message or torchrun's summary says why; the same command continues from the last save"
    )


def reason_of(error: Exception) -> str:
    """The first line of torch's message, without the place in its source."""
    return str(error).splitlines()[0].rpartition("] ")[2][:100]


@cache
def distributed() -> Any:
    """torch.distributed, imported now: help and mistakes do without torch."""
    import torch.distributed

    # A thread of gloo drops the tensors of the last exchange once it has Python's lock, and a
    # thread that asks for the lock while Python ends aborts the process ("terminate called without
    # an active exception"); asleep, this thread leaves it the lock.
    atexit.register(time.sleep, 0.1)
    return torch.distributed
