"""Checks for every model that on a GPU each access to memory is ordered: by one stream, an event,
or the host. Part of `Conformance`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.placement import Placement
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.combinations import every_pair
from ditkit_core.testing.conformance_swap import train_streamed
from ditkit_core.testing.stand_in import StandIn
from ditkit_core.testing.world import (
    ADAPTERS,
    Items,
    ModelChecks,
    make_model,
    masked,
    micro_batches,
)
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, training_step
from ditkit_core.training.validation import validation_loss

HOST, ONE, TWO = (torch.device(name) for name in ("cpu", "cpu:1", "cpu:2"))
LEVERS = (
    "swap",
    "offload",
    "split",
    "swap, offload",
    "swap, offload, split",
    "split with the host",
)
TRAINED = {
    "lora": ("lora with dropout", 1),
    "lora, every other block": ("lora with dropout", 2),
    "full": ("full", 1),
    "full, every other block": ("full", 2),
}
"""What is trained, and of how many blocks one is streamed."""


@dataclass(frozen=True, kw_only=True)
class StreamCase:
    """A way to train that uses streams."""

    trained: str
    """Of `ADAPTERS`; a full fine-tune that streams its blocks updates them in the backward."""
    policy: str
    levers: str
    """Of swap, offload and split, which pipelines micro-batches over two devices unless trained
    weights are streamed; or over a device and the host."""
    one_of: int = 1
    """Of how many blocks of a device one is streamed."""


def unordered(spec: ModelSpec, arch: Any, items: Items, case: StreamCase) -> list[str]:
    """Train a little on stand-ins for GPUs, and return what nothing orders."""
    with StandIn() as stand_in:
        _train(spec, arch, items, case)
    return stand_in.runtime.log.races


def place_model(
    model: Any,
    devices: Sequence[torch.device],
    streamed: Collection[int] = (),
    *,
    trained: bool = False,
) -> BlockSwap:
    """Put a model where a run loads it to, and stream blocks.

    Args:
        devices: Of each block; the embedding is on the first, the head on the last.
        streamed: The blocks to stream.
        trained: Whether their trained weights are streamed, too.
    """
    stages = [model.embed, *model.blocks(), model.head]
    for stage_index, (stage, device) in enumerate(
        zip(stages, [devices[0], *devices, devices[-1]], strict=True)
    ):
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                stays = stage_index - 1 in streamed and (
                    trained or (parameter is not None and not parameter.requires_grad)
                )
                if parameter is not None and not stays:
                    module._parameters[name] = nn.Parameter(
                        parameter.detach().to(device), parameter.requires_grad
                    )
    placement = Placement(
        embed=devices[0], blocks=tuple(devices), head=devices[-1], streamed=frozenset(streamed)
    )
    return BlockSwap(model, placement, trained=trained)


def _train(spec: ModelSpec, arch: Any, items: Items, case: StreamCase) -> None:
    """Two steps, and between them a forward alone, as a run measures. One item has a loss mask."""
    items = masked(items)
    model: Any = make_model(spec, arch, adapter=ADAPTERS[case.trained])
    blocks = model.blocks()
    cut = len(blocks) // 2 if "split" in case.levers else len(blocks)
    has_weights = [
        index for index, block in enumerate(blocks) if next(block.parameters(), None) is not None
    ]
    streamed = has_weights[case.one_of - 1 :: case.one_of] if "swap" in case.levers else []
    in_backward = bool(streamed) and case.trained == "full"
    second = HOST if "host" in case.levers else TWO
    swap = place_model(
        model,
        [ONE if index < cut else second for index in range(len(blocks))],
        streamed,
        trained=in_backward,
    )
    policy = f"{case.policy}+offload" if "offload" in case.levers else case.policy
    engine = BlockEngine(
        policy=policy, hooks=(swap,) if streamed else (), host=HostMemory(smallest=0)
    )
    if in_backward:
        train_streamed(spec, model, items, engine, ema=EMAConfig(decay=0.9))
        return
    there = Model(model, engine, spec)
    batches = micro_batches(items)[0 if "split" in case.levers else 1 :]
    optimizer = NamedOptimizer(trainable_parameters(model), OptimConfig())
    for step in range(2):
        context = StepContext(
            step=step, seed=1, flow=FlowConfig(), pipelined="split" in case.levers
        )
        training_step(there, batches, optimizer, context, lr=1e-2, clip_norm=0.1)
        if step == 0:
            validation_loss(there, batches[0].ids, batches[0].items, (0.5,))


def _is_another(case: tuple[Any, ...]) -> bool:
    """Whether a case is not another one again: how many blocks are streamed matters where some
    are."""
    _, levers, training = case
    return "swap" in levers or TRAINED[training][1] == 1


class StreamChecks(ModelChecks):
    """Part of `Conformance`; needs its `spec`, `arch` and `items`."""

    @pytest.mark.parametrize(
        ("policy", "levers", "training"),
        every_pair(POLICIES, LEVERS, list(TRAINED), allowed=_is_another),
    )
    def test_streams_wait_for_each_other(self, policy: str, levers: str, training: str) -> None:
        """As on GPUs: no access is unordered, and no memory is given away while a stream uses
        it."""
        trained, one_of = TRAINED[training]
        case = StreamCase(trained=trained, policy=policy, levers=levers, one_of=one_of)
        assert unordered(self.spec, self.arch, self.items(2, ragged=True), case) == []
