"""Files that may not be read, also where tests run as root."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


@contextmanager
def ordinary_user() -> Iterator[Path]:
    """A folder of its own, and inside the block no right to read every file: permissions bind
    everyone but root."""
    if os.name == "nt":
        pytest.skip("permissions are those of POSIX")
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() != 0:
            yield Path(folder)
            return
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)
