"""The devices that tests run on where there are none: what they let pass, and what they catch."""

from typing import Any

import pytest
import torch

from ditkit_core.engine import run_block as checkpoint_policies
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.run_block import GeneratorHook
from ditkit_core.testing.pretend_devices import (
    CountCrossings,
    PretendDevices,
    PretendTensor,
    divide,
    move_to,
    on_host,
)
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model, outcome, train_shortly

HOST, ONE, TWO = (torch.device(name) for name in ("cpu", "cpu:1", "cpu:2"))


def test_copies_cross_and_everything_else_is_refused():
    here = torch.arange(6.0).view(2, 3)
    with PretendDevices():
        one, two = here.to(ONE), here.to(TWO)
        assert one.device == ONE and two.device == TWO and torch.ones(2, device=TWO).device == TWO
        assert torch.equal(one.cpu(), here) and torch.equal(on_host(two * 2), here * 2)
        assert one.to(TWO).device == TWO and torch.equal(on_host(one.to(TWO)), here)
        assert torch.equal(on_host(torch.zeros(2, 3, device=TWO).copy_(one)), here)
        assert torch.zeros(2, 3).copy_(one).device == HOST
        assert torch.empty_like(one, device=TWO).device == TWO
        scalar = torch.tensor(2.0)  # as on an accelerator, a number may come from the host
        assert torch.equal(on_host(one * scalar), here * 2)
        for mixed in (
            lambda: one + here,
            lambda: one @ here.T,
            lambda: torch.where(here > 1, one, one),
            lambda: one + two,
            lambda: one * two.sum(),  # nor may a number come from another device
            lambda: one.sum() + two.sum(),
            lambda: torch.cat([one, two]),
            lambda: torch.tensor(0.0).add_(one.sum()),
        ):
            with pytest.raises(RuntimeError, match="mixes tensors"):
                mixed()


def test_what_is_changed_in_place_stays_one_tensor():
    tensor = PretendTensor(torch.ones(4), ONE)
    again = tensor.mul_(3)
    view = tensor[1:].add_(1)
    assert again is tensor and torch.equal(on_host(tensor), torch.tensor([3.0, 4, 4, 4]))
    assert torch.equal(on_host(view), torch.full((3,), 4.0))


def test_a_storage_is_emptied_and_filled_in_place():
    tensor = PretendTensor(torch.ones(4), ONE)
    view, storage = tensor.detach()[1:], tensor.untyped_storage()
    storage.resize_(0)
    assert tensor.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    storage.resize_(16)
    tensor.copy_(torch.arange(4.0))
    assert torch.equal(on_host(view), torch.tensor([1.0, 2, 3]))


def test_a_conjugate_is_taken():
    number = torch.complex(torch.ones(3), torch.ones(3))
    assert torch.equal(on_host(PretendTensor(number, ONE).conj() * 1), number.conj().resolve_conj())


def test_crossings_are_counted_by_their_ends():
    here = torch.ones(2, 3, requires_grad=True)
    with PretendDevices(), CountCrossings() as crossings:
        one = here.to(ONE)
        one.to(ONE), one.to(torch.float64)  # neither goes anywhere
        two = one.to(TWO, torch.float64)
        torch.zeros(2, 3, device=ONE).copy_(two.detach())
        two.sum().backward()
    assert crossings.copies == {(HOST, ONE): 1, (ONE, TWO): 1, (TWO, ONE): 2, (ONE, HOST): 1}
    assert crossings.num_bytes[ONE, TWO] == 48 and crossings.num_bytes[HOST, ONE] == 24


def test_a_module_moves_there_and_back_without_sharing_memory():
    layer = torch.nn.Linear(2, 2)
    values = layer.weight.detach().clone()
    for device in (ONE, TWO, HOST):
        before: Any = layer.weight
        move_to(layer, device)
        assert layer.weight.device == device and torch.equal(on_host(layer.weight), values)
        with torch.no_grad():
            before.zero_()
    assert type(layer.weight.data) is torch.Tensor and torch.equal(layer.weight, values)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_that_a_block_leaves_elsewhere_is_caught(policy):
    model: Any = make_model(TOY, TOY.architecture.presets["tiny"])
    block, table = model.layers[1], torch.ones(32)
    forward = block.forward
    block.forward = lambda carry: forward(carry._replace(tokens=carry.tokens * table))
    train_shortly(TOY, model, toy_items(2), BlockEngine(policy=policy))
    divide(model, [ONE, ONE, TWO, TWO])
    for left in (table, PretendTensor(table, ONE)):
        block.forward = lambda carry, left=left: forward(carry._replace(tokens=carry.tokens * left))
        with PretendDevices(), pytest.raises(RuntimeError, match="mixes tensors of .*cpu:2"):
            train_shortly(TOY, model, toy_items(2), BlockEngine(policy=policy))


# Dropout on several devices


@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_a_block_asks_for_the_generator_of_its_own_device_alone(policy, monkeypatch):
    """Devices run backwards side by side: a hook that touched another's generator would change its
    dropout."""
    asked: list[tuple[str, str, torch.device]] = []
    running = ["nothing"]

    class Counting(GeneratorHook):
        def snapshot(self):
            asked.append(("snapshot", running[0], self.device))
            return super().snapshot()

        def restore(self, state):
            asked.append(("restore", running[0], self.device))
            super().restore(state)

    monkeypatch.setattr(checkpoint_policies, "GeneratorHook", Counting)
    model: Any = make_model(TOY, ToyArch(depth=3, dropout=0.2))
    devices = {"block 0": ONE, "block 1": TWO, "block 2": ONE}
    divide(model, [TWO, *devices.values(), TWO])

    class Named:
        """Says which block runs, in forward and backward."""

        def pre_forward(self, index, block):
            running[0] = f"block {index}"

        def post_forward(self, index, block, carry):
            running[0] = "nothing"

        def pre_backward(self, index, block):
            running[0] = f"block {index}"

    with PretendDevices():
        outcome(TOY, model, toy_items(2), BlockEngine(policy=policy, hooks=(Named(),)))
    assert {(block, device) for _, block, device in asked} == set(devices.items())
    assert {block for what, block, _ in asked if what == "restore"} == set(devices), (
        "each was recomputed"
    )


def test_the_hook_of_a_gpu_touches_no_generator_of_the_host_or_of_another(monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_rng_state", lambda device: asked.append(device) or torch.zeros(16)
    )
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: asked.append(device))
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch, name, lambda *_: pytest.fail("the host's generator"))
    hook = GeneratorHook(torch.device("cuda", 1))
    hook.restore(hook.snapshot())
    assert asked == [torch.device("cuda", 1)] * 2
