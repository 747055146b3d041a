"""The checks of a model whose optimizer steps in the backward. Part of `Conformance`."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.combinations import pairwise
from ditkit_core.testing.conformance_split import layouts
from ditkit_core.testing.conformance_swap import stream
from ditkit_core.testing.pretend_devices import PretendDevices, divide, on_host
from ditkit_core.testing.world import ADAPTERS, Items, make_model
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_model import TrainModel
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step

COMBINATIONS = [
    *(("full", policy) for policy in POLICIES),
    ("lora", "attn_only"),
    ("lora with dropout", "full"),
    ("dora", "none"),
]
"""Adapter and policy."""
UPDATES = {
    "adamw": OptimConfig(lr=1e-2, fused_backward=True),
    "split": OptimConfig(lr=1e-2, fused_backward=True, rounding="split"),
    "adafactor": OptimConfig(name="adafactor", lr=1e-2, fused_backward=True, rounding="stochastic"),
}
"""How weights are stored and updated; without a rounding they are fp32."""
FULL_LEVERS: Mapping[str, Sequence[Any]] = {
    "policy": POLICIES,
    "update": tuple(UPDATES),
    "clip_by": ("last_step", "block"),
    "num_micro": (1, 2),
    "layout": ("one", "ends alone", "uneven"),
    "one_of": (0, 1, 2),
    "offload": (False, True),
}
"""What a full fine-tune on a small GPU needs, by lever; `one_of`: of how many blocks one is streamed, 0 for none."""


def _is_possible(case: tuple[Any, ...]) -> bool:
    """Pretended devices cannot give a parameter values of another size, as rounding does; and nothing is offloaded from the host."""
    update, layout, offload = case[1], case[4], case[6]
    return layout == "one" and not offload if update != "adamw" else layout != "one" or not offload


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

    @pytest.mark.parametrize(tuple(FULL_LEVERS), pairwise(FULL_LEVERS, _is_possible))
    def test_levers_of_a_full_fine_tune_change_no_bit(
        self, policy: str, update: str, clip_by: Any, num_micro: int, layout: str, one_of: int, offload: bool
    ) -> None:
        """Updates in the backward under all of them, against the ordinary loop on one device, resident, nothing recomputed."""
        config = UPDATES[update]
        dtype = torch.float32 if config.rounding == "nearest" else torch.bfloat16
        plain: Any = make_model(self.spec, self.arch, dtype=dtype)
        expected = self._clipped_steps(plain, replace(config, fused_backward=False), BlockEngine(), clip_by, num_micro)
        model: Any = make_model(self.spec, self.arch, dtype=dtype)
        devices = layouts(len(model.blocks())).get(layout)
        if devices is not None:
            divide(model, devices)
        with nullcontext() if devices is None else PretendDevices():
            swap = stream(model, one_of, devices and devices[1:-1], trained=True) if one_of else None
            chosen = f"{policy}+offload" if offload else policy
            engine = BlockEngine(policy=chosen, hooks=() if swap is None else (swap,), host=HostMemory(smallest=0))
            found = self._clipped_steps(model, config, engine, clip_by, num_micro, swap)
        assert found[0] == expected[0]
        assert found[1].keys() == expected[1].keys()
        assert [name for name, value in expected[1].items() if not torch.equal(found[1][name], value)] == []

    def _clipped_steps(
        self,
        model: Any,
        optim: OptimConfig,
        engine: BlockEngine,
        clip_by: Any,
        num_micro: int,
        swap: BlockSwap | None = None,
    ) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """What two steps report, the second of them clipped by either norm, and the weights and the optimizer's state after them."""
        trained = TrainState(model, trainable_parameters(model), optim, EMAConfig(), swap)
        items, reported = [dict(item) for item in self.items(2, ragged=True)], []
        parts = [items] if num_micro == 1 else [[item] for item in items]
        batches = [Batch(ids=[f"clip {i} {len(part)}" for i in range(len(part))], items=part) for part in parts]
        for step in range(2):
            context = StepContext(
                step=step, seed=1, flow=FlowConfig(weighting="bell"), clip_by=clip_by, last_norm=trained.last_norm
            )
            run = TrainModel(model, engine, self.spec)
            reported.append(training_step(run, batches, trained.optimizer, context, lr=1e-2, clip_norm=0.05))
            trained.last_norm = reported[-1].grad_norm
        trained.optimizer.zero_grad()
        groups = trained.state_dict().tensors
        return reported, {f"{group} {name}": on_host(t) for group, own in groups.items() for name, t in own.items()}

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
