"""The checks of a model whose optimizer steps in the backward. Part of `Conformance`."""

from typing import Any, ClassVar

import pytest
import torch

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.world import ADAPTERS, Items, make_model
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_model import TrainModel
from ditkit_core.training.train_step import StepContext, training_step

COMBINATIONS = [
    *(("full", policy) for policy in POLICIES),
    ("lora", "attn_only"),
    ("lora with dropout", "full"),
    ("dora", "none"),
]
"""Adapter and policy."""


class FusedChecks:
    """Inherit, set `spec` and `arch`, define `items`."""

    spec: ClassVar[ModelSpec]
    arch: ClassVar[Any]

    def items(self, count: int, ragged: bool = False) -> Items:
        """As `Conformance` has it."""
        raise NotImplementedError

    @pytest.mark.parametrize(("adapter", "policy"), COMBINATIONS)
    def test_updating_in_the_backward_changes_no_bit(self, adapter: str, policy: str) -> None:
        """A weight must not be read after its update: not by a node of the backward, not by a recompute."""
        plain = self._two_steps(adapter, "none", fused=False)
        fused = self._two_steps(adapter, policy, fused=True)
        assert fused[0] == plain[0]
        assert fused[1].keys() == plain[1].keys()
        assert [name for name, value in plain[1].items() if not torch.equal(fused[1][name], value)] == []

    def _two_steps(self, adapter: str, policy: str, *, fused: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Losses and norms of two steps, and the weights and the optimizer's state after them."""
        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS[adapter])
        trained = trainable_parameters(model)
        optimizer = NamedOptimizer(trained, OptimConfig(lr=1e-2, fused_backward=fused))
        items = [dict(item) for item in self.items(2, ragged=True)]
        batch = Batch(ids=["clip 0", "clip 1"], items=items)
        reported = [
            training_step(TrainModel(model, BlockEngine(policy=policy), self.spec), [batch], optimizer, StepContext(step=step, seed=1, flow=FlowConfig(weighting="bell")), lr=1e-2, clip_norm=0.0)
            for step in range(2)
        ]  # fmt: skip
        weights = {name: parameter.detach() for name, parameter in trained.items()}
        return list(reported), weights | optimizer.state()[0]
