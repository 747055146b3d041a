"""A process that plans and reads data for the page: it has torch in memory, so that a plan takes
seconds less than its command, and it ends with the page.

A request is a line of JSON on its standard input, and so is the answer on its standard output.
`ditkit_ui/work.py` has what can be asked.
"""

import asyncio
import gc
import io
import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

from ditkit_core.errors import UserError, keys_shown


class Worker:
    """The process, from the side of the page. It is started with the first request, and again
    after its end."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    async def ask(self, name: str, /, **arguments: Any) -> Any:
        """Have a function of `work` called; requests wait for each other.

        Raises:
            UserError: A mistake of the user, or the process ended.
        """
        return await asyncio.to_thread(self._ask, name, arguments)

    def _ask(self, name: str, arguments: dict[str, Any]) -> Any:
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self.end()
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "ditkit_ui.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    encoding="utf-8",
                    start_new_session=True,
                )
            assert self._child.stdin is not None and self._child.stdout is not None
            try:
                self._child.stdin.write(json.dumps([name, arguments]) + "\n")
                self._child.stdin.flush()
                line = self._child.stdout.readline()
            except OSError:
                line = ""
        if not line.endswith("\n"):  # also where it was killed in the middle of its answer
            raise UserError(f"the process that works for the page ended while it did {name}")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["value"]

    def kill(self) -> None:
        """Kill the process: who waits for its answer gets an error."""
        if self._child is not None:
            self._child.kill()

    def end(self) -> None:
        """End the process, whatever it does."""
        self.kill()
        if self._child is not None:
            with suppress(OSError):  # a request that it did not read
                self._child.communicate()


def main() -> None:
    """Answer requests until the page ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    # After the thread: torch takes seconds, and the page may end.
    from ditkit_core.planner.measurement_cache import keep_measurements
    from ditkit_ui import work

    keep_measurements()
    # What was imported stays, so that no collection goes through it again.
    gc.freeze()
    while True:
        name, arguments = json.loads(requests.get())
        try:
            printed = io.StringIO()  # progress, of which nobody sees the end
            with keys_shown(), redirect_stdout(printed), redirect_stderr(printed):
                answer = {"value": getattr(work, name)(**arguments)}
        except UserError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _read(requests: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the pipe is closed: the page is gone, however it ended


if __name__ == "__main__":
    main()
