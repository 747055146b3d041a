"""Weights that leave their device and come back bitwise, while the tensors stay the same
objects."""

from typing import Any

import pytest
import torch
from torch import nn

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.parked_weights import parked, parked_bytes, parked_tensors
from ditkit_core.loading.model import Model
from ditkit_core.testing.conformance_streams import ONE, place_model
from ditkit_core.testing.stand_in import StandIn
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model, micro_batches
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step
from ditkit_core.training.validation import validation_loss


def test_memory_is_given_away_and_comes_back_with_the_same_bits() -> None:
    """Views of one storage share it afterwards, and whoever keeps a tensor sees its values
    again."""
    together = torch.randn(4, 6)
    views = [together[:2], together[2:].t()]
    layer = nn.Linear(8, 8).to(torch.bfloat16)
    codes, empty = torch.randint(-9, 9, (3, 5), dtype=torch.int8), torch.randn(7)
    empty.untyped_storage().resize_(0)  # as of a streamed block that is on the host
    tensors = [*views, *layer.parameters(), codes, empty]
    before = [tensor.detach().clone() for tensor in tensors[:-1]]
    with parked_tensors(tensors):
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=False))
    assert not empty.untyped_storage().nbytes()
    together.zero_()
    assert not views[0].any() and not views[1].any()


def test_they_come_back_after_an_error() -> None:
    weight = torch.randn(3)
    before = weight.clone()
    try:
        with parked_tensors([weight]):
            raise ValueError
    except ValueError:
        pass
    assert torch.equal(weight, before)


def test_on_a_cpu_nothing_moves() -> None:
    layer = nn.Linear(2, 2)
    pointer = layer.weight.data_ptr()
    with parked(layer.parameters()):
        assert layer.weight.data_ptr() == pointer
    assert parked_bytes(layer.parameters()) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_memory_of_streamed_weights_stays_with_their_stream(depth: int) -> None:
    """Also where a device has so few streamed blocks that a validation leaves all of them there,
    until the next step updates them."""
    with StandIn() as stand_in:
        model: Any = make_model(TOY, ToyArch(depth=depth, dim=8))
        swap = place_model(model, [ONE] * depth, range(depth), trained=True)
        loaded = Model(model, BlockEngine(), TOY, streamer=swap)
        there = Model(model, BlockEngine(policy="full", hooks=(swap,)), TOY)
        optim, flow, (batch,) = (
            OptimConfig(fused_backward=True),
            FlowConfig(),
            micro_batches(toy_items(1), 1),
        )
        optimizer = TrainState(
            model, trainable_parameters(model), optim, EMAConfig(), swap
        ).optimizer
        for step in range(2):
            training_step(
                there,
                [batch],
                optimizer,
                StepContext(step=step, seed=1, flow=flow),
                lr=1e-2,
                clip_norm=0.0,
            )
            validation_loss(there, batch.ids, batch.items, (0.5,))
            assert all(buffer.untyped_storage().nbytes() for buffer in swap.buffers)
            with parked_tensors([weight for weight in loaded.weights() if weight.device == ONE]):
                pass
    assert stand_in.runtime.log.races == []
