"""Wan 14B at its published size, divided over two to four devices that refuse to mix, without memory."""

from dataclasses import replace

import pytest
import torch

from ditkit_core.engine.engine import POLICIES
from ditkit_core.testing.full_size_split import balanced, divided_step
from ditkit_wan.spec import WAN

ARCH = WAN.architecture.presets["t2v-14b"]
# torch_remat looks at the addresses of tensors, of which fake ones have none.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")


def items(arch):
    with torch.device("meta"):
        return [WAN.training.empty_item(arch, (81, 480, 832), ())]


@pytest.mark.parametrize(
    "policy", [pytest.param(policy, marks=[pytest.mark.exhaustive] if policy != "full" else []) for policy in POLICIES]
)
def test_a_step_over_four_devices_sends_each_carry_once(policy, monkeypatch):
    arch = replace(ARCH, layers=4)
    divided = divided_step(WAN, arch, balanced(WAN, 4), items(arch), policy=policy, rank=32, patch=monkeypatch)
    divided.check()
    # tokens, modulation, time, cos, sin, text; of these the tokens alone come from an adapter
    assert [(carry["tensors"], carry["gradients"]) for carry in divided.carried] == [(6, 1)] * 3


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("policy", "num_devices"), [("attn_only", 4)])  # each takes minutes
def test_all_40_blocks_do_too(policy, num_devices, monkeypatch):
    divided = divided_step(
        WAN, ARCH, balanced(WAN, num_devices), items(ARCH), policy=policy, rank=32, patch=monkeypatch, steps=2
    )
    divided.check()
    live, peak = divided.ledger.live, divided.ledger.peak
    devices = list(dict.fromkeys(divided.placement.blocks))
    held = [live[device]["weights"] for device in devices]
    print(policy, divided.placement.cuts, [f"{peak[device] / 2**30:.2f} GiB" for device in devices])
    assert len(devices) == num_devices
    assert max(held) - min(held) < 2 * 352e6 * 1.01, "no more than a block apart"
