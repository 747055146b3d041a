"""Temporary names of other processes."""

import os
from pathlib import Path

from ditkit_core.io.files import temporary_path

NOBODY = 2**22 + 1
"""A process id above the highest that systems give."""


def unfinished(path: Path, process: int = NOBODY) -> Path:
    """The name under which another process of this machine writes a file; by default one that has
    ended."""
    name = temporary_path(path).name
    assert f"-{os.getpid()}-" in name
    return path.with_name(name.replace(f"-{os.getpid()}-", f"-{process}-"))
