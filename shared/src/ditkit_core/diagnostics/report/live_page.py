"""The page of a run while it trains."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ditkit_core.diagnostics.report.page import write_report
from ditkit_core.errors import UserError
from ditkit_core.io.console import warn
from ditkit_core.training.trainer import Callback

EVERY_SECONDS = 60.0
"""Shortest time between two pages that no save or preview asked for."""
SHARE = 0.01
"""Largest share of the time that making them takes: a run of many steps and samples has them less
often."""


class LivePage(Callback):
    """Writes the page again after a minute of training, so that it has more than saves and
    previews.

    Args:
        folders: The folders whose pages show the run: its own, and for an expert the folder of both
            experts, too.
    """

    def __init__(self, folders: Iterable[Path]):
        self._folders = list(dict.fromkeys(folders))
        self._due = time.monotonic() + EVERY_SECONDS

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the pages if they are due."""
        if (began := time.monotonic()) < self._due:
            return
        try:
            for folder in self._folders:
                write_report(folder)
        except UserError as error:  # the next save says so again, and ends the run
            warn(f"the page is not written while the run trains: {error}")
            self._due = float("inf")
            return
        ended = time.monotonic()
        self._due = ended + max(EVERY_SECONDS, (ended - began) / SHARE)
