"""Compiled FLUX.2 blocks, of every variant: each kind is one graph, the same regions are kept, and the same numbers come out."""

from pathlib import Path

import pytest

from ditkit_core.testing.compiled_runs import (
    by_variant,
    check_equal_policies,
    check_levers,
    check_policies,
    check_variants,
    printed,
    variants_of,
)

HERE = Path(__file__).parent
EVERY = tuple(variants_of(HERE))


@pytest.mark.slow
def test_variants_compile_to_a_graph_for_each_kind_of_block():
    check_variants(HERE, EVERY)


@pytest.mark.exhaustive
@pytest.mark.timeout(3100)
@pytest.mark.parametrize("work", ["policies", "full"])
def test_policies_of_every_variant_are_equal_and_in_force(work):
    check_equal_policies(work, HERE, EVERY)


@pytest.mark.exhaustive
@pytest.mark.timeout(3100)
def test_all_levers_at_once_compose_with_compiled_blocks_of_every_variant():
    check_levers("few_levers", HERE, EVERY)


@pytest.mark.exhaustive
@pytest.mark.timeout(3100)
@pytest.mark.parametrize("name", ["TestEditing"])
def test_levers_in_pairs_compose_with_compiled_blocks(name):
    check_levers("levers", HERE, [name])


@pytest.mark.exhaustive
@pytest.mark.timeout(3100)
def test_numbers_of_samples_take_no_graphs():
    for name, found in by_variant("sizes", HERE, EVERY, timeout=3000).items():
        assert max(found[4:7]) == max(found[-2:]) == 0, (name, found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_every_kind_of_block_compiles_whole_and_keeps_its_numbers(kind):
    """The plain compositions that run under a compiler sum in another order: some fp32 roundings of 6e-8 each."""
    found = printed(HERE / "support" / "compiled_blocks.py", kind)
    assert len(found) == 3 and found["Flux2Join"] == 0
    assert max(found.values()) <= 2e-6, found


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "dtype"), [("full", "float32"), ("lora", "bfloat16")])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])  # minutes of g++
def test_compiled_policies_keep_what_they_say_and_change_no_number(adapter, dtype, backend):
    found = printed(HERE / "support" / "compiled_flux2.py", adapter, dtype, backend)
    check_policies(found, num_attention=4, dtype=dtype, backend=backend)
