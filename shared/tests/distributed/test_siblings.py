"""The ranks that one torchrun has started: who of them runs, and that only one of them is ever
killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ditkit_core.distributed import siblings as module
from ditkit_core.distributed.siblings import Process, siblings

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes are read from /proc"
)


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process that is stopped."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


@pytest.fixture
def child_as_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's children are its siblings."""
    monkeypatch.setattr(module.os, "getppid", os.getpid)


@pytest.mark.usefixtures("child_as_sibling")
def test_a_stopped_sibling_is_killed(stopped):
    sibling = Process(stopped.pid, "")
    assert not sibling.has_ended
    sibling.kill()
    assert stopped.wait(60) == -signal.SIGKILL
    assert sibling.has_ended
    sibling.kill()


def test_no_other_process_is_killed(stopped):
    """It is a child of this process, and none of this process's parent."""
    other = Process(stopped.pid, "")
    assert other.has_ended
    other.kill()
    stopped.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(0.3)


@pytest.mark.usefixtures("child_as_sibling")
def test_a_sibling_that_nobody_has_waited_for_has_ended(stopped):
    stopped.kill()
    os.waitid(os.P_PID, stopped.pid, os.WEXITED | os.WNOWAIT)
    assert Process(stopped.pid, "").has_ended


@pytest.mark.usefixtures("child_as_sibling")
def test_siblings_are_those_of_this_start_that_run(stopped, monkeypatch, tmp_path):
    """Another container can have the same numbers of processes; torchrun's folders differ."""
    files = [
        str(tmp_path / start / str(rank) / "error.json")
        for start, rank in (("a", 0), ("a", 1), ("b", 0), ("a", 2))
    ]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", files[0])
    places = [
        (os.getpid(), files[0]),
        (stopped.pid, files[1]),
        (stopped.pid, files[2]),
        (2**22 + 1, files[3]),
    ]
    assert siblings(places) == {1: Process(stopped.pid, files[1])}
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert siblings([(os.getpid(), ""), (stopped.pid, "")]) == {}
