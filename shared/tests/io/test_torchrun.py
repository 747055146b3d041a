"""The heartbeat by which ranks know that another one has stopped, in rounds of its own and not in seconds of a clock; and GPUs that do not suffice."""

import socket
import sys
from typing import Any

import pytest
import torch

from ditkit_core.errors import UserError
from ditkit_core.io import torchrun
from ditkit_core.io.ranks import WITHOUT_LIMIT, Ranks


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
    """Counts the rounds of a heartbeat in place of waiting for them, and lets the other rank act in each."""

    def __init__(self, act: Any = lambda number: False):
        self.number, self._act = 0, act

    def wait(self, seconds: float) -> bool:
        self.number += 1
        return self._act(self.number)

    def is_set(self) -> bool:
        return False


class Ended(Exception):
    """The process ended."""


class Summary:
    """What torchrun's summary gets."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def get_error_handler(self) -> "Summary":
        return self

    def record_exception(self, error: Exception) -> None:
        self.said.append(str(error))


@pytest.fixture
def summary() -> Summary:
    return Summary()


@pytest.fixture
def heartbeat(monkeypatch: pytest.MonkeyPatch, summary: Summary) -> Any:
    def end(status: int) -> None:
        raise Ended

    monkeypatch.setattr(torchrun.os, "_exit", end)
    # In place of a module that takes seconds to import.
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.multiprocessing.errors", summary)

    def make(store: Store, timeout: float, rounds: Rounds) -> Any:
        made = torchrun._Heartbeat(store, torchrun._Launch(rank=0, size=2, local=0, num_local=2), timeout)
        made._ended, made.ranks = rounds, Ranks(0, 2, step=8)
        return made

    return make


@pytest.mark.parametrize("timeout", [1.0, 3.0, 120.0])
def test_a_rank_that_stops_ends_the_run_within_its_timeout_and_ten_seconds(heartbeat, summary, timeout, capsys):
    store, rounds = Store(alive_1="7 12", here_1="elsewhere"), Rounds()
    made = heartbeat(store, timeout, rounds)
    with pytest.raises(Ended):
        made.run()
    assert timeout < rounds.number * made._interval <= timeout + 10
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: rank 0 of 2 on {socket.gethostname()} in step 8: rank 1 of 2 on elsewhere in step 12 sent no heartbeat for {timeout:g} s"
    )
    assert summary.said == [line.removeprefix("error: ")]
    assert store.get("alive/0").endswith(b" 8"), "this rank's own heartbeat has its step"


def test_a_rank_that_beats_or_has_left_may_take_any_time(heartbeat, capsys):
    store = Store(alive_1="0", here_1="elsewhere")

    def act(number: int) -> bool:
        store.set("alive/1", f"{number} 3" if number < 500 else "left")
        return number == 1000

    heartbeat(store, 1.0, Rounds(act)).run()
    assert capsys.readouterr().err == ""


def test_two_ranks_do_not_share_a_gpu(monkeypatch):
    launch = torchrun._Launch(rank=0, size=4, local=0, num_local=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torchrun._refuse_shared_gpus(launch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"started 2 processes on \S+, which has 1 GPUs; set --nproc-per-node 1"):
        torchrun._refuse_shared_gpus(launch)


def test_gpus_without_nccl_are_refused_with_what_works(monkeypatch):
    """As on Windows; replicas on a CPU need gloo alone."""
    launch, started = torchrun._Launch(rank=0, size=2, local=0, num_local=2), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **given: started.append((backend, given["timeout"]))
    )
    with pytest.raises(UserError, match=r"this torch has no NCCL, .* train on one GPU, or set train.device = cpu"):
        torchrun._connect(launch, Store(), on_gpus=True)
    assert not started
    torchrun._connect(launch, Store(), on_gpus=False)
    assert started == [("gloo", WITHOUT_LIMIT)], "a rank may encode, compile or generate samples for hours"
