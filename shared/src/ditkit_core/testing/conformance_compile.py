"""Checks of compiled blocks, for every model: the same regions are kept, the same numbers come out, and no graph is made twice.

class TestCompiled(Clips, CompileConformance):
    in_pairs = ("TestVace",)
"""

import json
import sys
from collections.abc import Mapping
from inspect import getfile
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pytest
import torch

from ditkit_core.testing.compiled_runs import (
    by_variant,
    check_equal_policies,
    check_levers,
    check_policies,
    check_variants,
    printed,
    variants_of,
)
from ditkit_core.testing.compiled_steps import compare
from ditkit_core.testing.suite_process import ProcessChecks
from ditkit_core.testing.world import ADAPTERS, make_model


class CompileConformance(ProcessChecks):
    """Inherit next to the class with tiny items, and set what has no value here.

    Conformance checks in the folder of its file know the package's variants, and every variant is compiled.
    """

    num_attention: ClassVar[int] = 4
    """Attention calls in a forward of the model."""
    trained: ClassVar[tuple[str, str]] = ("lora", "bfloat16")
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
        return tuple(variants_of(self._folder))

    @property
    def _folder(self) -> Path:
        return Path(getfile(type(self))).parent

    @classmethod
    def work(cls) -> None:
        """Print what steps come to under each policy, for an adapter, a dtype and a backend."""
        adapter, dtype, backend = sys.argv[1:]
        torch.set_num_threads(1)
        model = make_model(cls.spec, cls.arch, dtype=getattr(torch, dtype), adapter=ADAPTERS[adapter])
        items = cls().items(2, ragged=True)
        print(json.dumps(compare(cls.spec, model, items, ("none", "full", "attn_only"), backend=backend)))

    @pytest.mark.exhaustive
    def test_variants_compile_to_a_graph_for_each_kind_of_block(self) -> None:
        check_variants(self._folder, self._every)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "backend", ["aot_eager", pytest.param("inductor", marks=(pytest.mark.exhaustive, pytest.mark.timeout(3100)))]
    )  # minutes of g++
    def test_compiled_policies_keep_what_they_say_and_change_no_number(
        self, adapter: str, dtype: str, backend: str
    ) -> None:
        script, arguments = self.command()
        results = printed(script, *arguments, adapter, dtype, backend)
        check_policies(results, num_attention=self.num_attention, dtype=dtype, backend=backend)

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3100)
    @pytest.mark.parametrize("work", ["policies", "full"])
    def test_policies_of_every_variant_are_equal_and_in_force(self, work: str) -> None:
        check_equal_policies(work, self._folder, self._every)

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3100)
    def test_all_levers_at_once_compose_with_compiled_blocks_of_every_variant(self) -> None:
        check_levers("few_levers", self._folder, self._every)

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3100)
    def test_levers_in_pairs_compose_with_compiled_blocks(self, name: str) -> None:
        check_levers("levers", self._folder, [name])

    @pytest.mark.exhaustive
    @pytest.mark.timeout(3100)
    def test_numbers_of_samples_take_no_graphs(self) -> None:
        """But where blocks read grids: one sample and several then take one each, once of a size and then of any."""
        for name, graphs in by_variant("sizes", self._folder, self._every, timeout=3000).items():
            assert max(*graphs[4:7], *graphs[-2:]) <= self.graphs_of_sizes.get(name, 0), (name, graphs)
