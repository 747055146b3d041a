"""What Wan's tests share: the demo's tiny checkpoint, written once in each process."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete tiny Wan checkpoint in diffusers layout; tests only read it."""
    from ditkit_wan.demo import write_checkpoint

    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder, ["a red circle moves right on a dark background", "a blue square moves left"])
    return folder
