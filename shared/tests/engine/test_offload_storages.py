"""What waits on the host where something else moves storages, too, and where a backward asks
without a mark."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditkit_core.engine import activation_offload, block_hooks
from ditkit_core.engine.activation_offload import HostMemory, HostStore
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.testing.pretend_devices import CountCrossings, PretendDevices, divide, on_host
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model

HOST, ONE = torch.device("cpu"), torch.device("cpu:1")


def toy(depth: int) -> nn.Module:
    model = make_model(TOY, ToyArch(depth=depth), adapter=ADAPTERS["lora"])
    divide(model, [ONE] * (depth + 2))
    return model


def loss_of(model: nn.Module, policy: str) -> Tensor:
    there = [{name: tensor.to(ONE) for name, tensor in item.items()} for item in toy_items(2)]
    given = TOY.training.make_inputs(
        [item["latents"] for item in there], torch.tensor([0.3, 0.8]).to(ONE), there, 1.0
    )
    outputs = model(given, engine=BlockEngine(policy=policy, host=HostMemory(smallest=0)))
    return sum((output.square().mean() for output in outputs), torch.zeros(()))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: on_host(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }


class Gathered:
    """As FSDP2: a layer computes with a copy of its weight, which is emptied behind the block and
    filled again before its backward."""

    def __init__(self, block: nn.Module, layer: nn.Linear):
        self.weight, self.values = layer.weight.detach().clone(), layer.weight.detach().clone()
        layer.forward = lambda x: F.linear(x, self.weight, layer.bias)  # type: ignore[method-assign]
        block.register_forward_hook(self._empty)

    def _empty(self, *given: object) -> None:
        if torch._C._current_graph_task_id() == -1:  # in a recompute it stays for the backward
            self.weight.untyped_storage().resize_(0)

    def fill(self) -> None:
        self.weight.untyped_storage().resize_(self.values.nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.weight):
            self.weight.copy_(self.values)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_emptied_behind_a_block_is_not_sent_and_found_again(policy):
    found, sent = [], []
    for chosen in (policy, f"{policy}+offload"):
        model = toy(3)
        block = model.layers[1]
        layer = next(part for part in block.modules() if type(part) is nn.Linear)
        with PretendDevices(), CountCrossings() as crossings:
            gathered = Gathered(block, layer)
            loss = loss_of(model, chosen)
            gathered.fill()
            loss.backward()
        found.append(gradients(model))
        sent.append(crossings.num_bytes[ONE, HOST])
    assert found[0] and found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert sent[1] > sent[0]


def test_what_was_fetched_without_a_mark_is_let_go_of_behind_the_backward(monkeypatch):
    """Without marks each tensor is fetched when autograd asks for it; the retained graph would keep
    them all on the device."""
    stores = []

    class Seen(HostStore):
        def __init__(self, *given):
            super().__init__(*given)
            stores.append(self)

    monkeypatch.setattr(activation_offload, "HostStore", Seen)
    monkeypatch.setattr(block_hooks, "call_before_backward", lambda before, after, callback: after)
    model, made = toy(4), []
    with PretendDevices():
        loss = loss_of(model, "none+offload")
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            kept = [
                kept
                for group in stores[0]._groups.values()
                for kept in group.alive()
                if kept.host is not None
            ]
            assert kept and not [one for one in kept if one.device is not None]
            made.append(gradients(model))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_what_is_looked_at_outside_a_backward_is_let_go_of_by_the_next_forward():
    model = toy(2)
    first, second = model.layers
    with PretendDevices(), HostStore(HostMemory(smallest=0), [], [True, False]) as store:
        store.pre_forward(0, first)
        y = torch.ones(8, 8, device=ONE).requires_grad_().exp()
        store.post_forward(0, first, ())
        (kept,) = store._groups[0].alive()
        for _ in range(2):
            store.pre_forward(1, second)
            store.post_forward(1, second, ())
            assert kept.host is not None and kept.device is None
            assert (
                torch.equal(on_host(y.grad_fn._saved_result), on_host(y))
                and kept.device is not None
            )
