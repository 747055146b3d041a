"""What every test of the repository runs under, in each pytest-xdist worker: one thread, no
network, checked shapes."""

import atexit
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Set before torch starts. Workers share the cores, and results are compared bitwise, which needs a
# fixed thread count.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
# A subprocess that a test starts inherits it, as it does the threads.
os.environ["HF_HUB_OFFLINE"] = "1"
# Containers often forbid Python to keep what it compiles: each process that a test starts would
# then compile torch's sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# As in a shell's background job, in which tests send it all the same.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent
HELPERS = [
    ROOT / "tools",
    *sorted(folder for folder in (ROOT / "tools").iterdir() if folder.is_dir()),
    ROOT / "tests",
    ROOT / "shared" / "tests" / "support",
    *sorted(ROOT.glob("packages/*/tests/support")),
    ROOT / "ui" / "tests" / "support",
]
# Modules that name shapes. Types alone are mypy's work: checking each call of every module took a
# third of the tests' time.
CHECKED = [
    ".".join(path.relative_to(source).with_suffix("").parts)
    for source in (ROOT / "shared" / "src", *sorted(ROOT.glob("packages/*/src")))
    for path in sorted(source.rglob("*.py"))
    if "from jaxtyping import" in path.read_text(encoding="utf-8")
]

# Helper modules next to the tests, and tools, are imported by name; tests/test_house.py keeps the
# names apart.
sys.path.extend(str(folder) for folder in HELPERS)

# Imported when the path to it is known. Not as pytest's --jaxtyping-packages, which does not reach
# pytest-xdist's workers.
importlib.import_module("annotation_checks").install(CHECKED)


@pytest.fixture(autouse=True, scope="session")
def _no_network_and_no_waiting() -> Iterator[None]:
    """Once for all tests, because three fixtures for each of thousands of tests take seconds.

    Opening a connection to another machine fails the test; files, pipes and the machine itself stay
    reachable. A test's files need not outlive a power cut; the tests of that replace the calls by
    their own.
    """
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in (
            "127.0.0.1",
            "::1",
            "localhost",
        ):
            pytest.fail(f"a test must not use the network, and this one connects to {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_locally)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _messages_as_of_commands() -> Iterator[None]:
    """Settings have their keys in messages. Tests of the library turn that off:
    `ditkit_core.errors.keys_shown(False)`."""
    from ditkit_core.errors import keys_shown

    with keys_shown():
        yield


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """Undoes what a test changes in torch's global state. Does not import torch for tests that do
    without."""
    torch = sys.modules.get("torch")
    before = torch and (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    yield
    if torch is None or before is None:
        return
    torch.set_num_threads(1)
    torch.set_default_dtype(before[0])
    # Setting it imports the compiler, which takes seconds.
    if torch.are_deterministic_algorithms_enabled() != before[1]:
        torch.use_deterministic_algorithms(before[1])


_imported = 0
"""Modules that there were when what is kept was last set aside."""
_num_tests = 0
"""Tests since then."""
_STUCK_AFTER, _BETWEEN_WATCHES = 240.0, 30.0
"""Seconds after which the stacks of a worker are printed, and between two starts of that watch."""
_watch_began = -_BETWEEN_WATCHES
_stderr = 2
"""Where the stacks go: a test's own stderr is captured."""


def _set_aside_what_is_kept() -> None:
    """Modules and caches stay for good: collecting garbage, which each stage of a run does, looked
    through all of them every time."""
    global _imported, _num_tests
    gc.collect()
    gc.freeze()
    _imported, _num_tests = len(sys.modules), 0


def _watch() -> None:
    """Starts the time anew after which the stacks are printed, in case that the tests from here on
    hang where pytest-timeout's signal does not reach. pytest's `faulthandler_timeout` starts a
    thread for each test."""
    global _watch_began
    now = time.monotonic()
    if now - _watch_began >= _BETWEEN_WATCHES:
        _watch_began = now
        faulthandler.dump_traceback_later(_STUCK_AFTER, file=_stderr)


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs, unless tests are chosen for them: a run takes a GPU where there is one, and tests
    of runs compare with the CPU's bits."""
    global _stderr
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # Also those of workers, and of commands that tests start.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _stderr = os.dup(2)


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()


# Until all tests are imported, which leaves little to collect, and took two seconds of looking for
# it.
gc.disable()
# Instead of pytest's handler, which is off (pyproject.toml): libraries print their warnings where
# there is none.
logging.getLogger().addHandler(logging.NullHandler())


def pytest_collection_finish() -> None:
    global _imported
    # Without looking for garbage first, of which there is little: that took a second in each
    # worker.
    gc.freeze()
    _imported = len(sys.modules)
    gc.enable()


# First, before a fixture makes what is to be collected later.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Sets aside what the tests before imported and left: a quarter of the time of commands was
    looking through it."""
    global _num_tests
    _watch()
    _num_tests += 1
    if _num_tests == 20 or len(sys.modules) > _imported + 20:
        _set_aside_what_is_kept()


# Libraries complain of what is still there when Python ends. Not when pytest ends, which collects
# garbage itself: two seconds in each worker.
atexit.register(gc.unfreeze)


def _every(kind: Any, check: str, num: int) -> int:
    """One in how many of the combinations of a conformance check a class runs daily."""
    few = getattr(kind, "num_daily", {}).get(check, num)
    return max(getattr(kind, "one_in", 1), -(-num // few))


def _is_nightly(kind: Any, check: str) -> bool:
    """Whether a class runs a conformance check nightly alone."""
    is_variant = getattr(kind, "one_in", 1) > 1
    return check in getattr(kind, "nightly", ()) or (
        is_variant and check in getattr(kind, "nightly_of_variants", ())
    )


# First, before pytest leaves out what is slow.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks exhaustive what families and variants leave out of conformance checks, and skips what
    needs a GPU where there is none."""
    combinations: dict[tuple[Any, str], list[pytest.Item]] = {}
    for item in items:
        kind, check = getattr(item, "cls", None), item.name.partition("[")[0]
        if hasattr(kind, "nightly") and not any(
            map(item.get_closest_marker, ("exhaustive", "gpu"))
        ):
            combinations.setdefault((kind, check), []).append(item)
    for (kind, check), of_check in combinations.items():
        daily = [item for item in of_check if not item.get_closest_marker("slow")] or of_check
        every, is_nightly = _every(kind, check, len(daily)), _is_nightly(kind, check)
        if every == 1 and not is_nightly:
            continue
        every = min(every, len(daily))
        is_variant = getattr(kind, "one_in", 1) > 1
        # They differ in what they leave out.
        shift = sum((kind.__name__ if is_variant else kind.spec.name).encode())
        chosen = [] if is_nightly else daily[-shift % every :: every]
        for item in of_check:
            if item not in chosen:
                item.add_marker(pytest.mark.exhaustive)
            elif getattr(kind, "slow", False):
                item.add_marker(pytest.mark.slow)
    for item in items:
        # Of one case of a slow test, which `-m slow` would run else.
        if item.get_closest_marker("exhaustive"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
