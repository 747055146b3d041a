"""The processes that train one run together: the only module that asks for a rank, or calls torch.distributed in a run.

torchrun starts the processes, and `joined` connects them. A process alone is rank 0 of 1: it divides nothing and waits for nobody, so
that callers need no second path.

What ranks exchange on the host goes over gloo, with no time limit: a rank may encode, compile or generate samples for hours. What ends
a run is a rank that stops: every process shows a sign of life in torchrun's store, and a thread ends the process when `ranks.timeout`
seconds pass without that of another.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError
from ditkit_core.io.console import complain, mute

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_WITHOUT_LIMIT = timedelta(days=365)
_JOINING = 300.0
"""Seconds that ranks have to start: most import torch from a disk that all of them read."""
_GRACE = 5.0
"""Seconds that a process has to end by itself once another one has failed, before its thread ends it."""


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """The `[ranks]` section, for a run that torchrun starts as several processes. Nothing in it changes a result."""

    timeout: float = setting(120.0, resume="free")
    """Seconds without a sign of life of a process after which the run ends. A process that works may take any time."""

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

    def summed(self, numbers: "Tensor") -> "Tensor":
        """The sum of the ranks' tensors, which is exact where all but one rank have zeros."""
        if self.size == 1:
            return numbers
        total = numbers.clone()
        with self._exchange(total):
            _distributed().all_reduce(total)
        return total

    def sent(self, tensor: "Tensor", to: int) -> None:
        """Send a tensor to a rank that receives it."""
        with self._exchange(tensor):
            _distributed().send(tensor, to)

    def received(self, buffer: "Tensor", source: int) -> "Tensor":
        """The tensor that a rank sent, in `buffer`."""
        with self._exchange():
            _distributed().recv(buffer, source)
        return buffer

    def from_first(self, tensor: "Tensor") -> "Tensor":
        """The first rank's tensor, written into this one on the others."""
        if self.size > 1:
            with self._exchange(tensor if self.is_first else None):
                _distributed().broadcast(tensor, 0)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        import torch

        return bool(self.summed(torch.tensor([float(flag)])) > 0)

    def total(self, numbers: Iterable[float]) -> float:
        """The sum of whole numbers over all ranks."""
        import torch

        return float(self.summed(torch.tensor(float(sum(numbers)), dtype=torch.float64)))

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks; JSON must be able to store it."""
        if self.size == 1:
            return [value]
        import torch

        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(text)
        lengths = [int(length) for length in self.summed(sizes)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        found = [torch.empty_like(padded) for _ in range(self.size)]
        with self._exchange(padded):
            _distributed().all_gather(found, padded)
        return [json.loads(each[:length].numpy().tobytes()) for each, length in zip(found, lengths, strict=True)]

    def as_first(self, value: T) -> T:
        """The first rank's value; JSON must be able to store it."""
        return cast(T, self.gathered(value if self.is_first else None)[0])

    def first(self, work: Callable[[], T]) -> T:
        """The result of work that only the first rank does, while the others wait however long; JSON must be able to store it."""
        return cast(T, self.as_first(work() if self.is_first else None))

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Do work on the first rank, and then on the others, which find its files."""
        if self.is_first:
            result = work()
            self.any(False)
            return result
        self.any(False)
        return work()

    def check_same(self, about: Mapping[str, str]) -> None:
        """Refuse ranks that differ from the first in something that must be the same, by name.

        Raises:
            UserError: With the first difference; on all ranks.
        """
        found = self.gathered({"host": socket.gethostname(), **about})
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
            raise RankLost(
                f"the connection to another rank broke ({_reason(error)}): that process ended, its own message or torchrun's summary says "
                "why; the same command continues from the last save"
            ) from error
        self.seconds_waited += time.perf_counter() - began
        self.bytes_sent += 0 if tensor is None else tensor.nbytes


def world() -> Ranks | None:
    """The ranks of the process group, whoever started it; None if there is none. For training loops of your own (`engine/fsdp.py`)."""
    dist = _distributed()
    return Ranks(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def _reason(error: Exception) -> str:
    """The first line of torch's message, without the place in its source."""
    return str(error).splitlines()[0].rpartition("] ")[2][:100]


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


@dataclass
class _Launch:
    """What torchrun tells a process."""

    rank: int
    size: int
    local: int
    num_local: int


def launched() -> _Launch | None:
    """What torchrun told this process; None for a process alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [os.environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values) or int(values[1]) < 2:
        return None
    return _Launch(*map(int, values))


def local_rank() -> int:
    """The number of this process among those on this machine, which is that of its GPU; 0 for a process alone."""
    launch = launched()
    return 0 if launch is None else launch.local


_present = Ranks()


def present_ranks() -> Ranks:
    """The ranks of this process inside `joined`; else a process alone."""
    return _present


@contextmanager
def joined(config: RanksConfig, about: Mapping[str, str]) -> Iterator[Ranks]:
    """Connect the processes that torchrun started, until the block ends.

    Args:
        config: The `[ranks]` section.
        about: What must be the same for all ranks, by name: versions, settings.

    Raises:
        UserError: If a rank does not start, or ranks differ in something, or two would use one GPU.
    """
    global _present
    if (launch := launched()) is None:
        yield Ranks()
        return
    import torch

    from ditkit_core.io.memory import is_out_of_memory

    dist, store = torch.distributed, _store(launch)
    watch, finished = _Watch(store, launch, config.timeout), False
    if launch.rank:
        mute()
    try:
        _refuse_shared_gpus(launch)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(launch.local)
        watch.start()
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size, timeout=_WITHOUT_LIMIT)
        ranks = _present = Ranks(launch.rank, launch.size)
        ranks.check_same(about)
        yield ranks
        finished = True
    except UserError as error:
        watch.report(str(error), is_consequence=isinstance(error, RankLost))
        mute()
        raise
    except (RuntimeError, MemoryError) as error:
        # What explains it is printed by this rank, wherever it is.
        if is_out_of_memory(error) and watch.report("out of memory"):
            mute(False)
        raise
    finally:
        _present = Ranks()
        watch.end(finished=finished)
    dist.destroy_process_group()


def _refuse_shared_gpus(launch: _Launch) -> None:
    import torch

    gpus = torch.cuda.device_count()
    if gpus and launch.num_local > gpus:
        raise UserError(
            f"torchrun started {launch.num_local} processes on {socket.gethostname()}, which has {gpus} GPUs; set --nproc-per-node {gpus}"
        )


def complain_once(message: str) -> None:
    """Print why the command ends, before its processes are connected; a message that all of them have is printed by one."""
    if (launch := launched()) is None:
        complain(f"error: {message}")
    else:
        mute()
        _Watch(_store(launch, wait=False), launch, _GRACE).report(message)


def _store(launch: _Launch, *, wait: bool = True) -> "Store":
    """The store that torchrun's processes meet at; `wait` until all of them are there."""
    dist = _distributed()
    try:
        whole, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOINING)))
        # After a restart the store may still have what the processes before it wrote.
        store = dist.PrefixStore(f"ditkit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", whole)
        store.set(f"here/{launch.rank}", socket.gethostname())
        store.set(f"alive/{launch.rank}", "0")
        missing = [rank for rank in range(launch.size) if wait and not _comes(store, f"here/{rank}")]
    except (RuntimeError, ValueError) as error:
        reason = _reason(error)
        raise UserError(
            f"the processes cannot meet at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} ({reason}); start them with "
            "torchrun, and check that its machines reach each other"
        ) from error
    if missing:
        raise UserError(f"rank {missing[0]} of {launch.size} did not start within {_JOINING:g} s; look at its output")
    return cast("Store", store)


def _comes(store: "Store", key: str) -> bool:
    try:
        store.wait([key], timedelta(seconds=_JOINING))
    except RuntimeError:
        return False
    return True


class _Watch(threading.Thread):
    """Shows this process's sign of life, and ends the process if another one shows none, or has failed.

    Rank 0 looks at all others and they at rank 0, so that the store answers few questions. The thread runs while the main thread waits in
    an exchange, where Python handles no signal.
    """

    def __init__(self, store: "Store", launch: _Launch, timeout: float):
        super().__init__(daemon=True, name="ditkit-ranks")
        self._main, self._own, self._launch, self._timeout = store, store.clone(), launch, timeout
        self._interval = min(2.0, timeout / 4)
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until the process leaves."""
        others = range(1, self._launch.size) if self._launch.rank == 0 else range(1)
        known, silent, count, failed = dict.fromkeys(others, b""), dict.fromkeys(others, 0.0), 0, 0.0
        while not self._ended.wait(self._interval):
            count += 1
            try:
                self._own.set(f"alive/{self._launch.rank}", str(count))
                signs = self._own.multi_get([f"alive/{rank}" for rank in others])
                failed += self._interval if self._own.check(["failed"]) else 0.0
            except RuntimeError as error:
                self._leave_process(f"torchrun's store cannot be reached ({_reason(error)})")
                return
            if failed > _GRACE:
                os._exit(1)
            for rank, sign in zip(others, signs, strict=True):
                # Counted in this thread's own rounds: a process that was stopped itself must not blame the others for that time.
                silent[rank] = 0.0 if sign in (b"left", b"") or sign != known[rank] else silent[rank] + self._interval
                known[rank] = sign
                if silent[rank] > self._timeout:
                    host = self._own.get(f"here/{rank}").decode()
                    self._leave_process(
                        f"rank {rank} of {self._launch.size} on {host} showed no sign of life for {self._timeout:g} s (ranks.timeout): it "
                        "hangs or is stopped; look at that machine, the same command continues from the last save"
                    )

    def _leave_process(self, message: str) -> None:
        """End the process from this thread: the main one waits for something that will not come."""
        if not self._ended.is_set():
            self.report(message)
            sys.stderr.flush()
            os._exit(1)

    def report(self, message: str, *, is_consequence: bool = False) -> bool:
        """Print why the process ends and on which rank, and give it to torchrun's summary, unless another rank has failed before.

        Args:
            message: What happened, and what to do.
            is_consequence: Whether another rank probably caused it; that one gets the time to say so.

        Returns:
            Whether it was printed.
        """
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        if is_consequence:
            self._wait_for_cause()
        if not self._is_first_to_fail():
            return False
        where = f"rank {self._launch.rank} of {self._launch.size} on {socket.gethostname()}"
        complain(f"error: {where}: {message}")
        get_error_handler().record_exception(UserError(f"{where}: {message}"))
        return True

    def _is_first_to_fail(self) -> bool:
        own = str(self._launch.rank)
        try:
            return bool(self._own.compare_set("failed", "", own) == own.encode())
        except RuntimeError:
            return True  # the store is gone, so that nobody else can be asked

    def _wait_for_cause(self) -> None:
        end = time.monotonic() + _GRACE / 2
        with suppress(RuntimeError):
            while time.monotonic() < end and not self._own.check(["failed"]):
                time.sleep(0.05)

    def end(self, *, finished: bool) -> None:
        """Stop looking; the others then need no sign of life of a process that has finished, and no word of theirs of one that failed."""
        self._ended.set()
        if self.is_alive():
            self.join(_GRACE)
        if not finished:
            self._is_first_to_fail()
        else:
            with suppress(RuntimeError):
                self._main.set(f"alive/{self._launch.rank}", "left")
