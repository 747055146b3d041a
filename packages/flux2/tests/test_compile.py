"""Compiled FLUX.2 blocks: each kind is one graph, the same regions are kept, and the same numbers come out."""

from pathlib import Path

import pytest

from ditkit_core.testing.compiled_runs import check_policies, printed

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_every_kind_of_block_compiles_whole_and_keeps_its_numbers(kind):
    """The plain compositions that run under a compiler sum in another order: some fp32 roundings of 6e-8 each."""
    found = printed(HERE / "compiled_blocks.py", kind)
    assert len(found) == 3 and found["Flux2Join"] == 0
    assert max(found.values()) <= 2e-6, found


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "dtype"), [("full", "float32"), ("lora", "bfloat16")])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])  # minutes of g++
def test_compiled_policies_keep_what_they_say_and_change_no_number(adapter, dtype, backend):
    found = printed(HERE / "compiled_flux2.py", adapter, dtype, backend)
    check_policies(found, num_attention=4, dtype=dtype, backend=backend)
