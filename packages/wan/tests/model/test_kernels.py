"""The Triton kernels inside the blocks, under Triton's interpreter."""

from pathlib import Path

import pytest

from ditkit_core.testing.compiled_runs import check_kernels


@pytest.mark.exhaustive  # half a minute for each class
def test_kernels_compute_what_torch_computes_under_every_policy() -> None:
    pytest.importorskip("triton")
    check_kernels(Path(__file__).parents[1], ["TestWan", "TestVace"])
