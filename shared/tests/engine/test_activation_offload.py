"""What waits on the host, when, with other levers and after failures. `OffloadChecks` and
`LeverChecks` check the numbers."""

import warnings
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from toy_jobs import toy_job
from toy_world import World

from ditkit_core.engine import activation_offload, block_hooks
from ditkit_core.engine.activation_offload import SMALLEST, HostMemory, HostStore
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision, compute_fp32_in_fp32
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.planner.repeated_fakes import RepeatedFakes
from ditkit_core.testing import conformance_swap
from ditkit_core.testing.combinations import daily
from ditkit_core.testing.conformance_streams import place_model
from ditkit_core.testing.conformance_swap import Watched, stream, train_streamed
from ditkit_core.testing.plans import check_sent
from ditkit_core.testing.pretend_devices import (
    CountCrossings,
    PretendDevices,
    divide,
    move_to,
    on_host,
)
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, ToyModel, toy_items
from ditkit_core.testing.world import ADAPTERS, make_model, micro_batches, outcome
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.train_step import StepContext, accumulate_gradients

HOST, ONE, TWO = torch.device("cpu"), torch.device("cpu:1"), torch.device("cpu:2")
ARCH = ToyArch(depth=4, dropout=0.1)
at = partial(StepContext, seed=1, flow=FlowConfig())
DROPOUT = replace(ADAPTERS["lora with dropout"], targets=("qkv", "mlp.0"))


def engine(policy, *hooks):
    return BlockEngine(policy=f"{policy}+offload", hooks=hooks, host=HostMemory(smallest=0))


def on(devices, *, adapter=DROPOUT, arch=ARCH):
    """A toy with its stages on these devices."""
    model = make_model(TOY, arch, adapter=adapter)
    divide(model, devices)
    return model


def whole(depth=4):
    return [ONE] * (depth + 2)


def inputs_of(model, device=ONE):
    items, sigma = toy_items(2), torch.tensor([0.3, 0.8])
    there = [{name: tensor.to(device) for name, tensor in item.items()} for item in items]
    return TOY.training.make_inputs(
        [item["latents"] for item in there], sigma.to(device), there, 1.0
    )


def loss_of(model, run):
    torch.manual_seed(1)
    return sum(output.square().mean() for output in model(inputs_of(model), engine=run))


def gradients(model):
    return {name: on_host(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def same(one, other):
    assert one.keys() == other.keys() and one
    return all(torch.equal(one[name], other[name]) for name in one)


# What is moved


def sent_by_block(policy, *, smallest=0):
    """Bytes that a forward sends to the host from each block, which has a device of its own; the
    items have one size."""
    arch = ToyArch(depth=3)
    blocks = [torch.device("cpu", 1 + i) for i in range(3)]
    model = on([torch.device("cpu:7"), *blocks, torch.device("cpu:8")], arch=arch, adapter=None)
    with PretendDevices(), CountCrossings() as crossings:
        run = BlockEngine(policy=policy, host=HostMemory(smallest=smallest))
        model(inputs_of(model, torch.device("cpu:7")), engine=run)
    return [crossings.num_bytes[block, HOST] for block in blocks]


TOKENS = 2 * 32 * 32 * 4
"""Bytes: two samples, 2 × 4 × 4 tokens of 32 features."""
SUMS = 2 * 2 * 32 * 4
"""Bytes, of two samples: logarithms that attention keeps, of two heads and the tokens."""


def test_a_policy_says_what_is_sent():
    assert sent_by_block("full+offload") == [TOKENS] * 3
    assert sent_by_block("offload") == [TOKENS] * 3
    assert sent_by_block("attn_only+offload") == [TOKENS + 2 * (TOKENS + SUMS)] * 3
    assert sent_by_block("attn_only(self)+offload") == [TOKENS + TOKENS + SUMS] * 3
    assert sent_by_block("full, 1=attn_only+offload") == [0, TOKENS + 2 * (TOKENS + SUMS), 0]
    everything = sent_by_block("none+offload")
    assert everything[0] > 10 * TOKENS and everything == [everything[0]] * 3


@pytest.mark.parametrize("policy", daily(POLICIES))
def test_what_is_sent_is_what_is_planned(policy):
    # Products in bf16 are slow on a CPU without instructions for them.
    arch, fp32 = ToyArch(dim=256, depth=4), Precision(matmul=torch.float32)
    check_sent(
        toy_job(arch=arch, size=(5, 128, 64), checkpointing=f"{policy}+offload", precision=fp32)
    )


def test_what_is_small_stays():
    assert SMALLEST == 2**20
    assert sent_by_block("full+offload", smallest=TOKENS) == [TOKENS] * 3
    assert sent_by_block("full+offload", smallest=TOKENS + 1) == [0] * 3


def test_weights_and_buffers_stay():
    """Under `none` every product keeps its weight: the largest storages of the block, and no copy
    of one is made."""
    arch = ToyArch(depth=1, dim=256)
    model = on(whole(1), arch=arch, adapter=None)
    weights = {
        parameter.nbytes for parameter in model.layers[0].parameters() if parameter.ndim == 2
    }
    model.layers[0].register_buffer("table", torch.ones(()).expand(123).clone())
    model.layers[0].register_forward_pre_hook(
        lambda block, given: (block.table * given[0].tokens.sum(), None)[1]
    )
    divide(model, whole(1))
    with PretendDevices(), Copies() as copies:
        model(inputs_of(model), engine=engine("none"))
    assert copies.sizes and not weights & set(copies.sizes) and 123 * 4 not in copies.sizes


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Sizes of what is copied to the host."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].device == HOST != args[1].device:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


@cache
def counted(policy, depth):
    """Bytes of fake tensors: alive on the device and on the host after a forward, and most on the
    device in forward and backward."""
    with warnings.catch_warnings(), RepeatedFakes(), MemoryTracker() as ledger:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        with torch.device(ONE), ledger.purpose("weights"):
            model = ToyModel(ToyArch(depth=depth), Precision()).requires_grad_(False)
            latents = [torch.empty(4, 2, 4, 4, requires_grad=True) for _ in range(2)]
            given = ToyInputs(latents, torch.empty(2), [torch.empty(5, 8) for _ in range(2)])
        ledger.restart_peak()
        engine = BlockEngine(policy=policy, host=HostMemory(smallest=0))
        loss = sum(output.square().sum() for output in model(given, engine=engine))
        alive, forward = (
            [ledger.live[ONE]["activations"], ledger.total(HOST)],
            ledger.at_peak[ONE]["activations"],
        )
        ledger.restart_peak()
        loss.backward()
        return *alive, forward, ledger.at_peak[ONE]["activations"]


@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_leave_the_device_for_the_host(policy):
    """Those of the last block are on both: the backward begins with them."""
    there, on_the_host, *_ = counted(policy, 3)
    there_offloaded, host_offloaded, *_ = counted(f"{policy}+offload", 3)
    assert on_the_host == 0 and host_offloaded >= 3 * TOKENS
    assert 3 * (there - there_offloaded) == 2 * host_offloaded


@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_holds_two_blocks_whatever_the_depth(policy):
    """Without offloading each block adds what it keeps to all of these."""
    few, many = counted(f"{policy}+offload", 3), counted(f"{policy}+offload", 4)
    assert many[0] == few[0] and many[2:] == few[2:]
    assert 3 * many[1] == 4 * few[1]
    few_kept, many_kept = counted(policy, 3), counted(policy, 4)
    assert all(3 * (many_kept[i] - few_kept[i]) == few[1] for i in (0, 2, 3))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("full+offload", [(3, [3], [2, 3]), (2, [2], [1, 2]), (1, [1], [0, 1]), (0, [0], [0])]),
        ("full+offload, 1=none", [(3, [3], [2, 3]), (2, [2], [2]), (1, [], [0]), (0, [0], [0])]),
    ],
)
def test_a_block_is_fetched_while_the_one_behind_it_works(policy, expected, monkeypatch):
    """And no earlier: when the mark of a block is passed it is there, and what is on its way then
    is the block before it."""
    stores, seen = [], []

    class Kept(HostStore):
        def __init__(self, *given):
            super().__init__(*given)
            stores.append(self)

        def pre_backward(self, index, block):
            before = self._there()
            super().pre_backward(index, block)
            seen.append((index, before, self._there()))

        def _there(self):
            return [i for i, group in self._groups.items() if any(map(on_both, group.alive()))]

    def on_both(kept):
        return kept.host is not None and kept.device is not None

    monkeypatch.setattr(activation_offload, "HostStore", Kept)
    with PretendDevices():
        loss = loss_of(on(whole()), BlockEngine(policy=policy, host=HostMemory(smallest=0)))
        assert stores[0]._there() == [3], "the backward begins with the last"
        loss.backward()
    assert seen == expected
    assert not stores[0]._there()


# Next to other levers


def test_several_forwards_wait_for_one_backward():
    """Pipelined micro-batches, on one device and on two: the first block of one is followed by the
    last of the one before."""
    batches, made = micro_batches(toy_items(2, ragged=True), 2), []
    for devices, run in (
        (whole(), BlockEngine(policy="attn_only")),
        (whole(), engine("attn_only")),
        ([ONE] * 3 + [TWO] * 3, engine("attn_only")),
    ):
        model = on(devices)
        with PretendDevices(), CountCrossings() as crossings:
            accumulate_gradients(Model(model, run, TOY), batches, at(step=2, pipelined=True))
        made.append((gradients(model), crossings))
    assert same(made[0][0], made[1][0]) and same(made[0][0], made[2][0])
    assert made[1][1].copies[ONE, HOST] > made[0][1].copies[ONE, HOST]


def test_accumulation_uses_the_same_memory_again():
    batches, found = micro_batches(toy_items(2), 4), []
    for num in (2, 4):  # a sample alone, then both, and the same again
        model, run = on(whole()), engine("none")
        with PretendDevices():
            accumulate_gradients(Model(model, run, TOY), batches[:num], at(step=2))
        found.append(run.host.num_bytes)
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("policy", daily(POLICIES, "attn_only"))
def test_trained_weights_may_be_streamed_as_well(policy, monkeypatch):
    """They are filled again in place, and updated in the backward. Other policies, and fewer
    blocks: `FusedChecks`."""
    items, hosts = toy_items(2, ragged=True), []
    numbers, values = train_streamed(TOY, make_model(TOY, ARCH), items, BlockEngine(policy=policy))
    model = on(whole(), adapter=None)
    for block in model.blocks():
        move_to(block, HOST)  # where what is streamed is loaded to

    def made(**given):
        hosts.append(HostMemory(smallest=0))
        return BlockEngine(**given, host=hosts[-1])

    monkeypatch.setattr(conformance_swap, "BlockEngine", made)
    with PretendDevices():
        swap = stream(model, devices=[ONE] * 4, trained=True)
        with Watched(swap) as watch:
            engine = BlockEngine(policy=f"{policy}+offload", hooks=(swap,))
            other_numbers, others = train_streamed(TOY, model, items, engine)
    assert other_numbers == numbers and same(values, others)
    assert watch.most == 2 and all(host.num_bytes >= 4 * TOKENS for host in hosts)


# Backwards that are not the usual one


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retained_graph_is_run_backwards_again(policy):
    model, twice = on(whole()), []
    with PretendDevices():
        loss = loss_of(model, engine(policy))
        for retain in (True, False):
            model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=retain)
            twice.append(gradients(model))
    plain = on(whole())
    with PretendDevices():
        loss_of(plain, BlockEngine(policy=policy)).backward()
    assert same(twice[0], gradients(plain)) and same(twice[1], gradients(plain))


def test_a_graph_that_is_dropped_gives_its_memory_back():
    model, run, held = on(whole()), engine("none"), []
    with PretendDevices():
        for _ in range(3):
            loss_of(model, run)
            held.append(run.host.num_bytes)
    assert held[0] == held[1] == held[2] > 0


def test_without_a_mark_a_saved_tensor_is_fetched_when_it_is_asked_for():
    """A backward through one block from a gradient of its own."""
    model, results = on(whole()), []
    for policy in ("none", "none+offload"):
        with PretendDevices(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                block_hooks, "call_before_backward", lambda before, after, callback: after
            )
            run = BlockEngine(policy=policy, host=HostMemory(smallest=0))
            model.zero_grad(set_to_none=True)
            loss_of(model, run).backward()
            results.append(gradients(model))
    assert same(*results)


def test_a_saved_tensor_that_is_changed_is_refused():
    class Careless(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, carry):
            x = carry.tokens.sigmoid()  # keeps its result
            y = self.inner(carry._replace(tokens=x))
            x.add_(1)
            return y

    for smallest in (0, SMALLEST):
        model = on(whole())
        model.layers[1] = Careless(model.layers[1])
        with (
            PretendDevices(),
            pytest.raises(RuntimeError, match="modified by an inplace operation"),
        ):
            loss_of(
                model, BlockEngine(policy="none+offload", host=HostMemory(smallest=smallest))
            ).backward()


def test_a_tensor_that_is_overwritten_after_it_was_sent_is_saved_anew():
    """The host has the bytes of the block before; what a later block saves of the same storage is
    other bytes."""

    class Gated(nn.Module):
        def __init__(self, inner, gate):
            super().__init__()
            self.inner, self.gate = inner, gate

        def forward(self, carry):
            return self.inner(carry._replace(tokens=carry.tokens * self.gate(carry.tokens)))

    results = []
    for in_place in (False, True):
        gates: list[torch.Tensor] = []

        def first(tokens, gates=gates):
            gates.append(tokens.detach().sigmoid())
            return gates[-1]

        def second(tokens, gates=gates, in_place=in_place):
            return gates[-1].mul_(2) if in_place else gates[-1] * 2

        model = on(whole())
        model.layers[1] = Gated(model.layers[1], first)
        model.layers[2] = Gated(model.layers[2], second)
        with PretendDevices():
            run = BlockEngine(policy="none+offload", host=HostMemory(smallest=0))
            loss_of(model, run).backward()
        results.append(gradients(model))
    assert same(*results)


# Where nothing is moved, and where something fails


@pytest.mark.parametrize("policy", ["full+offload", "none+offload", "none, 2=offload"])
def test_on_the_host_nothing_is_done(policy, monkeypatch):
    monkeypatch.setattr(activation_offload, "HostStore", None)
    model = make_model(TOY, ARCH, adapter=DROPOUT)
    run = BlockEngine(policy=policy, host=HostMemory(smallest=0))
    plain = BlockEngine(policy=policy.replace("+offload", "").replace("offload", "full"))
    assert (
        outcome(TOY, model, toy_items(2), run).differences(outcome(TOY, model, toy_items(2), plain))
        == []
    )
    assert run.host.num_bytes == 0


def test_without_gradients_nothing_is_done(monkeypatch):
    monkeypatch.setattr(activation_offload, "HostStore", None)
    model = on(whole())
    with PretendDevices(), torch.no_grad():
        loss_of(model, engine("none"))


def test_a_policy_that_does_not_offload_costs_nothing(monkeypatch):
    monkeypatch.setattr(activation_offload, "HostStore", None)
    with PretendDevices():
        loss_of(on(whole()), BlockEngine(policy="attn_only")).backward()


def test_a_run_on_the_host_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert (
        world.train(
            "run", 1, "--train.checkpointing", "full, 1=attn_only+offload", "--sample.captions", "0"
        )
        == 0
    )
    said = [line for line in capsys.readouterr().err.splitlines() if "offload" in line]
    assert len(said) == 1 and "nothing is moved" in said[0]
    with PretendDevices():
        assert (
            world.train(
                "there", 1, "--train.checkpointing", "offload", "--train.devices", '["cpu:1"]'
            )
            == 0
        )
    assert "nothing is moved" not in capsys.readouterr().err


class NoMemory(Exception):
    pass


@pytest.mark.parametrize("policy", POLICIES)
def test_a_failure_in_a_block_leaves_nothing_registered(policy, monkeypatch):
    model, run = on(whole()), engine(policy)
    expected = on(whole())
    with PretendDevices():
        loss_of(expected, BlockEngine(policy=policy)).backward()
        with monkeypatch.context() as patch:
            patch.setattr(F, "layer_norm", _fails_at_call(3, F.layer_norm))
            with pytest.raises(NoMemory):
                loss_of(model, run)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        loss_of(model, run)
        held = run.host.num_bytes
        loss_of(model, run).backward()
    assert run.host.num_bytes == held, "what the failure left is used again"
    assert same(gradients(model), gradients(expected))


def _fails_at_call(number, function):
    calls = []

    def called(*given, **named):
        calls.append(None)
        if len(calls) == number:
            raise NoMemory
        return function(*given, **named)

    return called


# On a GPU


@pytest.mark.parametrize("policy", daily(POLICIES, "attn_only"))
def test_a_gpu_offloads_bitwise_and_keeps_less(policy, gpu):
    """Large enough that a copy takes longer than what launches it: one that is not waited for,
    there or back, shows."""
    compute_fp32_in_fp32()
    depth, side, steps, peaks = gpu.size(8, 4), gpu.size(32, 8), [], []
    generator = torch.Generator().manual_seed(3)
    items = [
        {
            "latents": torch.randn(4, 1, side, side, generator=generator),
            "text": torch.randn(16, 8, generator=generator),
        }
        for _ in range(2)
    ]
    for chosen in (policy, f"{policy}+offload"):
        # what was kept of the steps without offloading
        before = gpu.runtime.memory_allocated(gpu.device)
        run = BlockEngine(policy=chosen, host=HostMemory(smallest=gpu.size(SMALLEST, 0)))
        model = make_model(
            TOY, ToyArch(depth=depth, dim=gpu.size(512, 64), heads=8, dropout=0.1), adapter=DROPOUT
        )
        place_model(model, [gpu.device] * depth)
        with sdpa_kernel(SDPBackend.MATH):  # the others sum in any order
            steps.append([outcome(TOY, model, items, run) for _ in range(gpu.size(2, 1))])
            gpu.runtime.synchronize(gpu.device)
            gpu.runtime.reset_peak_memory_stats(gpu.device)
            steps[-1].append(outcome(TOY, model, items, run))  # with buffers that there are
        peaks.append(gpu.runtime.max_memory_allocated(gpu.device) - before)
        del model
    assert all(offloaded.equals(plain) for plain, offloaded in zip(*steps, strict=True))
    # of all blocks two are there, and a third while it is let go of
    assert run.host.num_bytes > 0 and peaks[1] < peaks[0] - run.host.num_bytes * (depth - 3) / depth


@pytest.mark.slow
def test_a_gpu_offloads_several_forwards_before_one_backward(gpu):
    compute_fp32_in_fp32()
    batches, made = micro_batches(toy_items(2, ragged=True), 3), []
    for policy, smallest in (("none", SMALLEST), ("none+offload", 0)):
        model = make_model(
            TOY, ToyArch(depth=4, dim=gpu.size(256, 32), heads=4, dropout=0.1), adapter=DROPOUT
        )
        place_model(model, [gpu.device] * 4)
        run = BlockEngine(policy=policy, host=HostMemory(smallest=smallest))
        with sdpa_kernel(SDPBackend.MATH):
            for step in range(gpu.size(3, 2)):
                accumulate_gradients(Model(model, run, TOY), batches, at(step=step, pipelined=True))
        made.append(gradients(model))
    assert same(*made)
