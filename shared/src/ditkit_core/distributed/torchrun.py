"""Connects the processes that torchrun starts, and ends each of them when another one has failed or
sends no heartbeat.

What ranks exchange on the host goes over gloo, with no time limit: a rank may encode, compile or
generate samples for hours. What ends a run is a rank that stops: every process writes a heartbeat
into torchrun's store, and a thread ends the process when `ranks.timeout` seconds pass without
another's heartbeat.

Whatever ends a run, one line names the rank, its machine, the step and what to do. The others print
it of a rank that was killed; torchrun's summary has what every rank has written in advance for
that.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from ditkit_core.distributed.launch import Launch, launched
from ditkit_core.distributed.ranks import (
    WITHOUT_LIMIT,
    RankLost,
    Ranks,
    RanksConfig,
    distributed,
    is_broken_exchange,
    lost_in,
    reason_of,
)
from ditkit_core.distributed.siblings import Process, refuse_shared_gpus, siblings
from ditkit_core.errors import Interrupted, UserError
from ditkit_core.io.console import complain, mute
from ditkit_core.io.signals import Interrupts, signals_by_default

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_START_SECONDS = 300.0
"""Seconds that ranks have to start: most import torch from a disk that all of them read."""
_GRACE = 5.0
"""Seconds that a process has to end by itself once another one has failed, before its thread ends
it."""
_LOST = (
    "it was killed or crashed (torchrun's summary has its exit code; -9 often means that its "
    "machine ran out of memory); the same command continues from the last save"
)


_present = Ranks()


def current_ranks() -> Ranks:
    """The ranks of this process inside `joined`; else a process alone."""
    return _present


@contextmanager
def joined_ranks(config: RanksConfig, device: str, about: Mapping[str, str]) -> Iterator[Ranks]:
    """Connect the processes that torchrun started, until the block ends on all of them.

    Args:
        config: The `[ranks]` section.
        device: Where the run trains, as in `train.device`.
        about: What must be the same for all ranks, by name: versions, settings.
    """
    global _present
    if (launch := launched()) is None:
        yield Ranks()
        return
    dist, store = distributed(), _store(launch)
    watch, finished = _Heartbeat(store, launch, config.timeout), False
    watch.summarize_loss(0)
    watch.start()
    if launch.rank:
        mute()
    try:
        kind = _connect(launch, store, on_gpus=device != "cpu")
        ranks = _present = Ranks(
            launch.rank, launch.size, shard=config.shard, on_step=watch.summarize_loss
        )
        ranks.check_same({"kind of device": kind, **about})
        if device != "cpu":
            ranks.check_own_gpu(launch.local)
        process = Process.this()
        watch.siblings = siblings(ranks.all_gather_object((process.pid, process.error_file)))
        ranks = _present = watch.ranks = ranks.grouped(config.context)
        try:
            yield ranks
        except Interrupted:
            ranks.barrier()  # nobody leaves while another rank still saves
            finished = True
            raise
        # nor while one exports or samples: torchrun ends a run whose processes end far apart
        ranks.barrier()
        finished = True
    except (UserError, RuntimeError, MemoryError) as error:
        # torchrun's SIGTERM, because another rank ended, must not replace the line that says so
        with Interrupts():
            failure = watch.explain(error)
        if failure is None:
            raise
        mute()
        if failure is error:
            raise
        raise failure from error
    except KeyboardInterrupt as stopped:
        with Interrupts():
            # torchrun's SIGTERM comes wherever a rank is, also where it exchanges nothing, and
            # while an exchange that broke is on its way out.
            if (broken := _broken_exchange_before(stopped)) is not None:
                watch.explain(broken)
                mute()
            elif (lost := watch.ended_sibling()) is not None and watch.report(_LOST, of=lost):
                mute()
        raise
    finally:
        _present = Ranks()
        watch.end(finished=finished)
    dist.destroy_process_group()


def _broken_exchange_before(error: BaseException) -> Exception | None:
    """The failure of an exchange during whose handling an error came."""
    while (before := error.__context__) is not None:
        if isinstance(before, RankLost) or (
            isinstance(before, Exception) and is_broken_exchange(before)
        ):
            return before
        error = before
    return None


def _connect(launch: Launch, store: "Store", *, on_gpus: bool) -> str:
    """Start the process group: gloo for what is on the host, and NCCL where the run trains on GPUs;
    which kind of device this rank trains on."""
    import torch

    dist, backend, kind = distributed(), "gloo", "cpu"
    if on_gpus and torch.cuda.is_available():
        refuse_shared_gpus(launch.num_local)
        if not dist.is_nccl_available():
            raise UserError(
                "this torch has no NCCL, which several GPUs need; train on one GPU, or set "
                "train.device = cpu"
            )
        torch.cuda.set_device(launch.local)
        backend, kind = "cpu:gloo,cuda:nccl", "cuda"
    try:
        # torch waits for the others without a look at signals, also for one that is gone
        with signals_by_default():
            dist.init_process_group(
                backend,
                store=store,
                rank=launch.rank,
                world_size=launch.size,
                timeout=WITHOUT_LIMIT,
            )
    except RuntimeError as error:
        raise UserError(
            f"the ranks cannot connect to each other ({reason_of(error)}); GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME name the network device that reaches the others"
        ) from error
    return kind


def complain_once(message: str) -> None:
    """Print why the command ends, before its processes are connected; a message that all of them
    have is printed by one."""
    if (launch := launched()) is None:
        complain(f"error: {message}")
    else:
        mute()
        try:
            heartbeat = _Heartbeat(_store(launch, wait=False), launch, _GRACE)
        except (UserError, RuntimeError):
            # of two mistakes, the one that was found first; the store may end with the process of
            # rank 0
            complain(f"error: {message}")
        else:
            heartbeat.report(message)


def _store(launch: Launch, *, wait: bool = True) -> "Store":
    """The store that torchrun's processes meet at; `wait` until all of them are there."""
    dist, seconds = distributed(), _START_SECONDS if wait else _GRACE
    try:
        with signals_by_default():  # as in `_connect`
            store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
        early = dist.PrefixStore(
            f"ditkit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
        )
        if not wait:
            return cast("Store", early)
        part = _rendezvous(launch, store, early)
        # NCCL connects ranks in their first exchange, and waits here for the rank that is last: it
        # may still load, compile or train its step.
        part.set_timeout(WITHOUT_LIMIT)
        return part
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes cannot connect at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"({reason_of(error)}); start them "
            "with torchrun, and check that its machines reach each other"
        ) from error


def _rendezvous(launch: Launch, store: "Store", early: "Store") -> "Store":
    """A part of the store for these processes alone, once all of them have started.

    After a restart the store still has what the processes before it wrote, and machines count
    restarts differently. So every process writes an id of its own, and rank 0 publishes the ids
    that it has read. A process that finds its id there knows that both are running. In `early`, a
    process says why it ends before that (`complain_once`).
    """
    dist, token = distributed(), uuid.uuid4().hex
    store.set(f"ditkit/id/{launch.rank}", token)
    if launch.rank == 0:
        part = dist.PrefixStore(f"ditkit/{token}", store)
        missing, ids = set(range(1, launch.size)), dict[int, str]()
        for _ in _starting(launch, early, missing):
            for rank in list(missing):
                if store.check([f"ditkit/id/{rank}"]):
                    ids[rank] = store.get(f"ditkit/id/{rank}").decode()
                if part.check([f"here/{rank}"]):
                    missing.discard(rank)
            store.set("ditkit/round", json.dumps([token, ids]))
        part.set("alive/0", "0")
        part.set("here/0", socket.gethostname())
        return cast("Store", part)
    missing = {0}
    for _ in _starting(launch, early, missing):
        first, published = (
            json.loads(store.get("ditkit/round")) if store.check(["ditkit/round"]) else ("", {})
        )
        if published.get(str(launch.rank)) == token:
            part = dist.PrefixStore(f"ditkit/{first}", store)
            part.set(f"alive/{launch.rank}", "0")
            part.set(f"here/{launch.rank}", socket.gethostname())
            missing -= {0} if part.check(["here/0"]) else set()
    return cast("Store", part)


def _starting(launch: Launch, early: "Store", missing: "set[int]") -> Iterator[None]:
    """Look for the missing ranks again and again. In a wait inside of torch, Python would handle no
    signal, such as torchrun's own."""
    end = time.monotonic() + _START_SECONDS
    while missing:
        yield
        if missing and early.check(["failed"]):
            rank, _, line = early.get("failed").decode().partition(":")
            Process.this().summarize(line)
            # one of each other machine prints it, too
            if launch.local or 0 <= int(rank) - launch.rank < launch.num_local:
                mute()
            raise UserError(line)
        if missing and time.monotonic() > end:
            raise UserError(
                f"rank {min(missing)} of {launch.size} did not start within {_START_SECONDS:g} s; "
                f"look at its output"
            )
        time.sleep(min(0.5, launch.size / 100))  # the store answers all ranks


class _Heartbeat(threading.Thread):
    """Writes the heartbeat of this process, and ends the process if another one has none, or has
    failed.

    Rank 0 looks at all others and they at rank 0, so that the store answers few questions. The
    thread runs while the main thread waits in an exchange, where Python handles no signal.
    """

    def __init__(self, store: "Store", launch: Launch, timeout: float):
        super().__init__(daemon=True, name="ditkit-ranks")
        self._main, self._clone, self._launch, self._timeout = store, store.clone(), launch, timeout
        self._interval = min(2.0, timeout / 4)
        self._ended = threading.Event()
        self.ranks = Ranks()
        """The ranks whose step is read, once they are connected."""
        self.siblings: dict[int, Process] = {}
        """The other ranks that torchrun started on this machine, once they are connected."""
        self._process, self._parent, self._reason = Process.this(), os.getppid(), ""

    def run(self) -> None:
        """Write and read heartbeats until `end`; and find a rank that was killed: torchrun kills
        this one before a long step or preview is over."""
        others = range(1, self._launch.size) if self._launch.rank == 0 else range(1)
        last_signs = dict.fromkeys(others, b"")
        silent = dict.fromkeys(others, 0.0)
        count = 0
        failed = 0.0
        while not self._ended.wait(self._interval):
            count += 1
            if os.getppid() != self._parent:
                self._end_process(
                    "its torchrun was killed; the same command continues from the last save"
                )
            try:
                self._clone.set(f"alive/{self._launch.rank}", f"{count} {self.ranks.step}")
                signs = self._clone.multi_get([f"alive/{rank}" for rank in others])
                if self._clone.check(["failed"]):
                    failed += self._interval
                    self._follow(self._clone.get("failed").decode().partition(":")[2])
                elif (lost := self.ended_sibling()) is not None and self._clone.get(
                    f"alive/{lost}"
                ) != b"left":
                    self.report(_LOST, of=lost)
            except RuntimeError as error:
                self._end_process(
                    f"torchrun's store cannot be reached ({reason_of(error)}): torchrun ended on "
                    f"the machine of rank 0, or the network to it broke; "
                    "the same command continues from the last save"
                )
                return
            if failed > _GRACE:
                os._exit(1)
            for rank, sign in zip(others, signs, strict=True):
                # Counted in this thread's own rounds: a process that was stopped itself must not
                # blame the others for that time.
                silent[rank] = (
                    0.0
                    if sign in (b"left", b"") or sign != last_signs[rank]
                    else silent[rank] + self._interval
                )
                last_signs[rank] = sign
                if silent[rank] > self._timeout:
                    self._clone.set("silent", str(rank))
                    self._end_process(
                        f"no heartbeat for {self._timeout:g} s (ranks.timeout): it hangs or is "
                        f"stopped; look at that machine, the same command "
                        "continues from the last save",
                        of=rank,
                        # ranks go through steps together
                        step=max(int(sign.split()[-1]), self.ranks.step),
                    )

    def _follow(self, line: str) -> None:
        """Let torchrun's summary have why the run ends, whatever ends this process; and end a
        silent rank of this machine.

        torchrun would wait half a minute for a process that cannot take its SIGTERM.
        """
        self._summarize(line)
        if (
            self._clone.check(["silent"])
            and (silent := self.siblings.get(int(self._clone.get("silent")))) is not None
        ):
            silent.summarize(line)
            silent.kill()

    def _end_process(self, message: str, *, of: int | None = None, step: int | None = None) -> None:
        """End the process from this thread: the main one waits for something that will not come."""
        if not self._ended.is_set():
            self.report(message, of=of, step=step)
            with suppress(RuntimeError):
                self._follow(self._reason)
            sys.stderr.flush()
            os._exit(1)

    def explain(self, error: Exception) -> UserError | None:
        """Print why an exception ends the process.

        Returns:
            What is left to raise; None for the exception itself, whose traceback says more if no
            other rank failed before.
        """
        from ditkit_core.io.memory import is_out_of_memory

        message = (str(error) or type(error).__name__).splitlines()[0][:120]
        failure: UserError | None = None
        if isinstance(error, UserError):
            failure = error
        elif is_out_of_memory(error):
            failure = UserError(
                f"out of memory ({message}); without torchrun, --plan shows what needs it and "
                f"--fit finds settings of one rank that fit"
            )
        elif is_broken_exchange(error):
            failure = lost_in(error)
        unexpected = f"unexpected {type(error).__name__}: {message}; the traceback says where, and the same command continues from the last save"
        printed = self.report(
            str(failure or unexpected), is_consequence=isinstance(failure, RankLost)
        )
        return failure or (None if printed else UserError(self._reason))

    def report(
        self,
        message: str,
        *,
        of: int | None = None,
        step: int | None = None,
        is_consequence: bool = False,
    ) -> bool:
        """Print why the process ends and which rank failed, unless another rank has failed before,
        and give it to torchrun's summary.

        The summary shows the process that ended first, which need not be the one that failed first:
        every rank gives it the same line.

        Args:
            message: What happened, and what to do.
            of: The rank that failed; this one by default.
            step: The step that it was in; this rank's step by default, since ranks go through steps
                together.
            is_consequence: Whether another rank probably caused it; that one gets the time to say
                so, and is named if it ends without.

        Returns:
            Whether it was printed.
        """
        if is_consequence and (lost := self._wait_for_cause()) is not None:
            of, message = lost, _LOST
        line = self._line(
            message,
            self._launch.rank if of is None else of,
            self.ranks.step if step is None else step,
        )
        first, is_own = self._first_to_fail(line)
        if is_own and line != self._reason:
            complain(f"error: {line}")
        self._summarize(first)
        return is_own

    def _line(self, message: str, rank: int, step: int) -> str:
        host = socket.gethostname()
        if rank != self._launch.rank:
            with suppress(RuntimeError):
                host = self._clone.get(f"here/{rank}").decode()
        return f"rank {rank} of {self._launch.size} on {host}{f' in step {step}' * (step > 0)}: {message}"

    def _summarize(self, line: str) -> None:
        if line != self._reason:
            self._reason = line
            self._process.summarize(line)

    def summarize_loss(self, step: int) -> None:
        """Leave for torchrun's summary what it should show if this process is killed, which can
        then say nothing."""
        if not self._reason:
            self._process.summarize(self._line(_LOST, self._launch.rank, step))

    def ended_sibling(self) -> int | None:
        """A rank of this machine that runs no more; None if all of them run."""
        return next((rank for rank, process in self.siblings.items() if process.has_ended), None)

    def _first_to_fail(self, line: str) -> tuple[str, bool]:
        """Why the run ends, and whether this rank is the one that says so; each rank can have the
        same line of one that is lost."""
        entry = f"{self._launch.rank}:{line}"
        try:
            first_entry = self._clone.compare_set("failed", "", entry).decode()
        except RuntimeError:
            # the store is gone, so that nobody else can be asked: one of a machine says so
            return line, self._launch.local == 0
        return first_entry.partition(":")[2], first_entry == entry

    def _wait_for_cause(self) -> int | None:
        """Wait until a rank has said why it ends; if none does, the rank that was lost, where that
        can be known.

        A rank of this machine is lost if its process has ended, one of another machine if it writes
        no heartbeat.
        """
        others = [
            rank
            for rank in range(self._launch.size)
            if rank != self._launch.rank and rank not in self.siblings
        ]
        names = [f"alive/{rank}" for rank in others]
        end = time.monotonic() + max(_GRACE / 2, 2 * self._interval + 0.5)
        with suppress(RuntimeError):
            before = self._clone.multi_get(names) if names else []
            while time.monotonic() < end:
                if self._clone.check(["failed"]):
                    return None
                if (lost := self.ended_sibling()) is not None:
                    return lost
                time.sleep(0.05)
            signs = self._clone.multi_get(names) if names else []
            return next(
                (
                    rank
                    for rank, *both in zip(others, before, signs, strict=True)
                    if both[0] == both[1]
                ),
                None,
            )
        return None

    def end(self, *, finished: bool) -> None:
        """Stop the heartbeat, and record that the process has finished, or failed: then the other
        ranks need not report it."""
        self._ended.set()
        if self.is_alive():
            self.join(_GRACE)
        if not self._reason:
            if not finished and isinstance(bug := sys.exc_info()[1], Exception):
                self.explain(bug)
            else:
                self._process.forget()
        if not finished:
            self._first_to_fail(
                f"rank {self._launch.rank} of {self._launch.size} on {socket.gethostname()} failed"
            )
        else:
            with suppress(RuntimeError):
                self._main.set(f"alive/{self._launch.rank}", "left")
