"""A file or folder that may not be read, also where the tests run as root, whom no mode stops."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def denied(path: Path) -> Iterator[None]:
    """Take all permissions from a path; every folder above it may be searched by everybody
    meanwhile."""
    above = [
        folder
        for folder in path.parents
        if folder.stat().st_uid == path.stat().st_uid and not folder.stat().st_mode & 1
    ]
    modes = {entry: entry.stat().st_mode for entry in (path, *above)}
    for folder in above:
        folder.chmod(0o755)
    path.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for entry, mode in modes.items():
            entry.chmod(mode)
