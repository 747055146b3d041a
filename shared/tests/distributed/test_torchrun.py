"""The heartbeat by which ranks know that another one has stopped, in rounds of its own and not in
seconds of a clock; and GPUs that do not suffice."""

import _thread
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ditkit_core.distributed import torchrun
from ditkit_core.distributed.launch import Launch
from ditkit_core.distributed.ranks import WITHOUT_LIMIT, RankLost, Ranks, lost_in
from ditkit_core.distributed.siblings import Process, refuse_shared_gpus
from ditkit_core.errors import UserError
from ditkit_core.io.signals import Interrupts

ENDED = Process(2**22 + 1, "")
"""Linux gives no process this number."""


class Store:
    """torchrun's store, in this process."""

    def __init__(self, **values: str):
        self.values = {name.replace("_", "/"): value.encode() for name, value in values.items()}

    def clone(self) -> "Store":
        return self

    def set(self, name: str, value: str) -> None:
        self.values[name] = value.encode()

    def get(self, name: str) -> bytes:
        return self.values[name]

    def multi_get(self, names: list[str]) -> list[bytes]:
        return [self.values[name] for name in names]

    def check(self, names: list[str]) -> bool:
        return all(name in self.values for name in names)

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        return self.values.setdefault(name, value.encode())


class Rounds:
    """Counts the rounds of a heartbeat in place of waiting for them, and lets the other rank act in
    each."""

    def __init__(self, act: Any = lambda number: False):
        self.number, self._act = 0, act

    def wait(self, seconds: float) -> bool:
        self.number += 1
        return self._act(self.number)

    def is_set(self) -> bool:
        return False


class Ended(Exception):
    """The process ended."""


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], str]:
    """What torchrun's summary has of this process."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return lambda: json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.fixture
def heartbeat(monkeypatch: pytest.MonkeyPatch, summary: Callable[[], str]) -> Any:
    def end(status: int) -> None:
        raise Ended

    monkeypatch.setattr(torchrun.os, "_exit", end)

    def make(store: Store, timeout: float, rounds: Rounds, size: int = 2) -> Any:
        made = torchrun._Heartbeat(store, Launch(rank=0, size=size, local=0, num_local=2), timeout)
        made._ended, made.ranks = rounds, Ranks(0, 2, step=8)
        return made

    return make


@pytest.mark.parametrize("timeout", [1.0, 3.0, 120.0])
def test_a_rank_that_stops_ends_the_run_within_its_timeout_and_ten_seconds(
    heartbeat, summary, timeout, capsys
):
    store, rounds = Store(alive_1="7 12", here_1="elsewhere"), Rounds()
    made = heartbeat(store, timeout, rounds)
    with pytest.raises(Ended):
        made.run()
    assert timeout < rounds.number * made._interval <= timeout + 10
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: rank 1 of 2 on elsewhere in step 12: no heartbeat for {timeout:g} s "
        f"(ranks.timeout)"
    )
    assert summary() == line.removeprefix("error: ")
    assert store.get("alive/0").endswith(b" 8"), "this rank's own heartbeat has its step"


def test_a_rank_that_beats_or_has_left_may_take_any_time(heartbeat, capsys):
    store = Store(alive_1="0", here_1="elsewhere")

    def act(number: int) -> bool:
        store.set("alive/1", f"{number} 3" if number < 500 else "left")
        return number == 1000

    heartbeat(store, 1.0, Rounds(act)).run()
    assert capsys.readouterr().err == ""


def test_a_rank_of_another_machine_that_is_lost_is_named(heartbeat, summary, capsys):
    """It sends no heartbeat after the exchange with it broke; rank 1 does."""

    class Beating(Store):
        def multi_get(self, names: list[str]) -> list[bytes]:
            self.set("alive/1", f"{time.monotonic()} 8")
            return super().multi_get(names)

    made = heartbeat(
        Beating(alive_1="1 8", alive_2="7 8", here_2="elsewhere"), 1.0, Rounds(), size=3
    )
    assert isinstance(made.explain(lost_in(RuntimeError("closed"))), RankLost)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 2 of 3 on elsewhere in step 8: it was killed or crashed (")
    assert line.endswith(
        "the same command continues from the last save"
    ) and summary() == line.removeprefix("error: ")


def test_a_rank_that_says_why_it_ends_is_not_taken_for_lost(heartbeat, summary, capsys):
    store = Store(alive_1="1 8")
    made = heartbeat(store, 1.0, Rounds())
    made.siblings = {1: ENDED}
    store.set("failed", "1:rank 1 of 2 on elsewhere in step 8: no luck")
    assert isinstance(made.explain(lost_in(RuntimeError("closed"))), RankLost)
    assert (
        capsys.readouterr().err == "" and summary() == "rank 1 of 2 on elsewhere in step 8: no luck"
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection reset by peer"),
        torch.distributed.DistError("x"),
    ],
)
def test_of_a_broken_exchange_of_torch_the_lost_rank_is_said_and_no_traceback(
    heartbeat, capsys, error
):
    made = heartbeat(Store(here_1="here"), 1.0, Rounds())
    made.siblings = {1: ENDED}
    assert isinstance(made.explain(error), RankLost)
    assert capsys.readouterr().err.startswith(
        "error: rank 1 of 2 on here in step 8: it was killed or crashed"
    )


def test_one_of_several_ranks_says_which_one_is_lost(heartbeat, summary, capsys):
    """All of them find the same."""
    store = Store(here_1="here", alive_0="1 8", alive_2="1 8", alive_3="1 8")
    for rank in (0, 2, 3):
        made = heartbeat(store, 1.0, Rounds(), size=4)
        made._launch.rank, made.siblings = rank, {1: ENDED}
        assert isinstance(made.explain(lost_in(RuntimeError("closed"))), RankLost)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 1 of 4 on here in step 8: it was killed") and line.endswith(
        summary()
    )


def test_a_bug_keeps_its_traceback_on_the_rank_that_had_it_first(heartbeat, summary, capsys):
    store = Store()
    assert heartbeat(store, 1.0, Rounds()).explain(ValueError("a bug")) is None
    line = capsys.readouterr().err.strip()
    assert re.match(
        r"error: rank 0 of 2 on \S+ in step 8: unexpected ValueError: a bug; the traceback", line
    )
    assert isinstance(heartbeat(store, 1.0, Rounds()).explain(ValueError("after it")), UserError)
    assert capsys.readouterr().err == "" and summary() == line.removeprefix("error: ")
    other = heartbeat(Store(), 1.0, threading.Event())
    try:
        raise KeyError("of a kind that nobody catches")
    except KeyError:
        other.end(finished=False)
    assert (
        "in step 8: unexpected KeyError: 'of a kind that nobody catches'; the traceback"
        in summary()
    )


def test_the_summary_of_a_rank_that_is_killed_names_its_step_and_nothing_is_left_of_one_that_ends_well(
    heartbeat, summary, tmp_path
):
    made = heartbeat(Store(), 1.0, Rounds())
    made.summarize_loss(1000)
    made.summarize_loss(9)
    assert re.match(r"rank 0 of 2 on \S+ in step 9: it was killed or crashed", summary())
    made.report("no luck")
    made.summarize_loss(10)
    assert summary().endswith(" in step 8: no luck")
    other = heartbeat(Store(), 1.0, threading.Event())
    other.summarize_loss(0)
    other.end(finished=True)
    assert not (tmp_path / "error.json").exists()


def test_a_line_of_any_length_fits_into_the_summary(summary):
    for line in ("é" * 5000, '"' * 5000, "x"):
        Process.this().summarize(line)
        assert summary() and line.startswith(summary())


def test_a_rank_of_the_machine_that_was_killed_ends_one_that_exchanges_nothing(
    heartbeat, summary, capsys
):
    """As in a preview, or in a step longer than torchrun's 30 seconds."""
    store, rounds = Store(alive_1="1 8", here_1="here"), Rounds()
    made = heartbeat(store, 120.0, rounds)
    made.siblings = {1: ENDED}
    with pytest.raises(Ended):
        made.run()
    assert rounds.number * made._interval <= 10
    assert made.report(torchrun._LOST, of=1), "the main thread finds the same"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 1 of 2 on here in step 8: it was killed") and line.endswith(
        summary()
    )


def test_a_rank_of_the_machine_that_has_finished_is_not_lost(heartbeat, capsys):
    made = heartbeat(
        Store(alive_1="left", here_1="here"), 120.0, Rounds(lambda number: number == 20)
    )
    made.siblings = {1: ENDED}
    made.run()
    assert capsys.readouterr().err == ""


def test_a_rank_whose_torchrun_was_killed_ends(heartbeat, monkeypatch, summary, capsys):
    made = heartbeat(Store(alive_1="1 8"), 120.0, Rounds())
    monkeypatch.setattr(torchrun.os, "getppid", lambda: 1)
    with pytest.raises(Ended):
        made.run()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(
        r"error: rank 0 of 2 on \S+ in step 8: its torchrun was killed; the same command continues",
        line,
    )
    assert summary() == line.removeprefix("error: ")


def test_of_a_store_that_is_gone_one_rank_of_a_machine_speaks(heartbeat, capsys):
    class Gone(Store):
        def set(self, name: str, value: str) -> None:
            raise RuntimeError("[socket.cpp:1] Broken pipe")

        def check(self, names: list[str]) -> bool:
            return bool(self.set("", ""))

        def compare_set(self, name: str, expected: str, value: str) -> bytes:
            return bytes(self.check([]))

    for local in (0, 1):
        made = heartbeat(Gone(), 120.0, Rounds())
        made._launch.local = local
        with pytest.raises(Ended):
            made.run()
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "torchrun's store cannot be reached (Broken pipe): torchrun ended on the machine of rank "
        "0, or" in line
    )
    assert line.endswith("the same command continues from the last save")


def test_a_signal_ends_a_rank_that_waits_for_one_that_starts_late(monkeypatch):
    """Two are there and the third is not; a wait inside of torch would end after two minutes."""
    monkeypatch.setattr(torchrun, "_START_SECONDS", 120.0)
    monkeypatch.setattr(torchrun, "mute", lambda: None)  # of this process, at the end of the first
    store, began = torch.distributed.HashStore(), time.monotonic()
    early = torch.distributed.PrefixStore("0", store)

    def start(rank: int) -> None:
        torchrun._rendezvous(Launch(rank, 3, rank, 3), store, early)

    def first() -> None:
        with suppress(UserError):
            start(0)

    thread = threading.Thread(target=first)
    thread.start()

    def end(*given: Any) -> None:
        raise Ended

    timer, before = threading.Timer(0.5, _thread.interrupt_main), signal.signal(signal.SIGINT, end)
    timer.start()
    try:
        with pytest.raises(Ended):
            start(1)
        assert time.monotonic() - began < 100
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
        early.set("failed", "2:it starts no more")  # which ends the wait of the first
        thread.join()


def test_ranks_wait_in_the_store_as_long_as_in_an_exchange(monkeypatch):
    """There NCCL waits for the rank that comes last to their first exchange."""
    whole = torch.distributed.HashStore()
    whole.set_timeout(timedelta(seconds=0.1))  # in place of the limit of the start
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda url, timeout: iter([(whole, 1, 2)]))
    for name, value in (
        ("ditkit/round", '["first", {"1": "own"}]'),
        ("ditkit/first/here/0", "elsewhere"),
    ):
        whole.set(name, value)
    monkeypatch.setattr(torchrun.uuid, "uuid4", lambda: SimpleNamespace(hex="own"))
    store = torchrun._store(Launch(1, 2, 1, 2))
    late = threading.Timer(0.3, whole.set, ("ditkit/first/key", "value"))
    late.start()
    assert store.get("key") == b"value"
    late.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_before_all_are_there_ends_the_wait_of_the_others(summary, rank):
    """As of a flag or a path that is wrong on its machine alone."""
    store, line = (
        torch.distributed.HashStore(),
        "rank 2 of 3 on elsewhere: data.folder /d does not exist",
    )
    early = torch.distributed.PrefixStore("0", store)
    early.set("failed", f"2:{line}")
    with pytest.raises(UserError) as found:
        torchrun._rendezvous(Launch(rank, 3, 0, 1), store, early)
    assert str(found.value) == line == summary()


@pytest.mark.parametrize("port", ["x", ""])
def test_a_mistake_is_said_where_no_store_can_be_reached(monkeypatch, capsys, port):
    given = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }
    for name, value in (given | {"MASTER_PORT": port or _closed_port()}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "mute", lambda: None)
    monkeypatch.setattr(torchrun, "_GRACE", 0.2)
    torchrun.complain_once("unknown key --nope")
    assert capsys.readouterr().err == "error: unknown key --nope\n"


def test_a_mistake_is_said_where_the_store_ends_with_its_rank(monkeypatch, capsys):
    class Ending:
        def clone(self):
            raise torch.distributed.DistNetworkError("The client socket has timed out after 5000ms")

    monkeypatch.setattr(torchrun, "launched", lambda: Launch(rank=1, size=2, local=1, num_local=2))
    monkeypatch.setattr(torchrun, "mute", lambda: None)
    monkeypatch.setattr(torchrun, "_store", lambda launch, wait: Ending())
    torchrun.complain_once("unknown key --nope")
    assert capsys.readouterr().err == "error: unknown key --nope\n"


def _closed_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def test_signals_end_a_rank_that_torch_connects(monkeypatch):
    """torch waits there for ranks that are gone, and Python would handle no signal."""
    seen: list[Any] = []
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda *given, **named: seen.append(signal.getsignal(signal.SIGTERM)),
    )
    with Interrupts():
        before = signal.getsignal(signal.SIGTERM)
        torchrun._connect(Launch(rank=0, size=2, local=0, num_local=2), Store(), on_gpus=False)
        assert signal.getsignal(signal.SIGTERM) == before
    assert seen == [signal.SIG_DFL]


def test_two_ranks_do_not_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refuse_shared_gpus(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        UserError, match=r"started 2 processes on \S+, which has 1 GPUs; set --nproc-per-node 1"
    ):
        refuse_shared_gpus(2)


def test_processes_of_two_torchruns_do_not_share_a_gpu(monkeypatch):
    """Each of them has the machine's first one, and fewer processes than GPUs."""

    class Second(Ranks):
        def all_gather_object(self, value):
            return [["here", "GPU-a"], value]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpu, refused in (
        ("GPU-b", ""),
        ("GPU-a", r"^ranks 0 and 1 on \S+ use the same GPU \(GPU-a\); start one torchrun"),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda local, gpu=gpu: SimpleNamespace(uuid=gpu)
        )
        with pytest.raises(UserError, match=refused) if refused else nullcontext():
            Second(1, 2).check_own_gpu(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Second(1, 2).check_own_gpu(0)


def test_gpus_without_nccl_are_refused_with_what_works(monkeypatch):
    """As on Windows; replicas on a CPU need gloo alone."""
    launch, started = Launch(rank=0, size=2, local=0, num_local=2), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, **given: started.append((backend, given["timeout"])),
    )
    with pytest.raises(
        UserError, match=r"this torch has no NCCL, .* train on one GPU, or set train.device = cpu"
    ):
        torchrun._connect(launch, Store(), on_gpus=True)
    assert not started
    assert torchrun._connect(launch, Store(), on_gpus=False) == "cpu"
    assert started == [("gloo", WITHOUT_LIMIT)], (
        "a rank may encode, compile or generate samples for hours"
    )
