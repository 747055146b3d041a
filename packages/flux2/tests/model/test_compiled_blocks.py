"""Each kind of FLUX.2's blocks compiled by itself."""

from pathlib import Path

import pytest

from ditkit_core.testing.compiled_runs import printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.exhaustive), "lora"])
def test_every_kind_of_block_compiles_whole_and_keeps_its_numbers(kind):
    """The plain compositions that run under a compiler sum in another order: some fp32 roundings of 6e-8 each."""
    differences = printed(Path(__file__).parents[1] / "support" / "compiled_blocks.py", kind)
    assert len(differences) == 3 and differences["Flux2Join"] == 0
    assert max(differences.values()) <= 2e-6, differences
