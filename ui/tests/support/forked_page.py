"""The page in a fork of the tests' process, and its workers in forks of that: programs that are
started import for seconds what is in memory here."""

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from served_page import Served, ended, environment_in

from ditkit_core.planner import measurement_cache  # noqa: F401 (a worker imports it)
from ditkit_ui import cli, work, worker


@contextmanager
def forked_page(folder: Path) -> Iterator[Served]:
    """Serve the page in a folder, as `served` does."""
    process = forked(
        lambda: _serve(["--no-browser", "--port=0"]),
        environment_in(folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    with ended(process) as address:
        yield Served(address, folder, process)


def forked(
    call: Callable[[], object], environment: dict[str, str], **options: Any
) -> "subprocess.Popen[str]":
    """Start a process that calls a function, with the options of `subprocess.Popen`."""

    def called_instead() -> None:
        # Popen waits for the end of a pipe, and nothing of the tests is to be kept open.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        warnings.resetwarnings()
        gc.enable()  # Popen disabled it until a program starts
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 (until the end)
            for number, mode in enumerate("rww")
        )
        status = 1
        try:
            status = int(bool(call()))
        finally:
            sys.stdout.flush()
            os._exit(status)

    with warnings.catch_warnings():  # newer Pythons warn of threads, which the fork does not have
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen([sys.executable], preexec_fn=called_instead, **options)  # noqa: PLW1509


def _serve(arguments: list[str]) -> int:
    """The command, whose workers are forks and plan nothing: a plan takes seconds, and the daily
    tests look at none."""
    start, command = subprocess.Popen, work.command

    def started(program: list[str], **options: Any) -> "subprocess.Popen[str]":
        if program[1:] == ["-m", "ditkit_ui.worker"]:
            return forked(worker.main, dict(os.environ), **options)
        return start(program, **options)

    def unless_planned(family: str, name: str, arguments: list[str]) -> dict[str, Any]:
        if "--plan" in arguments:
            return {"status": 1, "out": "", "err": "error: not planned"}
        return command(family, name, arguments)

    with (
        patch("ditkit_ui.worker.subprocess.Popen", started),
        patch.object(work, "command", unless_planned),
        patch.object(work, "recipe", lambda **_: {}),
    ):
        return cli.main(arguments)
