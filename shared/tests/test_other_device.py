"""The second device that tests run on where there is none: what it lets pass, and what it catches."""

from typing import Any

import pytest
import torch

from ditkit_core.activation_checkpoint import POLICIES, Engine
from ditkit_core.testing.second_device import SECOND, SecondDeviceTensor, move_to_second_device, on_host, second_device
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.testing.world import make_model, train_shortly


def test_copies_cross_and_everything_else_is_refused():
    here = torch.arange(6.0).view(2, 3)
    with second_device():
        there = here.to(SECOND)
        assert there.device == SECOND and torch.ones(2, device=SECOND).device == SECOND
        assert torch.equal(there.cpu(), here) and torch.equal(on_host(there * 2), here * 2)
        assert torch.equal(on_host(torch.zeros(2, 3, device=SECOND).copy_(here)), here)
        scalar = torch.tensor(2.0)  # as on an accelerator, a number may come from the host
        assert torch.equal(on_host(there * scalar), here * 2)
        for mixed in (lambda: there + here, lambda: there @ here.T, lambda: torch.where(here > 1, there, there)):
            with pytest.raises(RuntimeError, match="mixes tensors"):
                mixed()


def test_what_is_changed_in_place_stays_one_tensor():
    tensor = SecondDeviceTensor(torch.ones(4))
    again = tensor.mul_(3)
    view = tensor[1:].add_(1)
    assert again is tensor and torch.equal(on_host(tensor), torch.tensor([3.0, 4, 4, 4]))
    assert torch.equal(on_host(view), torch.full((3,), 4.0))


def test_a_conjugate_is_taken():
    number = torch.complex(torch.ones(3), torch.ones(3))
    assert torch.equal(on_host(SecondDeviceTensor(number).conj() * 1), number.conj().resolve_conj())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_that_a_block_leaves_on_the_host_is_caught(policy):
    model: Any = make_model(TOY, TOY.presets["tiny"])
    block, table = model.layers[1], torch.ones(32)
    forward = block.forward
    block.forward = lambda carry: forward(carry._replace(tokens=carry.tokens * table))
    train_shortly(TOY, model, toy_items(2), Engine(policy=policy))
    move_to_second_device(model)
    with second_device(), pytest.raises(RuntimeError, match="mixes tensors of cpu:1"):
        train_shortly(TOY, model, toy_items(2), Engine(policy=policy))
