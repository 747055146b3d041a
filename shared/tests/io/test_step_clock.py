"""The account of a step's time: every moment of a device belongs to one part, on the device's own
clock."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from ditkit_core.engine.block_hooks import BlockHooks, timed
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.io import step_clock
from ditkit_core.io.step_clock import PARTS, StepClock
from ditkit_core.loading.model import Model
from ditkit_core.testing.pretend_devices import PretendDevices, divide
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model, micro_batches, outcome
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.train_step import StepContext, accumulate_gradients

CPU, FIRST, LAST = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


class Times:
    """A clock that the test sets, for host and devices."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, device: torch.device, *, in_graph: bool = False) -> Any:
        return Event(self.now) if device.type == "cuda" else self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Event:
    """Of a GPU: times are in milliseconds between two events that are over, and those before an
    event that is waited for are."""

    at: float
    over: ClassVar[float] = -1.0

    def synchronize(self) -> None:
        Event.over = max(Event.over, self.at)

    def elapsed_time(self, end: "Event") -> float:
        assert max(self.at, end.at) <= Event.over, (
            "Both events must be completed before calculating elapsed time."
        )
        return 1000 * (end.at - self.at)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    found, Event.over = Times(), -1.0
    monkeypatch.setattr(step_clock, "_now", found)
    return found


def test_all_time_between_begin_and_end_is_accounted_for_once(times: Times) -> None:
    clock = StepClock([CPU])
    for _ in range(2):
        clock.begin()
        times.after(1)
        clock.mark(CPU, "copies")
        times.after(2)
        clock.mark(CPU, "forward")
        times.after(4)
        clock.mark(CPU, "backward")
        times.after(8)
        with clock.recompute(CPU):
            times.after(16)
        times.after(32)
        clock.mark_all("optimizer")
        times.after(64)
        clock.end()
        expected = {
            "waiting": 1,
            "copies": 2,
            "forward": 4,
            "backward": 40,
            "recompute": 16,
            "optimizer": 64,
        }
        assert clock.read() == {CPU: expected}
        assert clock.numbers() == {f"seconds/{part}": seconds for part, seconds in expected.items()}
        times.after(1000)  # a validation, a save
        clock.mark(CPU, "forward")  # which calls the engine, too


def test_the_optimizer_of_a_gpu_is_in_the_step_that_it_runs_into(times: Times) -> None:
    clock = StepClock([FIRST])

    def step(seconds: float) -> float:
        clock.begin()
        times.after(1)
        clock.mark(FIRST, "forward")
        times.after(2)
        clock.mark_all("optimizer")
        times.after(seconds)
        clock.end()
        found = clock.read()[FIRST]
        assert (found["waiting"], found["forward"]) == (1, 2)
        times.after(100)
        return found["optimizer"]

    assert [step(4), step(8), step(16)] == [0, 4, 8]


def test_a_device_that_begins_a_block_says_nothing_of_the_others(times: Times) -> None:
    """Backwards of pipelined micro-batches run at once, on a thread for each device."""
    other = torch.device("meta")
    clock = StepClock([CPU, other])
    (marks,) = timed(clock, ())
    clock.begin()
    marks.pre_backward(1, nn.Linear(1, 1, device=other))
    times.after(1)
    marks.pre_backward(0, nn.Linear(1, 1))
    times.after(2)
    clock.end()
    found = clock.read()
    assert (found[other]["backward"], found[other]["waiting"]) == (3, 0)
    assert (found[CPU]["backward"], found[CPU]["waiting"]) == (2, 1)


def test_other_devices_and_no_devices_are_ignored() -> None:
    clock = StepClock([CPU])
    clock.begin()
    clock.mark(torch.device("meta"), "forward")
    clock.mark(None, "forward")
    assert set(clock.read()) == {CPU}
    nothing = StepClock()
    nothing.begin()
    nothing.mark(CPU, "forward")
    assert nothing.numbers() == {} and nothing.devices == ()


class Copying(BlockHooks):
    """Takes time, as waiting for a streamed block does."""

    def __init__(self, times: Times):
        self._times = times

    def pre_forward(self, index: int, block: nn.Module) -> None:
        self._times.after(4)

    def pre_backward(self, index: int, block: nn.Module) -> None:
        self._times.after(8)


@pytest.mark.parametrize("policy", ["none", "full", "attn_only"])
def test_what_a_block_waits_for_is_copies_and_its_recompute_is_not_its_backward(
    times: Times, policy: str
) -> None:
    """By a clock that only hooks and blocks move on: a block's forward takes 1, in a recompute
    too."""
    depth = 3
    model = make_model(TOY, ToyArch(depth=depth))
    for block in model.blocks():
        block.register_forward_pre_hook(lambda *_: times.after(1))
    clock = StepClock([CPU])
    engine = BlockEngine(policy=policy, hooks=(Copying(times),), clock=clock)
    clock.begin()
    outcome(TOY, model, toy_items(2), engine)
    clock.end()
    found = clock.read()[CPU]
    assert found["copies"] == depth * (4 + 8)
    assert (found["forward"], found["recompute"]) == (depth, 0 if policy == "none" else depth)
    assert found["backward"] == found["waiting"] == found["optimizer"] == 0


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_device_waits_while_another_one_works(times: Times, pipelined: bool) -> None:
    """From where it sends the carry until the gradient comes back, and until the next micro-batch
    reaches it. The head's backward takes 16.

    Where micro-batches are pipelined, nothing says that the first device has done its part of a
    backward: it is in it until its next part.
    """
    first, last = (torch.device("cpu", index) for index in (1, 2))
    model = make_model(TOY, ToyArch(depth=3))
    divide(model, [first, first, last, last, last])
    for block in model.blocks():
        block.register_forward_pre_hook(lambda *_: times.after(1))

    def slow(head: nn.Module, given: Any, outputs: Any) -> None:
        outputs[0].register_hook(lambda _: times.after(16))

    model.head.register_forward_hook(slow)
    clock = StepClock([first, last])
    engine = BlockEngine(policy="full", hooks=(Copying(times),), clock=clock)
    clock.begin()
    with PretendDevices():
        context = StepContext(step=0, seed=1, flow=FlowConfig(), pipelined=pipelined, clock=clock)
        accumulate_gradients(Model(model, engine, TOY), micro_batches(toy_items(2)), context)
    clock.end()
    found, none = clock.read(), dict.fromkeys(PARTS, 0)
    alone = {"forward": 2 * 1, "recompute": 2 * 1, "copies": 2 * (4 + 8)}
    others = {"forward": 2 * 2, "recompute": 2 * 2, "copies": 2 * 2 * (4 + 8), "backward": 2 * 16}
    missed = 2 * (1 + 8) + 16 if pipelined else 0
    assert found[first] == none | alone | {
        "waiting": sum(others.values()) - missed,
        "backward": missed,
    }
    assert found[last] == none | others | {"waiting": sum(alone.values())}
