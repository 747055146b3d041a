"""Long work in the background, for as long as the page is there."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ditkit_core.diagnostics.report.server import last_lines
from ditkit_core.errors import UserError
from ditkit_ui import texts
from ditkit_ui.worker import Worker


class Job:
    """A function of `work` in a process of its own, which ends with the page; one at a time.

    Args:
        log: Gets the lines that it prints.
        on_end: Called after its end, in a thread.

    Attributes:
        state: Empty before the first, then `running`, `done`, `failed` or `stopped`.
    """

    def __init__(self, log: Path, on_end: Callable[[], None] = lambda: None) -> None:
        self.state = ""
        self._is_stopped = False
        self._log, self._on_end = log, on_end
        self._worker = Worker()

    @property
    def is_running(self) -> bool:
        """Whether it works now."""
        return self.state == "running"

    async def run(self, name: str, /, **arguments: Any) -> None:
        """Call a function that writes lines into a `log` and returns an exit status.

        Raises:
            UserError: If one works already.
        """
        if self.is_running:
            raise UserError(texts.JOB_RUNS)
        self.state, state, self._is_stopped = "running", "failed", False
        self._log.unlink(missing_ok=True)
        try:
            status = await self._worker.ask(name, log=str(self._log), **arguments)
            state = "failed" if status else "done"
        except UserError as error:
            state = "stopped" if self._is_stopped else "failed"
            if not self._is_stopped:  # it ended by itself, such as by a lack of memory
                with self._log.open("a", encoding="utf-8") as log:
                    log.write(f"{error}\n")
        finally:
            await asyncio.to_thread(self._worker.end)  # which frees its memory
            try:
                await asyncio.to_thread(self._on_end)
            finally:
                self.state = state

    def stop(self) -> None:
        """End it, whatever it does; what it wrote stays."""
        self._is_stopped = True
        self._worker.kill()

    @property
    def lines(self) -> list[str]:
        """The last lines that it printed."""
        return last_lines(self._log)
