"""Compiled FLUX.2 blocks, of every variant."""

from pathlib import Path

import pytest

from ditkit_core.testing.compiled_runs import printed
from ditkit_core.testing.conformance_compile import CompileConformance

HERE = Path(__file__).parent


class TestCompiled(CompileConformance):
    folder = HERE
    script = HERE / "support" / "compiled_flux2.py"
    trained = ("lora", "bfloat16")
    in_pairs = ("TestEditing",)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.exhaustive), "lora"])
def test_every_kind_of_block_compiles_whole_and_keeps_its_numbers(kind):
    """The plain compositions that run under a compiler sum in another order: some fp32 roundings of 6e-8 each."""
    found = printed(HERE / "support" / "compiled_blocks.py", kind)
    assert len(found) == 3 and found["Flux2Join"] == 0
    assert max(found.values()) <= 2e-6, found
