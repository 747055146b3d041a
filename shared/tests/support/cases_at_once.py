"""Runs the cases of a script in processes that are forked from it, several at a time, and each
under torchrun's own agent."""

import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import TestCase

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_cases(
    run: Callable[[str], None], names: Sequence[str], after: Mapping[str, str], at_once: int
) -> None:
    """Run cases by name; much of a case's time is that of one thread, or of a wait.

    Args:
        run: Runs one.
        names: In the order of their beginning.
        after: Of a case that reads what another one has written, that one.
        at_once: How many run at a time.
    """
    left, running = list(names), dict[Any, tuple[str, BaseProcess]]()
    while left or running:
        unfinished = {*left, *(name for name, _ in running.values())}
        ready = [name for name in left if after.get(name) not in unfinished]
        for name in ready[: at_once - len(running)]:
            process = get_context("fork").Process(target=run, args=(name,))
            process.start()
            left.remove(name)
            running[process.sentinel] = name, process
        for ended in wait(list(running)):
            name, process = running.pop(ended)
            process.join()
            assert process.exitcode == 0, name


def launch(
    what: Callable[..., None], folder: Path, name: str, *, num: int = 2, restarts: int = 0
) -> dict[str, Any]:
    """Run a case: which ranks torchrun says have failed, its summary, and the warnings of the ranks
    that it had to kill."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num, run_id=name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts, start_method="fork", monitor_interval=0.05, local_addr="localhost",
    )  # fmt: skip

    def as_started(*given: Any) -> None:
        # A fork has the handlers of torchrun, which those that it starts otherwise have not.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        what(*given)

    # For its records torchrun's agent asks for the whole stack twice, with the lines and modules of
    # all frames: in a copy of a process, whose first frames are of no file, a second for each case.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    with TestCase().assertLogs("torch.multiprocessing.spawn") as logged:
        logging.getLogger("torch.multiprocessing.spawn").info("started")
        try:
            elastic_launch(config, as_started)(folder, name)
        except ChildFailedError as error:
            killed = [line for line in logged.output if "SIGKILL" in line]
            codes = {each: found.exitcode for each, found in error.failures.items()}
            return {"codes": codes, "said": str(error), "killed": killed}
        return {"codes": {}}
