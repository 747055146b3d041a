"""Checks of activation offloading for every model: no number changes, and exactly the expected
tensors are sent to the host."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.testing.conformance_split import ONE, layouts
from ditkit_core.testing.pretend_devices import HOST, CountCrossings, PretendDevices, divide
from ditkit_core.testing.world import ADAPTERS, ModelChecks, Outcome, make_model, outcome

# Every policy, on one device and on several; `LeverChecks` combines offloading with every adapter
# and with other features.
_DAILY = [
    ("dora", "none", "one"),
    ("lora with dropout", "attn_only", "three"),
    ("full", "full", "uneven"),
]
_OTHERS = [
    ("lora with dropout", "full", "one"),
    ("full", "attn_only", "one"),
    ("lora", "none", "by turns"),
]
_CASES = [*_DAILY, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in _OTHERS)]


class OffloadChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    @pytest.mark.parametrize(("adapter", "policy", "layout"), _CASES)
    def test_offloading_changes_no_bit(self, adapter: str, policy: str, layout: str) -> None:
        """The recomputation and the generators stay the same too, and a second step needs no more
        host memory."""
        expected = outcome(
            self.spec, self._made(adapter), self.items(2, ragged=True), BlockEngine(policy=policy)
        )
        model = self._made(adapter)
        num = len(model.blocks())
        divide(model, [ONE] * (num + 2) if layout == "one" else layouts(num)[layout])
        engine = BlockEngine(policy=f"{policy}+offload", host=HostMemory(smallest=0))
        host_bytes = []
        for _ in range(2):
            actual, sent = self._offloaded(model, engine)
            assert actual.differences(expected) == []
            assert actual.num_attention == expected.num_attention
            assert torch.equal(actual.generator_state, expected.generator_state), (
                "leaks random state"
            )
            host_bytes.append(engine.host.num_bytes)
        assert sent == host_bytes[0] == host_bytes[1] > 0

    def test_what_is_sent_is_what_a_policy_keeps(self) -> None:
        """Under `full`, the tensors that blocks take and do not pass on: no table, text or mask;
        under `attn_only`, attention's tensors as well. Numbers stay the same."""
        model = self._made("lora")
        items = self.items(2, ragged=True)
        num_entering = 0
        carry = model.embed(self.inputs(items))
        for block in model.blocks():
            after = block(carry)
            if next(block.parameters(), None) is not None:
                passed_on = {leaf.untyped_storage()._cdata for leaf in _tensors(after)}
                entering = {
                    leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
                    for leaf in _tensors(carry)
                }
                num_entering += sum(
                    size for storage, size in entering.items() if storage not in passed_on
                )
            carry = after
        divide(model, [ONE] * (len(model.blocks()) + 2))
        sent, plain = {}, outcome(self.spec, self._made("lora"), items, BlockEngine())
        for policy in ("full", "attn_only"):
            engine = BlockEngine(policy=f"{policy}+offload", host=HostMemory(smallest=0))
            actual, sent[policy] = self._offloaded(model, engine)
            assert actual.differences(plain) == [], policy
        assert sent["full"] == num_entering
        assert sent["attn_only"] > sent["full"]

    def _made(self, adapter: str) -> Any:
        chosen: AdapterConfig | None = ADAPTERS[adapter]
        return make_model(self.spec, self.arch, adapter=chosen)

    def _offloaded(self, model: Any, engine: BlockEngine) -> tuple[Outcome, int]:
        """A step, and the bytes that its forward sent to the host."""
        sent = 0
        with PretendDevices(), CountCrossings() as crossings:

            def backward(loss: Tensor) -> None:
                nonlocal sent
                sent = sum(size for way, size in crossings.num_bytes.items() if way[1] == HOST)
                loss.backward()

            return outcome(
                self.spec, model, self.items(2, ragged=True), engine, backward=backward
            ), sent


def _tensors(carry: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(carry) if isinstance(leaf, Tensor)]
