"""The ranks of one torchrun on one machine: each knows which others have ended, leaves a line for
torchrun's summary, and ends one that hangs.

Where this system has no /proc, no rank is known.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.errors import UserError

_LENGTH = 8192
"""Bytes of a file of torchrun's summary."""
_LONGEST = 1900
"""Bytes of a line that surely fit there: twice, each byte escaped by another."""


@dataclass(frozen=True)
class Process:
    """A process that torchrun has started."""

    pid: int
    error_file: str
    """What its failure is in torchrun's summary; empty if torchrun did not start it. torchrun gives
    each start a new folder of these."""

    @staticmethod
    def this() -> "Process":
        """The process that asks."""
        return Process(os.getpid(), os.environ.get("TORCHELASTIC_ERROR_FILE", ""))

    @property
    def has_ended(self) -> bool:
        """Whether this process's parent has no such child any more, or none that still runs."""
        try:
            state, parent, *_ = (
                Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            )
        except OSError:
            return True
        return int(parent) != os.getppid() or state in "ZX"

    def kill(self) -> None:
        """End it, though it is stopped or hangs: SIGTERM would wait until it runs again."""
        with suppress(OSError):
            process = os.pidfd_open(self.pid)  # a number could belong to another process by now
            try:
                if not self.has_ended:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)

    def summarize(self, line: str) -> None:
        """Put a line into torchrun's summary, in case that this process fails.

        The handler of torch's `errors.record` would write the traceback that is being handled,
        which the summary shows in place of the line. Each step writes one: at a fixed length in
        place, for which nobody waits for a disk, and which no SIGKILL leaves half written.
        """
        if self.error_file:
            line = line.encode()[:_LONGEST].decode(errors="ignore")
            about = {"py_callstack": line, "timestamp": str(int(time.time()))}
            text = json.dumps(
                {"message": {"message": line, "extraInfo": about}}, ensure_ascii=False
            )
            with suppress(OSError):
                file = os.open(self.error_file, os.O_WRONLY | os.O_CREAT, 0o644)
                try:
                    os.write(file, text.encode().ljust(_LENGTH))
                finally:
                    os.close(file)

    def forget(self) -> None:
        """Leave what torchrun itself says of its failure."""
        if self.error_file:
            with suppress(OSError):
                Path(self.error_file).unlink(missing_ok=True)


def siblings(processes: Sequence[tuple[int, str]]) -> dict[int, Process]:
    """The other ranks that this process's torchrun has started, by rank.

    Args:
        processes: Process id and error file of every rank, while all of them run.
    """
    this_process = Process.this()
    run = Path(this_process.error_file).parents[1:2]
    by_rank = {
        rank: Process(*entry) for rank, entry in enumerate(processes) if this_process.error_file
    }
    return {
        rank: process
        for rank, process in by_rank.items()
        if process != this_process
        and Path(process.error_file).parents[1:2] == run
        and not process.has_ended
    }


def refuse_shared_gpus(num: int) -> None:
    """Refuse so many processes of one torchrun on a machine with fewer GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus and num > gpus:
        raise UserError(
            f"torchrun started {num} processes on {socket.gethostname()}, which has {gpus} GPUs; "
            f"set --nproc-per-node {gpus}"
        )
