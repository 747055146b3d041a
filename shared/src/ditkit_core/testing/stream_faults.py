"""Faults in the order of streams, each planted alone, which the checks of a model's streams must
find. Tests inherit `StreamFaultChecks`."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ditkit_core.engine import engine
from ditkit_core.engine.activation_offload import _DeviceStore
from ditkit_core.engine.block_swap import BlockQueue
from ditkit_core.engine.engine import POLICIES
from ditkit_core.engine.pinned_memory import CopyLane, Streamed, page_lock
from ditkit_core.io.runtimes import runtime_of
from ditkit_core.testing.conformance_streams import ONE, StreamCase, unordered
from ditkit_core.testing.world import ModelChecks

Patch = pytest.MonkeyPatch


def nothing(*_: Any) -> None:
    """In place of a wait."""


def without(name: str, patch: Patch) -> None:
    """A lane that does not wait: for copies, for the work before them, or on the host."""
    patch.setattr(CopyLane, name, nothing)


def an_event_before_its_copies(patch: Patch) -> None:
    """Whoever waits for it waits for nothing."""

    def copy(
        queue: Any, fills: Sequence[Callable[[], None]], index: int, there: dict[int, Any]
    ) -> None:
        with queue.lane.copies():
            there[index] = queue.lane.record()
            for fill in fills:
                fill()

    patch.setattr(BlockQueue, "_copy", copy)


def an_event_of_the_wrong_stream(patch: Patch) -> None:
    """The computation's stream, in place of the stream of the copies."""
    patch.setattr(
        CopyLane, "record", lambda lane: lane._runtime.current_stream(lane.device).record_event()
    )


def results_copied_on_the_wrong_stream(patch: Patch) -> None:
    """On the computation's stream, where nobody waits for it."""

    def store_late(streamed: Streamed, store: Callable[[Streamed], None] = Streamed.store) -> None:
        runtime = runtime_of(streamed.buffer.device)
        with runtime.stream(runtime.default_stream(streamed.buffer.device)):
            store(streamed)

    patch.setattr(Streamed, "store", store_late)


def freed_while_it_is_copied(patch: Patch) -> None:
    """The tensors of a block that ran, without waiting for their copy to the host."""

    def send(store: Any, group: Any, leaving: Any, send: Any = _DeviceStore.send) -> None:
        send(store, group, leaving)
        group.sent = None

    patch.setattr(_DeviceStore, "send", send)


def a_buffer_filled_before_it_is_free(patch: Patch) -> None:
    """Memory that the device's own stream allocates, and may have in use until then."""

    def fetch(store: Any, missing: Any, fetch: Any = _DeviceStore.fetch) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(store._lane, "follow", nothing)
            fetch(store, missing)

    patch.setattr(_DeviceStore, "fetch", fetch)


def a_host_buffer_used_again_while_it_is_copied(patch: Patch) -> None:
    """One page-locked buffer for all blocks, which the host fills for the next block at once."""
    passing: list[Tensor] = []

    def fetch(streamed: Streamed) -> None:
        if not passing:
            passing.append(torch.empty(2**20, dtype=torch.uint8))
            assert page_lock(passing[0], ONE, {})
        passing[0][: streamed.num_bytes].copy_(streamed.host)
        streamed.make_room()
        streamed._filled.copy_(passing[0][: streamed.num_bytes], non_blocking=True)

    patch.setattr(Streamed, "fetch", fetch)


def the_stream_of_another_device(patch: Patch) -> None:
    """What follows the work of a device follows the work of another one."""

    def follow(lane: Any) -> None:
        lane._stream.wait_stream(lane._runtime.current_stream(ONE))

    patch.setattr(CopyLane, "follow", follow)


def memory_of_another_stream(patch: Patch) -> None:
    """Weights that the device's own stream allocates: they are freed to it, whatever the side
    stream does with them."""

    def make_room(
        streamed: Streamed, make_room: Callable[[Streamed], None] = Streamed.make_room
    ) -> None:
        runtime = runtime_of(streamed.buffer.device)
        with runtime.stream(runtime.default_stream(streamed.buffer.device)):
            make_room(streamed)

    patch.setattr(Streamed, "make_room", make_room)


def a_carry_sent_by_a_stream_of_its_own(patch: Patch) -> None:
    """It waits for nothing that computes the carry."""

    def sent(carry: Any, device: torch.device, move: Any = engine.move_carry) -> Any:
        runtime = runtime_of(ONE)
        with runtime.stream(runtime.Stream(ONE)):
            return move(carry, device)

    patch.setattr(engine, "move_carry", sent)


def a_copy_to_the_host_that_nobody_waits_for(patch: Patch) -> None:
    """The host computes with a carry that is still under way."""
    patch.setattr(engine, "sent_to", lambda tensor, device: tensor.to(device, non_blocking=True))


@dataclass(frozen=True, kw_only=True)
class StreamFault:
    """A fault, and where and how it shows."""

    plant: Callable[[Patch], None]
    levers: str
    """As `StreamCase.levers`."""
    message: str
    """Part of what is said of it."""
    trained: tuple[str, ...] = ("lora with dropout", "full")


_IN, _OUT = "the copy to cpu:1 on cpu:1, side stream 1", "the copy to cpu on cpu:1, side stream 1"
_AGAIN = "made of memory that may be in use again"
FAULTS = {
    "no wait for weights": StreamFault(
        plant=partial(without, "wait_for"),
        levers="swap",
        message=f" on cpu:1 does not wait for {_IN}",
    ),
    "no wait for activations": StreamFault(
        plant=partial(without, "wait_for"),
        levers="offload",
        message=f" on cpu:1 does not wait for {_IN}",
    ),
    "weights emptied at work": StreamFault(
        plant=partial(without, "follow"),
        levers="swap",
        message="a release on cpu:1, side stream 1 does not wait for ",
    ),
    "activations copied too early": StreamFault(
        plant=partial(without, "follow"), levers="offload", message=f"{_OUT} does not wait for "
    ),
    "no wait on the host": StreamFault(
        plant=partial(without, "finish"),
        levers="swap",
        message=f"lerp_ on the host does not wait for {_OUT}",
        trained=("full",),
    ),
    "an event before its copies": StreamFault(
        plant=an_event_before_its_copies,
        levers="swap",
        message=f" on cpu:1 does not wait for {_IN}",
    ),
    "an event of the wrong stream": StreamFault(
        plant=an_event_of_the_wrong_stream, levers="offload", message=_AGAIN
    ),
    "results copied on the wrong stream": StreamFault(
        plant=results_copied_on_the_wrong_stream,
        levers="swap",
        message="lerp_ on the host reads what ",
        trained=("full",),
    ),
    "freed while it is copied": StreamFault(
        plant=freed_while_it_is_copied, levers="offload", message=_AGAIN
    ),
    "a buffer filled before it is free": StreamFault(
        plant=a_buffer_filled_before_it_is_free,
        levers="offload",
        message=f"{_IN} does not wait for its allocation on cpu:1",
    ),
    "a host buffer used again": StreamFault(
        plant=a_host_buffer_used_again_while_it_is_copied,
        levers="swap",
        message=f"copy_ on the host does not wait for {_IN}",
    ),
    "memory of another stream": StreamFault(
        plant=memory_of_another_stream,
        levers="swap",
        message=f"{_IN} does not wait for its allocation on cpu:1",
    ),
    "the stream of another device": StreamFault(
        plant=the_stream_of_another_device,
        levers="swap, split",
        message="a release on cpu:2, side stream 1 does not wait for ",
    ),
    "a carry sent by a stream of its own": StreamFault(
        plant=a_carry_sent_by_a_stream_of_its_own,
        levers="split",
        message="the copy to cpu:2 on cpu:1, side stream 1 does not wait for ",
    ),
    "a copy to the host that nobody waits for": StreamFault(
        plant=a_copy_to_the_host_that_nobody_waits_for,
        levers="split with the host",
        message=" on the host does not wait for the copy to cpu on cpu:1",
    ),
}
"""By name. Without them the same runs are in order, which `StreamChecks` checks."""


def _cases() -> list[Any]:
    """Every fault under every policy, for all that is trained; the faults of one policy each are
    not exhaustive."""
    cases = []
    for number, (name, fault) in enumerate(FAULTS.items()):
        turn, index = divmod(number, len(POLICIES))
        chosen = POLICIES[index], fault.trained[turn % len(fault.trained)]
        for policy, trained in itertools.product(POLICIES, fault.trained):
            marks = () if (policy, trained) == chosen else pytest.mark.exhaustive
            cases.append(pytest.param(name, policy, trained, marks=marks))
    return cases


class StreamFaultChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`. A fault shows where each of two devices
    streams three blocks or more."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("fault", "policy", "trained"), _cases())
    def test_a_fault_in_the_order_of_streams_is_found(
        self, fault: str, policy: str, trained: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Under every policy, for an adapter and for a full fine-tune that updates in the backward
        what it streams."""
        planted = FAULTS[fault]
        planted.plant(monkeypatch)
        races = self._unordered(planted.levers, policy, trained)
        assert any(planted.message in race for race in races), [*dict.fromkeys(races)]

    @pytest.mark.slow
    @pytest.mark.parametrize("levers", dict.fromkeys(fault.levers for fault in FAULTS.values()))
    @pytest.mark.parametrize("trained", ("lora with dropout", "full"))
    def test_without_a_fault_nothing_is_found(self, levers: str, trained: str) -> None:
        assert self._unordered(levers, "full", trained) == []

    def _unordered(self, levers: str, policy: str, trained: str) -> list[str]:
        case = StreamCase(trained=trained, policy=policy, levers=levers)
        return unordered(self.spec, self.arch, self.items(2), case)
