"""What FLUX.2's tests share: the demo's tiny checkpoint, written once in each process."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete tiny klein base checkpoint in diffusers layout; tests only read it."""
    from ditkit_flux2.demo.write import write_checkpoint

    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder)
    return folder
