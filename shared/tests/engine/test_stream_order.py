"""Faults in the order of streams, each planted alone, are found; without them the same runs are in order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ditkit_core.engine import engine
from ditkit_core.engine.activation_offload import HostStore, _DeviceStore
from ditkit_core.engine.block_swap import BlockQueue
from ditkit_core.engine.pinned_memory import CopyLane, Streamed, page_lock
from ditkit_core.io.runtimes import runtime_of
from ditkit_core.testing.conformance_streams import ONE, StreamCase, unordered
from ditkit_core.testing.toy import TOY, ToyArch, toy_items

ARCH = ToyArch(depth=4, dim=8, dropout=0.1)
SWAP = StreamCase(trained="lora with dropout", policy="full", levers="swap")
UPDATED = StreamCase(trained="full", policy="full", levers="swap")
OFFLOAD = StreamCase(trained="lora with dropout", policy="none", levers="offload")
SPLIT = StreamCase(trained="lora with dropout", policy="full", levers="split")
SPLIT_SWAP = StreamCase(trained="lora with dropout", policy="full", levers="swap, split")

Plant = Callable[[pytest.MonkeyPatch], None]
nothing = lambda *_: None


def no_wait_for_copies(patch):
    patch.setattr(CopyLane, "wait_for", nothing)


def no_wait_for_work(patch):
    """Blocks are emptied, and filled with others, while their work may still run."""
    patch.setattr(CopyLane, "follow", nothing)


def no_wait_on_the_host(patch):
    """Saves and averages read what is still being copied."""
    patch.setattr(CopyLane, "finish", nothing)


def an_event_before_its_copies(patch):
    def copy(queue, fills, index, there):
        with queue.lane.copies():
            there[index] = queue.lane.record()
            for fill in fills:
                fill()

    patch.setattr(BlockQueue, "_copy", copy)


def an_event_of_the_wrong_stream(patch):
    patch.setattr(CopyLane, "record", lambda lane: lane._runtime.current_stream(lane.device).record_event())


def results_copied_on_the_wrong_stream(patch):
    """On that of the computation, where nobody waits for it."""

    def store_late(streamed, store=Streamed.store):
        runtime = runtime_of(streamed.buffer.device)
        with runtime.stream(runtime.default_stream(streamed.buffer.device)):
            store(streamed)

    patch.setattr(Streamed, "store", store_late)


def freed_while_it_is_copied(patch):
    """The tensors of a block that ran, without waiting for their copy to the host."""

    def send(store, group, leaving, send=_DeviceStore.send):
        send(store, group, leaving)
        group.sent = None

    patch.setattr(_DeviceStore, "send", send)


def a_buffer_filled_before_it_is_free(patch):
    """Memory that the device's own stream allocates, and may have in use until then."""

    def fetch(store, missing, fetch=_DeviceStore.fetch):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(store._lane, "follow", nothing)
            fetch(store, missing)

    patch.setattr(_DeviceStore, "fetch", fetch)


def a_host_buffer_used_again_while_it_is_copied(patch):
    """One page-locked buffer for all blocks, which the host fills for the next block at once."""
    passing: list[Tensor] = []

    def fetch(streamed):
        if not passing:
            passing.append(torch.empty(2**20, dtype=torch.uint8))
            assert page_lock(passing[0], ONE, {})
        passing[0][: streamed.num_bytes].copy_(streamed.host)
        streamed.buffer.untyped_storage().resize_(streamed.num_bytes)
        streamed._filled.copy_(passing[0][: streamed.num_bytes], non_blocking=True)

    patch.setattr(Streamed, "fetch", fetch)


def the_stream_of_another_device(patch):
    """What follows the work of a device follows that of another one."""

    def follow(lane):
        lane._stream.wait_stream(lane._runtime.current_stream(ONE))

    patch.setattr(CopyLane, "follow", follow)


def a_carry_sent_by_a_stream_of_its_own(patch):
    def sent(carry, device, move=engine.move_carry):
        runtime = runtime_of(ONE)
        with runtime.stream(runtime.Stream(ONE)):
            return move(carry, device)

    patch.setattr(engine, "move_carry", sent)


COPY_IN, COPY_OUT = "the copy to cpu:1 on cpu:1, side stream 1", "the copy to cpu on cpu:1, side stream 1"
FAULTS: list[tuple[Plant, StreamCase, str]] = [
    (no_wait_for_copies, SWAP, f"addmm on cpu:1 does not wait for {COPY_IN}"),
    (no_wait_for_copies, OFFLOAD, f"mm on cpu:1 does not wait for {COPY_IN}"),
    (no_wait_for_work, SWAP, "a release on cpu:1, side stream 1 does not wait for addmm on cpu:1"),
    (no_wait_for_work, OFFLOAD, f"{COPY_OUT} does not wait for mul on cpu:1"),
    (no_wait_on_the_host, UPDATED, f"lerp_ on the host does not wait for {COPY_OUT}"),
    (an_event_before_its_copies, SWAP, f"addmm on cpu:1 does not wait for {COPY_IN}"),
    (an_event_of_the_wrong_stream, OFFLOAD, f"{COPY_IN} reads what {COPY_OUT} made of memory that may be in use again"),
    (results_copied_on_the_wrong_stream, UPDATED, "lerp_ on the host reads what the copy to cpu on cpu:1 made of"),
    (freed_while_it_is_copied, OFFLOAD, f"{COPY_IN} reads what {COPY_OUT} made of memory that may be in use again"),
    (a_buffer_filled_before_it_is_free, OFFLOAD, f"{COPY_IN} does not wait for its allocation on cpu:1"),
    (a_host_buffer_used_again_while_it_is_copied, SWAP, f"copy_ on the host does not wait for {COPY_IN}"),
    (the_stream_of_another_device, SPLIT_SWAP, "a release on cpu:2, side stream 1 does not wait for mm on cpu:2"),
    (a_carry_sent_by_a_stream_of_its_own, SPLIT, "the copy to cpu:2 on cpu:1, side stream 1 does not wait for add on"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "case", "found"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_found(plant: Plant, case: StreamCase, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    races = unordered(TOY, ARCH, toy_items(2), case)
    assert any(race.startswith(found) for race in races), [*dict.fromkeys(races)]


@pytest.mark.parametrize("case", dict.fromkeys(case for _, case, _ in FAULTS))
def test_without_a_fault_nothing_is_found(case: StreamCase) -> None:
    assert unordered(TOY, ARCH, toy_items(2), case) == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_tensor_that_no_hook_asked_for_is_waited_for(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward without the marks of blocks: each operation fetches what it saved, and waits for it."""
    if not waits:
        monkeypatch.setattr(_DeviceStore, "wait_for", nothing)
    monkeypatch.setattr(HostStore, "pre_backward", nothing)
    assert bool(unordered(TOY, ARCH, toy_items(2), OFFLOAD)) != waits
