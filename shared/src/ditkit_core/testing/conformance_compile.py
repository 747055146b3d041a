"""Checks of compiled blocks, for every model: the same regions are kept, the same numbers come out, and no graph is made twice.

class TestCompiled(CompileConformance):
    folder = Path(__file__).parent
    script = folder / "support" / "compiled_wan.py"
    in_pairs = ("TestVace",)
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

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


class CompileConformance:
    """Inherit, and set what has no value here."""

    folder: ClassVar[Path]
    """The package's tests: conformance checks there know its variants, and every variant is compiled."""
    script: ClassVar[Path]
    """Script that prints the result of `compiled_steps.compare` for an adapter, a dtype and a backend."""
    num_attention: ClassVar[int] = 4
    """Attention calls in a forward of the script's model."""
    trained: ClassVar[tuple[str, str]]
    """The adapter and dtype that each change compiles under every policy; a night compiles both."""
    in_pairs: ClassVar[tuple[str, ...]]
    """Variants that between them have every kind of block: pairs of all levers are tried with each."""
    graphs_of_sizes: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Graphs that other sizes take, by variant, where they take any."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Names of variants, and what is trained with each change, which a subclass says."""
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.in_pairs)
        if "dtype" in metafunc.fixturenames:
            both = (("full", "float32"), ("lora", "bfloat16"))
            marked = [
                pytest.param(*pair, marks=() if pair == self.trained else pytest.mark.exhaustive) for pair in both
            ]
            metafunc.parametrize(("adapter", "dtype"), marked)

    @property
    def _every(self) -> tuple[str, ...]:
        return tuple(variants_of(self.folder))

    @pytest.mark.exhaustive
    def test_variants_compile_to_a_graph_for_each_kind_of_block(self) -> None:
        check_variants(self.folder, self._every)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "backend", ["aot_eager", pytest.param("inductor", marks=(pytest.mark.exhaustive, pytest.mark.timeout(3100)))]
    )  # minutes of g++
    def test_compiled_policies_keep_what_they_say_and_change_no_number(
        self, adapter: str, dtype: str, backend: str
    ) -> None:
        results = printed(self.script, adapter, dtype, backend)
        check_policies(results, num_attention=self.num_attention, dtype=dtype, backend=backend)

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3100)
    @pytest.mark.parametrize("work", ["policies", "full"])
    def test_policies_of_every_variant_are_equal_and_in_force(self, work: str) -> None:
        check_equal_policies(work, self.folder, self._every)

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3100)
    def test_all_levers_at_once_compose_with_compiled_blocks_of_every_variant(self) -> None:
        check_levers("few_levers", self.folder, self._every)

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3100)
    def test_levers_in_pairs_compose_with_compiled_blocks(self, name: str) -> None:
        check_levers("levers", self.folder, [name])

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3100)
    def test_numbers_of_samples_take_no_graphs(self) -> None:
        """But where blocks read grids: one sample and several then take one each, once of a size and then of any."""
        for name, graphs in by_variant("sizes", self.folder, self._every, timeout=3000).items():
            assert max(*graphs[4:7], *graphs[-2:]) <= self.graphs_of_sizes.get(name, 0), (name, graphs)
