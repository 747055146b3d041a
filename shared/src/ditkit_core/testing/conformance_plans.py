"""Checks of a model's plans: the planned bytes of blocks equal the real tensors', and a plan from
few blocks equals the plan from all."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.profiler import profile
from ditkit_core.testing.plans import KEPT, SENT, check_kept, check_plan, check_sent, step_of

_SLOW = (("attn_only", "full"), ("every_n(2)", "lora"))


class KeptBytesConformance:
    """Bytes that a tiny model keeps under each checkpointing policy: planned on fake tensors, and
    counted on real ones.

    Inherit, and set what has no value here.
    """

    spec: ClassVar[ModelSpec]
    arch: ClassVar[Any]
    """An architecture with several blocks of each kind."""
    size: ClassVar[tuple[int, int, int]]
    """Frames, height and width of an item."""
    wider: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields of the architecture for checks of offloading: its storages must be larger than
    `offload.SMALLEST`."""
    larger: ClassVar[tuple[int, int, int]]
    """Size of an item for these checks."""
    daily: ClassVar[tuple[Any, ...]]
    """Policies for the default tests, or with a mark for the slow ones; one of a family's differs
    by block."""
    nightly: ClassVar[tuple[str, ...]]
    """The other policies."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """The policies of a subclass."""
        if metafunc.function.__name__ == "test_blocks_keep_what_is_planned":
            nightly = [
                pytest.param(policy, marks=pytest.mark.exhaustive) for policy in self.nightly
            ]
            metafunc.parametrize("policy", [*self.daily, *nightly])

    def _check_kept(self, policy: str, method: Any) -> None:
        step = step_of(self.spec, self.arch, self.size, AdapterConfig(method=method, rank=4))
        check_kept(step.with_execution(checkpointing=policy))

    def test_blocks_keep_what_is_planned(self, policy: str) -> None:
        self._check_kept(policy, "lora")

    @pytest.mark.parametrize(
        ("policy", "method"),
        [
            pytest.param(*case, marks=pytest.mark.slow if case in _SLOW else pytest.mark.exhaustive)
            for case in KEPT
        ],
    )
    def test_so_they_do_where_all_is_trained_and_under_other_policies(
        self, policy: str, method: str
    ) -> None:
        self._check_kept(policy, method)

    @pytest.mark.parametrize(
        "policy",
        [
            pytest.param(policy, marks=pytest.mark.slow if i < 1 else pytest.mark.exhaustive)
            for i, policy in enumerate(SENT)
        ],
    )
    def test_blocks_send_what_is_planned(self, policy: str) -> None:
        step = step_of(
            self.spec, replace(self.arch, **self.wider), self.larger, AdapterConfig(rank=4)
        )
        # In fp32: products in bf16 of this size take minutes on a CPU without instructions for
        # them.
        check_sent(
            step.with_execution(checkpointing=policy, precision=Precision(matmul=torch.float32))
        )


class FullSizePlanConformance:
    """The plan of a whole model at full size, made from three blocks of a kind, against all of its
    blocks on fake tensors.

    Inherit, and set what has no value here.
    """

    spec: ClassVar[ModelSpec]
    preset: ClassVar[str]
    size: ClassVar[tuple[int, int, int]]
    """Frames, height and width of an item."""
    cut: ClassVar[int]
    """The block before which a second device begins."""

    @pytest.mark.exhaustive
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize(
        ("policy", "is_cut"), [("none", False), ("full", True), ("attn_only", False)]
    )
    def test_the_plan_is_what_all_blocks_hold(self, policy: str, is_cut: bool) -> None:
        step = step_of(
            self.spec,
            self.spec.architecture.presets[self.preset],
            self.size,
            AdapterConfig(rank=32),
        )
        job = step.with_execution(checkpointing=policy)
        check_plan(profile(job), job, (self.cut,) if is_cut else (), rel=1e-3)
