"""Scripts of tests, in processes of their own: copies of one process that has imported what scripts
import, which takes seconds each time.

A script behaves as under `python script.py`, but for modules that are imported already. What
measures memory or imports, or reads its environment while it is imported, needs a new process.
"""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_IMPORTED = (
    "peft",
    "torch.distributed.fsdp",
    "ditkit_core.testing.conformance_context",
    "ditkit_core.testing.suites",
)
"""What every copy has imported."""


def start(
    script: Path, *arguments: str, out: Path, err: Path, variables: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start a script.

    Args:
        script: A Python file.
        arguments: Its command line.
        out: The file for what it prints.
        err: The file for its errors, which may be the same.
        variables: Of its environment, besides the variables of this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    environment = os.environ | (variables or {})
    process = context.Process(
        target=_run, args=([str(script), *arguments], dict(environment), (str(out), str(err)))
    )
    process.start()
    return process


def run_script(script: Path, folder: Path, *arguments: str, seconds: float = 280.0) -> str:
    """Run a script whose first argument is a new folder, and return what it printed; else as
    `output_of`."""
    folder.mkdir()
    return output_of(script, str(folder), *arguments, seconds=seconds)


def output_of(script: Path, *arguments: str, seconds: float = 280.0) -> str:
    """Run a script, and return what it printed.

    Raises:
        AssertionError: If it fails or takes too long, with the end of its output.
    """
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(script, *arguments, out=out, err=err)
        try:
            process.join(seconds)
        finally:
            process.kill()
            process.join()
        printed, errors = (file.read_text(errors="replace") for file in (out, err))
    assert process.exitcode == 0, (
        f"{script.name} ended with {process.exitcode}\n{printed[-2000:]}{errors[-18000:]}"
    )
    return printed


def printed(script: Path, *arguments: str, seconds: float = 280.0, **variables: str) -> Any:
    """Run a script, and parse the last line that it prints as JSON.

    With `variables`, which are in its environment besides those of this process, the process is a
    new one: they may be read by imports.
    """
    if not variables:
        return json.loads(output_of(script, *arguments, seconds=seconds).splitlines()[-1])
    command, env = [sys.executable, str(script), *arguments], os.environ | variables
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=seconds, env=env
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def _run(command: list[str], environment: Mapping[str, str], streams: tuple[str, str]) -> None:
    """In the copy: what Python does with a script, and a thread pool for each process that the
    script forks."""
    import torch

    # A fork's first thread that sets a number of threads replaces the parent's pool, without a
    # lock. Autograd starts eight at once where a fake tensor was ever on "cuda": one finds no pool,
    # and C++ aborts ("Invalid thread pool!", pytorch issue 178535).
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    for stream, file in enumerate(streams, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
