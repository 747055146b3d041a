"""Faults in the order of streams are found in the core's own model; and what only a part of a
backward fetches is waited for."""

from typing import Any

import pytest

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.activation_offload import HostStore, _DeviceStore
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.testing.conformance_streams import ONE, StreamCase, place_model, unordered
from ditkit_core.testing.stand_in import StandIn
from ditkit_core.testing.stream_faults import StreamFaultChecks, nothing
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model, micro_batches
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step
from ditkit_core.training.validation import validation_loss


class TestToy(StreamFaultChecks):
    spec = TOY
    arch = ToyArch(depth=6, dim=8, dropout=0.1)

    def items(self, count, ragged=False):
        return toy_items(count)


@pytest.mark.parametrize("waits", [True, False])
def test_a_tensor_that_no_hook_asked_for_is_waited_for(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward without the marks of blocks: each operation fetches what it saved, and waits for
    it."""
    if not waits:
        monkeypatch.setattr(_DeviceStore, "wait_for", nothing)
    monkeypatch.setattr(HostStore, "pre_backward", nothing)
    case = StreamCase(trained="lora with dropout", policy="none", levers="offload")
    assert bool(unordered(TOY, ToyArch(depth=2, dim=8, dropout=0.1), toy_items(2), case)) != waits


def test_weights_are_exchanged_for_their_average_when_no_copy_reads_them() -> None:
    """A validation of the average ends with a copy of the first block under way, for a forward that
    does not come."""
    with StandIn() as stand_in:
        model: Any = make_model(TOY, ToyArch(depth=3, dim=8))
        swap = place_model(model, [ONE] * 3, range(3), trained=True)
        there = Model(model, BlockEngine(policy="full", hooks=(swap,)), TOY)
        state = TrainState(
            model,
            trainable_parameters(model),
            OptimConfig(fused_backward=True),
            EMAConfig(decay=0.9),
            swap,
        )
        (batch,) = micro_batches(toy_items(1), 1)
        for step in range(2):
            context = StepContext(step=step, seed=1, flow=FlowConfig())
            training_step(there, [batch], state.optimizer, context, lr=1e-2, clip_norm=0.0)
            state.average.update(step + 1)
            with state.used():
                validation_loss(there, batch.ids, batch.items, (0.5,))
    assert stand_in.runtime.log.races == []


def test_memory_of_an_optimizer_is_unlocked_when_another_takes_its_place() -> None:
    """A run that resumes attaches an optimizer twice: pages that stay locked cannot be locked
    again."""
    with StandIn() as stand_in:
        model: Any = make_model(TOY, ToyArch(depth=3, dim=8))
        swap = place_model(model, [ONE] * 3, range(3), trained=True)
        there = Model(model, BlockEngine(policy="full", hooks=(swap,)), TOY)
        state = TrainState(
            model, trainable_parameters(model), OptimConfig(fused_backward=True), EMAConfig(), swap
        )
        (batch,) = micro_batches(toy_items(1), 1)
        context = StepContext(step=0, seed=1, flow=FlowConfig())
        training_step(there, [batch], state.optimizer, context, lr=1e-2, clip_norm=0.0)
        parts = [part.host for queue in swap._queues.values() for part in queue.of_optimizer()]
        assert parts and all(map(stand_in.runtime.is_locked, parts))
        swap.attach(None)
        assert not any(map(stand_in.runtime.is_locked, parts))
