"""The caption command in the background, for as long as the page is there."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from ditkit_core.diagnostics.report.server import last_lines
from ditkit_core.errors import UserError
from ditkit_ui import texts
from ditkit_ui.worker import Worker


class CaptionJob:
    """The caption command in a process of its own, which ends with the page; one at a time.

    Attributes:
        state: A line about it; empty before the first.
        is_running: Whether it works now.
    """

    def __init__(self) -> None:
        self.state, self.is_running = "", False
        self._worker = Worker()
        self._folder = TemporaryDirectory(prefix="ditkit-captions-")
        self._log = Path(self._folder.name) / "output.log"

    async def run(self, family: str, arguments: list[str]) -> None:
        """Call the command.

        Raises:
            UserError: If it works already.
        """
        if self.is_running:
            raise UserError(texts.CAPTIONS_RUN)
        self.state, self.is_running = texts.CAPTIONING, True
        try:
            status = await self._worker.ask(
                "caption", family=family, arguments=arguments, log=str(self._log)
            )
            self.state = texts.CAPTIONS_LACK if status else texts.CAPTIONED
        except UserError:
            self.state = texts.CAPTIONS_STOPPED
        finally:
            await asyncio.to_thread(self._worker.end)  # which frees the memory of its model
            self.is_running = False

    def stop(self) -> None:
        """End it, whatever it does; what it wrote stays."""
        self._worker.kill()

    @property
    def lines(self) -> list[str]:
        """The last lines that the command printed."""
        return last_lines(self._log)
