"""Faults in the order of streams are found in the core's own model; and what only a part of a backward fetches is waited for."""

import pytest

from ditkit_core.engine.activation_offload import HostStore, _DeviceStore
from ditkit_core.testing.conformance_streams import StreamCase, unordered
from ditkit_core.testing.stream_faults import StreamFaultChecks, nothing
from ditkit_core.testing.toy import TOY, ToyArch, toy_items


class TestToy(StreamFaultChecks):
    spec = TOY
    arch = ToyArch(depth=6, dim=8, dropout=0.1)

    def items(self, count, ragged=False):
        return toy_items(count)


@pytest.mark.parametrize("waits", [True, False])
def test_a_tensor_that_no_hook_asked_for_is_waited_for(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward without the marks of blocks: each operation fetches what it saved, and waits for it."""
    if not waits:
        monkeypatch.setattr(_DeviceStore, "wait_for", nothing)
    monkeypatch.setattr(HostStore, "pre_backward", nothing)
    case = StreamCase(trained="lora with dropout", policy="none", levers="offload")
    assert bool(unordered(TOY, ToyArch(depth=4, dim=8, dropout=0.1), toy_items(2), case)) != waits
