"""The optimizer's step in the backward: the same numbers as the ordinary loop, and hardly a
gradient alive."""

import json
import math
import sys
import threading
from functools import cache

import pytest
import torch
import toy_training
from saved_states import CLIPS, assert_same_state, numbers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_training import ToyBatch, ToyData, toy_model, toy_run
from toy_world import equal

from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.testing.combinations import daily, every_value
from ditkit_core.testing.conformance_streams import place_model
from ditkit_core.testing.pretend_devices import PretendDevices, divide, on_host
from ditkit_core.testing.stand_in import StandIn
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.training.config import EMAConfig, FlowConfig, SaveConfig, TrainConfig
from ditkit_core.training.losses import NonFiniteLoss
from ditkit_core.training.optim.fused_backward import OptimizerInBackward
from ditkit_core.training.optim.fused_checks import check_fused_backward
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step

FLOW = FlowConfig(weighting="bell")
KINDS = ["adamw", "adafactor", "muon", "schedulefree_adamw"]
PACKAGES = {"schedulefree_adamw": "schedulefree", "adamw8bit": "torchao"}


def optim(name, *, fused, **fields):
    return OptimConfig(name=name, lr=3e-3, warmup_steps=3, fused_backward=fused, **fields)


def train(folder, steps, name="adamw", *, fused, method="full", dropout=0.1, **given):
    pytest.importorskip(PACKAGES.get(name, "torch"))
    config = TrainConfig(steps=steps, batch_size=2, clip_norm=0.0, seed=5)
    ema = EMAConfig() if name == "schedulefree_adamw" else EMAConfig(decay=0.9)
    given = {"ema": ema, "held_out_clips": CLIPS, "optim": optim(name, fused=fused), **given}
    return toy_run(folder, steps, config=config, method=method, dropout=dropout, **given)


def trained(*, fused, name="adamw", method="full", dropout=0.0):
    model, parameters = toy_model(method, dropout=dropout)
    return model, TrainState(model, parameters, optim(name, fused=fused), EMAConfig()).optimizer


def step(model, optimizer, *, number=3, run=None, num_items=2):
    batch = ToyBatch([f"clip {i}" for i in range(num_items)], toy_items(num_items))
    return training_step(
        Model(model, run or BlockEngine(), TOY),
        [batch],
        optimizer,
        StepContext(step=number, seed=1, flow=FLOW),
        lr=0.01,
        clip_norm=0.0,
    )


def same(one, other):
    return all(
        torch.equal(on_host(p), on_host(other.parameters[name]))
        for name, p in one.parameters.items()
    )


HALVES = {"save": SaveConfig(every_steps=2)}


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory):
    """Makes a run of the ordinary loop, and returns its folder and what it made; once for each
    optimizer and method."""

    @cache
    def made(name, method="full"):
        folder = tmp_path_factory.mktemp(f"{name}-{method}")
        return folder, train(folder, 4, name, fused=False, method=method, **HALVES)

    return made


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("adamw", "full"),
        ("adamw", "lora"),
        # the others run in halves below
        *(pytest.param(name, "full", marks=pytest.mark.exhaustive) for name in KINDS[1:]),
    ],
)
def test_a_run_is_that_of_the_ordinary_loop_bitwise(name, method, tmp_path, ordinary):
    """Weights, optimizer, average, losses, norms of gradients, held-out losses."""
    folder, plain = ordinary(name, method)
    fused = train(tmp_path, 4, name, fused=True, method=method, **HALVES)
    assert_same_state(plain.result.save, fused.result.save)
    assert numbers(folder) == numbers(tmp_path)
    assert plain.result.held_out == fused.result.held_out
    initial = toy_model(method)[1]
    assert not any(torch.equal(tensor, initial[name]) for name, tensor in fused.parameters.items())


@pytest.mark.parametrize(("name", "first"), every_value(KINDS, [False, True]))
def test_a_run_goes_on_the_other_way_bitwise(name, first, tmp_path, ordinary):
    folder, whole = ordinary(name)
    train(tmp_path, 2, name, fused=first, **HALVES)
    halves = train(tmp_path, 4, name, fused=not first, **HALVES)
    assert_same_state(whole.result.save, halves.result.save)
    assert numbers(folder) == numbers(tmp_path)


def check_eight_bit(folder):
    plain = train(folder / "plain", 4, "adamw8bit", fused=False)
    train(folder / "halves", 2, "adamw8bit", fused=False)
    halves = train(folder / "halves", 4, "adamw8bit", fused=True)
    assert_same_state(plain.result.save, halves.result.save)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_eight_bit_adam_is_that_of_the_ordinary_loop_bitwise(stance, tmp_path):
    with torch.compiler.set_stance(stance):
        check_eight_bit(tmp_path)


class Watch:
    """A passage that notes, with the updates, when the backward of each block comes next."""

    def __init__(self, optimizer):
        self.seen, update = [], optimizer.step_one
        optimizer.step_one = lambda name, *given, **named: (
            self.seen.append(name),
            update(name, *given, **named),
        )

    def pre_forward(self, index, block):
        pass

    def post_forward(self, index, block, carry):
        pass

    def pre_backward(self, index, block):
        self.seen.append(index)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_each_parameter_is_updated_once_and_before_the_block_in_front_begins(policy, method):
    """Whoever streams a block's weights may take them away when the passage tells of the block
    before it."""
    model, optimizer = trained(fused=True, method=method)
    watch = Watch(optimizer)
    step(model, optimizer, run=BlockEngine(policy=policy, hooks=(watch,)))
    updated = [name for name in watch.seen if isinstance(name, str)]
    assert sorted(updated) == sorted(optimizer.parameters)
    assert [entry for entry in watch.seen if isinstance(entry, int)] == [1, 0]
    for index in (1, 0):
        done = watch.seen[: watch.seen.index(index)]
        expected = {name for name in optimizer.parameters if not name.startswith("embed.")}
        expected -= {
            name
            for name in expected
            for block in range(index + 1)
            if name.startswith(f"layers.{block}.")
        }
        assert {name for name in done if isinstance(name, str)} == expected


@pytest.mark.parametrize("method", ["full", "lora"])
def test_no_policy_changes_a_bit(method):
    plain_model, plain = trained(fused=False, method=method, dropout=0.3)
    expected = [step(plain_model, plain, number=number) for number in range(2)]
    for policy in POLICIES:
        model, fused = trained(fused=True, method=method, dropout=0.3)
        run = BlockEngine(policy=policy)
        results = [step(model, fused, number=number, run=run) for number in range(2)]
        assert results == expected, policy
        assert same(plain, fused) and not fused.gradients(), policy


class Shared(nn.Module):
    """A weight that two stages use, and one that none does."""

    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.eye(3) * 0.5)
        self.idle = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return (torch.tanh(x @ self.used) @ self.used).sum()


@pytest.mark.parametrize("name", ["adamw", "schedulefree_adamw"])
def test_a_parameter_of_two_uses_is_updated_once_and_one_of_none_counts_its_steps(name):
    pytest.importorskip(PACKAGES.get(name, "torch"))
    x = torch.arange(6.0).view(2, 3)
    plain, fused = Shared(), Shared()
    one = NamedOptimizer(dict(plain.named_parameters()), optim(name, fused=False))
    other = NamedOptimizer(dict(fused.named_parameters()), optim(name, fused=True))
    for number in range(4):
        one.zero_grad()
        (plain(x) if number else plain(x) + plain.idle.sum()).backward()
        one.step(0.1)
        with OptimizerInBackward(other, 0.1) as updates:
            (fused(x) if number else fused(x) + fused.idle.sum()).backward()
        assert sorted(updates.updated) == (["used"] if number else ["idle", "used"])
    assert same(one, other)
    assert one.state()[1] == other.state()[1]
    assert one.state()[0].keys() == other.state()[0].keys()


@pytest.mark.parametrize("streamed", [set(), {"idle"}])
def test_a_sum_begins_with_the_first_gradient_of_a_step_whichever_micro_batch_has_it(streamed):
    """The sum of a streamed weight outlives its step."""
    x = torch.arange(6.0).view(2, 3)
    plain, fused = Shared(), Shared()
    one = NamedOptimizer(dict(plain.named_parameters()), optim("adamw", fused=False))
    other = NamedOptimizer(dict(fused.named_parameters()), optim("adamw", fused=True))
    other.streamed = streamed
    for number in range(3):
        one.zero_grad()
        other.zero_grad()
        plain(x).backward()
        (plain(x) + (number + 1) * plain.idle.square().sum()).backward()
        one.step(0.1)
        with OptimizerInBackward(other, 0.1, micro_batches=2) as updates:
            updates.begin_backward()
            fused(x).backward()
            updates.begin_backward()
            (fused(x) + (number + 1) * fused.idle.square().sum()).backward()
    assert same(one, other)


def test_outside_of_a_step_a_backward_updates_nothing():
    model = Shared()
    before = model.used.detach().clone()
    optimizer = NamedOptimizer(dict(model.named_parameters()), optim("adamw", fused=True))
    with OptimizerInBackward(optimizer, 0.1):
        pass
    model(torch.ones(2, 3)).backward()
    assert torch.equal(model.used, before) and model.used.grad is not None


def test_a_loss_that_is_not_finite_is_found_before_anything_is_updated(tmp_path):
    data = ToyData()
    first = train(tmp_path, 3, fused=True, data=data)
    poisoned = int(data.micro_batch(4).ids[0].split()[1])
    data.items[poisoned]["latents"][0] = float("nan")
    model, optimizer = trained(fused=True)
    before, watch = (
        {name: p.detach().clone() for name, p in optimizer.parameters.items()},
        Watch(optimizer),
    )
    with pytest.raises(NonFiniteLoss) as error:
        training_step(
            Model(model, BlockEngine(hooks=(watch,)), TOY),
            [data.micro_batch(4)],
            optimizer,
            StepContext(step=4, seed=1, flow=FLOW),
            lr=0.01,
            clip_norm=0.0,
        )
    assert all(torch.equal(p, before[name]) for name, p in optimizer.parameters.items())
    assert error.value.evidence["loss"] == "nan" and "updated" not in str(error.value)
    assert watch.seen == [], "no backward has run"
    with pytest.raises(UserError, match="step-000003"):
        train(tmp_path, 9, fused=True, data=data)
    assert [path.name for path in (tmp_path / "state").iterdir()] == [first.result.save.name]


def test_a_gradient_that_is_not_finite_is_not_applied_nor_any_after_it():
    model, optimizer = trained(fused=True)
    before = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
    model.layers[1].out.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteLoss) as error:
        step(model, optimizer)
    evidence = json.loads(json.dumps(error.value.evidence, allow_nan=False))
    assert evidence["first_parameters_with_non_finite_gradients"] == ["layers.1.out.weight"]
    assert (
        evidence["num_parameters_with_non_finite_gradients"] == 1 and evidence["grad_norm"] == "nan"
    )
    assert all(math.isfinite(sample["loss"]) for sample in evidence["samples"])
    changed = {name for name, p in optimizer.parameters.items() if not torch.equal(p, before[name])}
    assert "head.out.weight" in changed and "layers.1.mlp.0.weight" in changed
    assert not any(
        name.startswith(("layers.0.", "embed.", "layers.1.qkv", "layers.1.out.weight"))
        for name in changed
    )
    assert evidence["num_parameters_updated_before"] == len(changed)
    assert f"{len(changed)} parameters were updated" in str(
        error.value
    ) and "only the last save" in str(error.value)
    assert evidence["weights_were_updated"] is True and "before its origin was looked for" in str(
        error.value
    )
    assert not optimizer.gradients()


def of_all_weights(model, config):
    parameters = dict(model.named_parameters())
    matrices = {
        name for name, p in parameters.items() if name.startswith("layers.") and p.ndim == 2
    }
    return NamedOptimizer(parameters, config, matrices=matrices)


def host_waits(name, depth):
    """How often the host waits for the device in the second step, and the number of parameters."""
    with StandIn() as stand_in:
        model = TOY.architecture.build(
            ToyArch(dim=16, depth=depth), Precision(matmul=torch.float32)
        )
        place_model(model, [torch.device("cpu:1")] * depth)
        optimizer = of_all_weights(model, optim(name, fused=True))
        step(model, optimizer, number=0)
        log, waits = stand_in.runtime.log, []
        synchronize = log.synchronize
        log.synchronize = lambda *streams: (waits.append(streams), synchronize(*streams))
        step(model, optimizer, number=1)
    assert log.races == []
    return len(waits), len(optimizer.parameters)


@pytest.mark.parametrize("name", daily(["adamw", "muon", "schedulefree_adamw"], "adamw", "muon"))
def test_the_host_does_not_wait_for_each_gradient(name):
    pytest.importorskip(PACKAGES.get(name, "torch"))
    (few, parameters), (many, more) = host_waits(name, 1), host_waits(name, 2)
    assert many == few <= 4 and more >= parameters + 10


def test_with_adafactor_it_does():
    """torch's reads numbers of each parameter on the host; the check is one of them."""
    waits, parameters = host_waits("adafactor", 1)
    assert waits > parameters


def test_a_gradient_that_is_not_finite_on_one_device_stops_the_updates_there():
    model, _ = toy_model()
    one, two = torch.device("cpu:1"), torch.device("cpu:2")
    divide(model, [one, one, two, two])
    optimizer = NamedOptimizer(dict(model.named_parameters()), optim("adamw", fused=True))
    before = {name: on_host(p).clone() for name, p in optimizer.parameters.items()}
    model.layers[1].out.weight.register_hook(lambda gradient: gradient * float("nan"))
    with PretendDevices(), pytest.raises(NonFiniteLoss) as error:
        step(model, optimizer)
    changed = {
        name
        for name, p in optimizer.parameters.items()
        if not torch.equal(on_host(p), before[name])
    }
    assert "layers.1.mlp.0.weight" in changed and not changed & {
        "layers.1.out.weight",
        "layers.1.qkv.weight",
    }
    assert error.value.evidence["num_parameters_updated_before"] == len(changed)


def test_a_gradient_that_is_not_finite_ends_the_run_and_leaves_its_saves(tmp_path, monkeypatch):
    first = train(tmp_path, 2, fused=True)
    files = {path: path.read_bytes() for path in first.result.save.iterdir()}

    def broken(*args, **fields):
        model, trainable = toy_model(*args, **fields)
        model.layers[0].qkv.weight.register_hook(lambda gradient: gradient * float("inf"))
        return model, trainable

    monkeypatch.setattr(toy_training, "toy_model", broken)
    with pytest.raises(
        UserError,
        match=r"only the last save is valid; evidence is in .*failure-step-000003.*step-000002",
    ) as error:
        train(tmp_path, 4, fused=True)
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in first.result.save.iterdir()} == files
    assert [path.name for path in (tmp_path / "state").iterdir()] == [first.result.save.name]


def bytes_above(policy, *, fused):
    """The most bytes that a step holds above what there was before it, the optimizer's state
    included, and the gradients' sizes."""
    torch.manual_seed(0)
    model = TOY.architecture.build(ToyArch(dim=128, depth=6), Precision(matmul=torch.float32))
    optimizer = NamedOptimizer(dict(model.named_parameters()), optim("adamw", fused=fused))
    one_token = ToyBatch(["clip"], [{"latents": torch.ones(4, 1, 1, 1), "text": torch.ones(1, 8)}])

    def once():
        training_step(
            Model(model, BlockEngine(policy=policy), TOY),
            [one_token],
            optimizer,
            StepContext(step=0, seed=1, flow=FLOW),
            lr=0.01,
            clip_norm=0.0,
        )
        optimizer.zero_grad()

    once()  # makes the state
    with MemoryTracker() as ledger:
        ledger.track(model, "weights")
        ledger.track(optimizer.state()[0], "optimizer")
        ledger.restart_peak()
        before = ledger.total(torch.device("cpu"))
        once()
    return ledger.peak[torch.device("cpu")] - before, [
        p.nbytes for p in optimizer.parameters.values()
    ]


@pytest.mark.parametrize("policy", daily(POLICIES, "none", "attn_only"))
def test_hardly_a_gradient_is_alive(policy):
    ordinary, gradients = bytes_above(policy, fused=False)
    fused, _ = bytes_above(policy, fused=True)
    # The ordinary loop holds all of them; here activations and gradients together are less than two
    # of the largest gradients.
    assert ordinary > sum(gradients)
    assert fused < 2 * max(gradients) < sum(gradients) / 10


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_divided_model_is_updated_bitwise(name):
    plain_model, plain = trained(fused=False, name=name, dropout=0.2)
    model, _ = toy_model(dropout=0.2)
    one, two = torch.device("cpu:1"), torch.device("cpu:2")
    divide(model, [one, one, two, two])
    fused = NamedOptimizer(dict(model.named_parameters()), optim(name, fused=True))
    for number in range(3):
        expected = step(plain_model, plain, number=number)
        with PretendDevices():
            assert step(model, fused, number=number, run=BlockEngine(policy="full")) == expected
    assert same(plain, fused)
    assert {tensor.device for key, tensor in fused.state()[0].items() if "exp_avg" in key} <= {
        one,
        two,
    }


def test_values_that_cannot_be_read_are_not_looked_at():
    """What a planner runs: fake tensors on several devices."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {str(i): nn.Parameter(torch.empty(4, 4, device=f"cpu:{i}")) for i in range(2)}
        optimizer = NamedOptimizer(weights, optim("adamw", fused=True))
        with OptimizerInBackward(optimizer, 0.1, readable=False) as updates:
            x = torch.ones(4, 4, device="cpu:0") @ weights["0"]
            (x.to("cpu:1") @ weights["1"]).sum().backward()
    assert updates.updated == ["1", "0"] and not optimizer.gradients()
    assert {tensor.device.index for tensor in optimizer.state()[0].values()} == {0, 1}


@pytest.mark.parametrize("name", ["adamw", "adafactor", "schedulefree_adamw"])
def test_threads_of_two_devices_update_side_by_side(name):
    """Torch runs the backward of each device in a thread of its own; on the host it runs in
    whichever thread calls for it."""
    pytest.importorskip(PACKAGES.get(name, "torch"))
    random = torch.Generator().manual_seed(0)
    start = {
        f"{thread}.{i}": torch.randn(8, 8, generator=random)
        for thread in range(4)
        for i in range(25)
    }
    x = torch.randn(4, 8, generator=random)

    def make(fused):
        return NamedOptimizer(
            {key: nn.Parameter(value.clone()) for key, value in start.items()},
            optim(name, fused=fused),
        )

    def backward(optimizer, thread):
        y = x
        for i in range(25):
            y = torch.tanh(y @ optimizer.parameters[f"{thread}.{i}"])
        y.square().sum().backward()

    plain, fused = make(False), make(True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            plain.zero_grad()
            for thread in range(4):
                backward(plain, thread)
            plain.step(0.01)
            with OptimizerInBackward(fused, 0.01) as updates:
                threads = [
                    threading.Thread(target=backward, args=(fused, thread)) for thread in range(4)
                ]
                [thread.start() for thread in threads]
                [thread.join() for thread in threads]
            assert sorted(updates.updated) == sorted(start)
    finally:
        sys.setswitchinterval(before)
    assert same(plain, fused)
    (one, values), (other, other_values) = plain.state(), fused.state()
    assert equal(one, other) and values == other_values


def test_the_state_of_a_parameter_can_be_put_elsewhere_between_its_updates():
    plain_model, plain = trained(fused=False)
    model, fused = trained(fused=True)
    assert fused.state_of("head.out.weight") == {}
    for number in range(3):
        step(plain_model, plain, number=number)
        step(model, fused, number=number)
        for name in fused.parameters:
            state = fused.state_of(name)
            assert {"exp_avg", "exp_avg_sq"} <= state.keys()
            for entry, tensor in state.items():
                copy = tensor.clone()
                tensor.fill_(float("nan"))  # a storage that another block uses by now
                state[entry] = copy
    assert same(plain, fused) and equal(plain.state()[0], fused.state()[0])


@pytest.mark.parametrize(
    ("fields", "run", "message"),
    [
        (
            {"clip_norm": 1.0},
            {},
            "train.clip_norm = 1 with train.clip_by = step: set train.clip_by = last_step",
        ),
        (
            {"clip_norm": 0.0, "accumulation": 2, "pipelined": True},
            {},
            "set train.pipelined = false",
        ),
        (
            {"clip_norm": 0.0, "accumulation": 2},
            {"adapts": True},
            "set train.accumulation = 1 and a larger",
        ),
        (
            {"clip_norm": 0.0},
            {"adapts": True, "prior": True},
            "leave prior.folder and prior.prompt out",
        ),
    ],
)
def test_what_needs_all_gradients_is_refused_with_the_remedies(fields, run, message):
    config = TrainConfig(**fields)
    with pytest.raises(UserError) as error:
        check_fused_backward(config, optim("adamw", fused=True), **run)
    assert message in str(error.value) and "or set optim.fused_backward = false" in str(error.value)
    assert "\n" not in str(error.value)
    check_fused_backward(config, optim("adamw", fused=False), **run)
    for by in ("last_step", "block"):
        check_fused_backward(
            TrainConfig(clip_by=by, accumulation=4), optim("adamw", fused=True), prior=True
        )


def test_an_optimizer_that_looks_at_all_gradients_is_refused():
    with pytest.raises(
        UserError,
        match="prodigy, which estimates one rate .* use adamw, adamw8bit, adafactor, muon",
    ):
        OptimConfig(name="prodigy", lr=1.0, fused_backward=True)
