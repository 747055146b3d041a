"""Streamed weights that are trained: updated in the backward, brought back once, and nobody
notices."""

import gc
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from saved_states import CLIPS, assert_same_state, numbers
from state_buffers import state_buffers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from toy_training import ToyBatch, ToyData, train

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.block_swap import BlockQueue, BlockSwap
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.pinned_memory import CopyLane
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import compute_fp32_in_fp32
from ditkit_core.testing.combinations import daily
from ditkit_core.testing.conformance_streams import place_model
from ditkit_core.testing.conformance_swap import Watched, stream, train_streamed
from ditkit_core.testing.pretend_devices import PretendDevices, move_to
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import (
    EMAConfig,
    FlowConfig,
    HeldOutConfig,
    SaveConfig,
    TrainConfig,
)
from ditkit_core.training.metrics import LogConfig
from ditkit_core.training.optim.fused_checks import check_swap
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step

CPU, ONE, TWO = torch.device("cpu"), torch.device("cpu:1"), torch.device("cpu:2")
ARCH = ToyArch(depth=4, dim=16, dropout=0.1)
OPTIMIZERS = ["adamw", "adafactor", "muon"]


def model_of(arch=ARCH):
    return make_model(TOY, arch)


@cache
def ordinary(policy="none", **given):
    """Steps of the ordinary loop, which nothing changes: their results, and everything after
    them."""
    return train_streamed(TOY, model_of(), toy_items(2), BlockEngine(policy=policy), **given)


def differences(one, other):
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


# Numbers


@pytest.mark.parametrize(
    ("optimizer", "policy", "one_of"),
    [
        *(("adamw", policy, 2) for policy in POLICIES),  # all of them: `SwapChecks`
        ("adafactor", "none", 1),
        ("adafactor", "attn_only", 2),
        ("muon", "full", 1),
        ("muon", "none", 2),
    ],
)
def test_steps_are_those_of_the_ordinary_loop_bitwise(optimizer, policy, one_of):
    """Losses, norms, weights, and the optimizer's state."""
    numbers, values = ordinary(optimizer=optimizer)
    model = model_of()
    swap = stream(model, one_of, trained=True)
    with Watched(swap) as watch:
        others = train_streamed(
            TOY,
            model,
            toy_items(2),
            BlockEngine(policy=policy, hooks=(swap,)),
            optimizer=optimizer,
        )
    assert others[0] == numbers and differences(values, others[1]) == []
    assert any(name.startswith("optimizer layers.3.out.weight|") for name in values)
    assert watch.returned == 2 * len(swap.buffers) and watch.most == 2
    assert (
        not watch.there()
        and state_buffers(swap)
        and not any(b.untyped_storage().nbytes() for b in state_buffers(swap))
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_devices_that_are_not_the_host(optimizer):
    devices = [ONE, ONE, TWO, TWO]
    numbers, values = ordinary(optimizer=optimizer)
    model = model_of()
    move_to(model.embed, devices[0])
    move_to(model.head, devices[-1])
    with PretendDevices():
        swap = stream(model, devices=devices, trained=True)
        with Watched(swap) as watch:
            others = train_streamed(
                TOY,
                model,
                toy_items(2),
                BlockEngine(policy="full", hooks=(swap,)),
                optimizer=optimizer,
            )
    assert others[0] == numbers and differences(values, others[1]) == []
    assert {buffer.device for buffer in state_buffers(swap)} == set(devices)
    assert watch.returned == 8 and watch.most == 2 and not watch.there()


def run(folder, steps, one_of=None, **given):
    """A run in the folder with as many blocks streamed; None is the ordinary loop."""
    model = model_of()
    swap = stream(model, one_of, trained=True) if one_of else None
    arguments = {
        "config": TrainConfig(steps=steps, batch_size=2, clip_norm=0.0, seed=5),
        "optim": OptimConfig(lr=3e-3, warmup_steps=3, fused_backward=one_of is not None),
        "ema": EMAConfig(decay=0.9),
        "save": SaveConfig(every_steps=2),
        "held_out": HeldOutConfig(sigmas=(0.3, 0.8)),
        "held_out_clips": CLIPS,
        "log": LogConfig(tensorboard=False),
        **given,
    }
    trainable, flow = trainable_parameters(model), FlowConfig(weighting="bell")
    toy = Model(model, BlockEngine(hooks=() if swap is None else (swap,)), TOY, trainable, swap)
    return train(toy, ToyData(), folder=folder, flow=flow, **arguments)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the result of a run of the ordinary loop that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, 4)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (None, 1)])
def test_a_run_goes_on_under_another_swap_bitwise(first, second, tmp_path, whole):
    """With an average, which is exchanged for the weights where they are measured, every other
    step. What streamed runs save is what the ordinary loop saves, which goes on from it."""
    folder, whole = whole
    run(tmp_path / "halves", 3, first)
    halves = run(tmp_path / "halves", 4, second)
    assert_same_state(whole.save, halves.save)
    assert numbers(folder) == numbers(tmp_path / "halves")
    assert (whole.held_out_before, whole.held_out) == (halves.held_out_before, halves.held_out)


def test_a_weight_whose_first_gradient_comes_late_is_streamed_from_then_on():
    kept = []
    for streams in (False, True):
        model = model_of()
        swap = stream(model, trained=True) if streams else None
        trained = TrainState(
            model, trainable_parameters(model), OptimConfig(fused_backward=streams), EMAConfig(),
            swap
        )  # fmt: skip
        out = model.layers[1].out
        for step in range(3):
            out.forward = partial(F.linear, weight=out.weight, bias=out.bias if step else None)
            batch = ToyBatch(["a", "b"], toy_items(2))
            training_step(
                Model(model, BlockEngine(hooks=() if swap is None else (swap,)), TOY),
                [batch],
                trained.optimizer,
                StepContext(step=step, seed=1, flow=FlowConfig()),
                lr=0.01,
                clip_norm=0.0,
            )
        state = trained.state_dict().tensors
        kept.append({**state["trainable"], **state["optimizer"]})
    assert differences(*kept) == [] and "layers.1.out.bias|exp_avg" in kept[0]
    assert len(state_buffers(swap)) == 5 and not any(
        b.untyped_storage().nbytes() for b in state_buffers(swap)
    )


# A stream of its own


class LazyLane(CopyLane):
    """Has a side stream, in whose order things happen, but not before somebody waits for them."""

    def __init__(self, device):
        super().__init__(device)
        self._runtime, self.waiting = torch.cuda, []
        self._stream = SimpleNamespace(
            synchronize=self.catch_up, wait_stream=lambda other: None, record_event=lambda: None
        )  # fmt: skip

    def catch_up(self):
        while self.waiting:
            self.waiting.pop(0)()

    def copies(self):
        return nullcontext()


class Lazy(BlockQueue):
    """Copies on a lazy lane."""

    def _streamed(self, found, *, returns=False):
        part = super()._streamed(found, returns=returns)
        fetch = part.fetch

        def fetch_after_what_waits():
            self.lane.catch_up()
            fetch()

        def store_later():
            size = part._num_returned
            brought = part._filled[:size].clone()
            self.lane.waiting.append(lambda: part.host[:size].copy_(brought))

        part.fetch, part.store = fetch_after_what_waits, store_later
        return part


@pytest.mark.parametrize("one_of", [1, 2, 4])
def test_what_is_brought_back_is_waited_for(one_of, monkeypatch):
    """The average reads the weights on the host after each step, a save those of the optimizer;
    with 2 and 4 the first block stays."""
    given = {"num_steps": 3, "ema": EMAConfig(decay=0.9)}
    numbers, values = ordinary(**given)
    monkeypatch.setattr("ditkit_core.engine.block_swap.BlockQueue", Lazy)
    monkeypatch.setattr("ditkit_core.engine.block_swap.CopyLane", LazyLane)
    monkeypatch.setattr("ditkit_core.engine.pinned_memory.page_lock", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    model = model_of()
    swap = stream(model, one_of, trained=True)
    lane, waited = swap._queues[CPU].lane, []
    monkeypatch.setattr(
        lane._stream, "synchronize", lambda: (waited.append(len(lane.waiting)), lane.catch_up())
    )
    others = train_streamed(TOY, model, toy_items(2), BlockEngine(hooks=(swap,)), **given)
    assert others[0] == numbers and differences(values, others[1]) == []
    assert any(name.startswith("ema ") for name in values) and not lane.waiting
    assert len(waited) == 3 and all(waited), "once a step, and for something"


# Memory


class Live(TorchDispatchMode):
    """The most bytes of streamed blocks that were on the device at once, by what they are."""

    def __init__(self, swap, optimizer):
        super().__init__()
        self.swap, self.optimizer, self.most = swap, optimizer, {}
        self.streamed = [
            name for name, p in optimizer.parameters.items() if swap.host_of(p) is not p
        ]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view:  # which makes no memory
            return out
        state = [t for name in self.streamed for t in self.optimizer.state_of(name).values()]
        # in buffers, or not yet
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in state}
        gradients = [self.optimizer.parameters[name].grad for name in self.streamed]
        found = {
            "weights": sum(buffer.untyped_storage().nbytes() for buffer in self.swap.buffers),
            "state": sum(storage.nbytes() for storage in storages.values()),
            "gradients": sum(gradient.nbytes for gradient in gradients if gradient is not None),
        }
        found["together"] = sum(found.values())
        self.most = {key: max(value, self.most.get(key, 0)) for key, value in found.items()}
        return out


@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_than_two_blocks_are_there(policy):
    model = model_of(ToyArch(depth=4, dim=16))
    swap = stream(model, trained=True)
    trained = TrainState(
        model, trainable_parameters(model), OptimConfig(fused_backward=True), EMAConfig(), swap
    )
    block, largest = swap.num_bytes // 4, 3 * 16 * 16 * 4
    for step in range(2):
        with Live(swap, trained.optimizer) as live:
            batch = ToyBatch(["a", "b"], toy_items(2))
            training_step(
                Model(
                    model, BlockEngine(policy=policy, hooks=() if swap is None else (swap,)), TOY
                ),
                [batch],
                trained.optimizer,
                StepContext(step=step, seed=1, flow=FlowConfig()),
                lr=0.01,
                clip_norm=0.0,
            )
        state = max(
            buffer.num_bytes for parts in swap._queues[CPU].states.values() for buffer in parts
        )
        assert state > 2 * block
        assert live.most["weights"] == 2 * block
        # in the first step a block's state exists next to the buffer that takes it over
        assert state / 2 < live.most["state"] <= 2 * state
        assert 0 < live.most["gradients"] <= largest
        assert live.most["together"] <= 2 * (block + state) + largest
        assert not any(b.untyped_storage().nbytes() for b in [*swap.buffers, *state_buffers(swap)])


def test_the_optimizer_of_another_run_holds_nothing():
    model = model_of()
    swap = stream(model, trained=True)
    train_streamed(TOY, model, toy_items(2), BlockEngine(hooks=(swap,)), num_steps=1)
    assert state_buffers(swap)
    swap.attach(None)
    assert not state_buffers(swap)


# On a GPU


WIDE_RATE = 1e-6
"""Learning rate of a toy of width 2048. AdamW's first step moves every weight by the rate, and a
row's sum by up to the rate times the width: with 1e-2 the ordinary loop has a gradient of norm 1e19
after a step, and none that is finite after two."""


def assert_stable(reported):
    """Of a loop that diverges, nothing is compared. Its noise and noise levels alone change the
    loss by a factor of ten."""
    losses = [step.loss for step in reported]
    assert max(losses) < 100 * losses[0], losses


@pytest.mark.parametrize("policy", daily(POLICIES, "attn_only"))
def test_a_gpu_updates_streamed_weights_bitwise(policy, gpu):
    """Large enough that a copy takes longer than what launches it: one that is not waited for,
    there or back, shows."""
    compute_fp32_in_fp32()
    results, peaks, depth = [], [], gpu.size(6, 4)
    for streamed in ((), range(depth)):
        model = model_of(ToyArch(depth=depth, dim=gpu.size(2048, 256), heads=16))
        swap = place_model(model, [gpu.device] * depth, streamed, trained=True)
        gpu.runtime.synchronize(gpu.device)
        gpu.runtime.reset_peak_memory_stats(gpu.device)
        with sdpa_kernel(SDPBackend.MATH):  # the others sum in any order
            engine = BlockEngine(policy=policy, hooks=(swap,) if streamed else ())
            reported, values = train_streamed(
                TOY, model, toy_items(2), engine, num_steps=gpu.size(3, 2), lr=WIDE_RATE
            )
        results.append((reported, {name: value.clone() for name, value in values.items()}))
        peaks.append(gpu.runtime.max_memory_allocated(gpu.device))
        assert swap.locked
        del model, swap, engine, values
        gc.collect()
    assert_stable(results[0][0])
    assert results[0][0] == results[1][0] and differences(results[0][1], results[1][1]) == []
    # Under `none` both have the activations of all blocks, too: on the stand-in, whose weights are
    # small, more than 3 MiB of 67.
    activations = gpu.size(0, 3 * 2**20) if policy == "none" else 0
    # of weights, gradients and two averages of all blocks, those of two blocks, and a gradient or
    # two
    assert peaks[1] - activations < (peaks[0] - activations) * (2 * 3 + 2) / (depth * 4)


def test_a_gpu_brings_back_what_an_average_reads(gpu):
    """The first block stays, so that what is streamed was all sent back before the end of the
    backward."""
    compute_fp32_in_fp32()
    results, depth = [], gpu.size(6, 4)
    for streamed in ((), (depth // 2 - 1, depth - 1)):
        model = model_of(ToyArch(depth=depth, dim=gpu.size(2048, 64), heads=16))
        swap = place_model(model, [gpu.device] * depth, streamed, trained=True)
        engine, steps = BlockEngine(hooks=(swap,) if streamed else ()), gpu.size(3, 2)
        with sdpa_kernel(SDPBackend.MATH):  # the others sum in any order
            results.append(
                train_streamed(
                    TOY,
                    model,
                    toy_items(2),
                    engine,
                    num_steps=steps,
                    lr=WIDE_RATE,
                    ema=EMAConfig(decay=0.9),
                )
            )
    assert_stable(results[0][0])
    assert results[0][0] == results[1][0]
    averages = [
        {name: t for name, t in values.items() if name.startswith("ema ")} for _, values in results
    ]
    others = [
        {name: t for name, t in values.items() if not name.startswith("ema ")}
        for _, values in results
    ]
    assert averages[0] and differences(*others) == []
    # computed on the host for what is streamed, where it may round otherwise
    for name, value in averages[0].items():
        torch.testing.assert_close(averages[1][name], value, rtol=1e-6, atol=1e-6, msg=name)


# What goes wrong is seen


class Forgetful(BlockSwap):
    """Brings nothing back."""

    def pre_backward(self, index, block):
        super().pre_backward(index, block)
        for queue in self._queues.values():
            queue._updated.clear()


class Hasty(BlockSwap):
    """Brings a block back before its update."""

    def pre_backward(self, index, block):
        super().pre_backward(index, block)
        for queue in self._queues.values():
            queue.blocks[index].store()
            queue._updated.clear()


class Early(BlockSwap):
    """Empties a block when its backward begins."""

    def pre_backward(self, index, block):
        super().pre_backward(max(0, index - 1), block)


class Stale(BlockSwap):
    """Takes what is there for what it is."""

    def host_changed(self):
        pass


@pytest.mark.parametrize("wrong", [Forgetful, Hasty, Early])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_swap_that_goes_wrong_is_seen(policy, wrong, monkeypatch):
    numbers, values = ordinary(policy)
    monkeypatch.setattr("ditkit_core.testing.conformance_swap.BlockSwap", wrong)
    model = model_of()
    swap = stream(model, trained=True)
    if wrong is Early:
        with (
            pytest.raises(
                (AssertionError, RuntimeError), match="not there|out of bounds for storage"
            ),
            Watched(swap),
        ):
            train_streamed(TOY, model, toy_items(2), BlockEngine(policy=policy, hooks=(swap,)))
    else:
        others = train_streamed(TOY, model, toy_items(2), BlockEngine(policy=policy, hooks=(swap,)))
        assert others[0] != numbers and "trainable layers.1.out.weight" in differences(
            values, others[1]
        )


def test_an_average_that_stays_on_the_device_is_seen(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", 3)
    monkeypatch.setattr("ditkit_core.testing.conformance_swap.BlockSwap", Stale)
    stale = run(tmp_path / "stale", 3, 1)
    assert (whole.held_out, numbers(tmp_path / "whole")) != (
        stale.held_out,
        numbers(tmp_path / "stale"),
    )


# What is refused


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"optim.fused_backward = true \(and train.clip_by = last_step or block\)"),
        (
            {"fused_backward": True, "name": "schedulefree_adamw"},
            "use adamw, adamw8bit, adafactor, muon",
        ),
    ],
)
def test_what_cannot_be_streamed_is_one_line(given, says):
    with pytest.raises(UserError, match=says) as error:
        check_swap((2,), "full", OptimConfig(**given))
    assert "\n" not in str(error.value)


def test_what_can_be_streamed_is_not_refused():
    check_swap((2,), "lora", OptimConfig())
    check_swap((0,), "full", OptimConfig())
    for name in (*OPTIMIZERS, "adamw8bit"):
        check_swap((2,), "full", OptimConfig(fused_backward=True, name=name))


@pytest.mark.parametrize("other", ["head", "layers.0"])
def test_a_trained_weight_of_two_stages_is_refused(other):
    model = model_of()
    shared = nn.Parameter(torch.zeros(16))
    model.layers[3].shared = model.get_submodule(other).shared = shared
    blocks = (CPU,) * 4
    BlockSwap(
        model,
        Placement(embed=CPU, blocks=blocks, head=CPU, streamed=frozenset({1, 2})),
        trained=True,
    )
    assert model.layers[3].shared is shared
    with pytest.raises(UserError, match=r"trained weight shared is used elsewhere"):
        BlockSwap(
            model,
            Placement(embed=CPU, blocks=blocks, head=CPU, streamed=frozenset({3})),
            trained=True,
        )
