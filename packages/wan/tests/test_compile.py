"""Compiled Wan blocks, of every variant: the same regions are kept, the same numbers come out, and no graph is made twice."""

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
EVERY_KIND = ("TestVace", "TestWanToDance")
"""Blocks of every kind; what else variants have is in their embedding and in what plain blocks take."""
DAILY = EVERY_KIND[:1]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(DAILY, id="of two kinds of block"),
        pytest.param(tuple(name for name in EVERY if name not in DAILY), id="others", marks=pytest.mark.slow),
    ],
)
def test_variants_compile_to_a_graph_for_each_kind_of_block(names):
    check_variants(HERE, names)


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "dtype"), [("full", "float32"), ("lora", "bfloat16")])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])  # minutes of g++
def test_compiled_policies_keep_what_they_say_and_change_no_number(adapter, dtype, backend):
    check_policies(
        printed(HERE / "support" / "compiled_wan.py", adapter, dtype, backend),
        num_attention=4,
        dtype=dtype,
        backend=backend,
    )


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
@pytest.mark.parametrize("name", EVERY_KIND)
def test_levers_in_pairs_compose_with_compiled_blocks(name):
    check_levers("levers", HERE, [name])


@pytest.mark.exhaustive
@pytest.mark.timeout(3100)
def test_numbers_of_samples_take_no_graphs_but_of_blocks_that_read_grids():
    for name, found in by_variant("sizes", HERE, EVERY, timeout=3000).items():
        # the grids of music; others know one sample and several, each once of a size and then of any
        each = 1 if name == "TestWanToDance" else 0
        assert max(found[4:7]) <= each and max(found[-2:]) <= each, (name, found)
