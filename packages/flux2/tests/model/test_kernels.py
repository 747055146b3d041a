"""The Triton kernels inside the blocks, under Triton's interpreter."""

from pathlib import Path

import pytest

from ditkit_core.testing.compiled_runs import TOLERANCES, printed, variants_of

TESTS = Path(__file__).parents[1]
NAMES = ["TestTextToImage"]


@pytest.mark.slow  # half a minute for each class
def test_kernels_compute_what_torch_computes_under_every_policy(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    modules = dict.fromkeys(variants_of(TESTS)[name] for name in NAMES)
    found = printed(
        "ditkit_core.testing.kernel_conformance", ",".join(modules), ",".join(NAMES), folder=TESTS, timeout=1200
    )
    assert found.keys() == set(NAMES)
    for name, trained in found.items():
        for under in trained.values():
            # Other last bits show that the kernels ran.
            assert under["equal"] and under["differs"] and under["from_torch"] <= TOLERANCES["float32"], (name, found)
