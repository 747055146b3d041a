"""Processes that tests fork."""

import sys
from pathlib import Path

import pytest

from ditkit_core.testing.scripts import run_script

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_forks_compute_gradients_after_fake_tensors_on_a_gpu(tmp_path: Path) -> None:
    run_script(SUPPORT / "forked_backward.py", tmp_path / "forks")
