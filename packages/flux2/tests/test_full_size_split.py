"""FLUX.2 dev at its published size, divided over two to four devices that refuse to mix, without memory."""

from dataclasses import replace

import pytest
import torch

from ditkit_core.activation_checkpoint import POLICIES
from ditkit_core.adapters import AdapterConfig, inject
from ditkit_core.placement import balanced_cuts, bytes_held
from ditkit_core.precision import Precision
from ditkit_core.prepare import build_on_meta
from ditkit_core.testing.full_size_split import balanced, divided_step, weight_loads
from ditkit_flux2.presets import PRESETS
from ditkit_flux2.spec import FLUX2

ARCH = PRESETS["dev"]
NUM_BLOCKS = ARCH.double_layers + 1 + ARCH.single_layers
# torch_remat looks at the addresses of tensors, of which fake ones have none.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")


def items(arch):
    with torch.device("meta"):
        return [FLUX2.outline(arch, (1, 1024, 1024), ())]


@pytest.mark.parametrize(
    "policy", [pytest.param(policy, marks=[pytest.mark.slow] if policy != "full" else []) for policy in POLICIES]
)
def test_a_step_over_four_devices_sends_each_carry_once(policy, monkeypatch):
    arch = replace(ARCH, double_layers=2, single_layers=3)
    divided = divided_step(FLUX2, arch, balanced(FLUX2, 4), items(arch), policy=policy, rank=32, patch=monkeypatch)
    divided.check()
    # Two streams, three modulations, time, cos, sin; after the join one stream and one modulation. The streams alone come from adapters.
    crossing = {True: (8, 2), False: (5, 1)}
    expected = [crossing[cut <= arch.double_layers] for cut in divided.placement.cuts]
    assert [(carry["tensors"], carry["gradients"]) for carry in divided.carried] == expected
    assert len(set(expected)) == 2, "a cut before the join, and one after it"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("policy", "num_devices"), [("full", 3)])  # each takes minutes
def test_all_57_blocks_do_too(policy, num_devices, monkeypatch):
    divided = divided_step(
        FLUX2, ARCH, balanced(FLUX2, num_devices), items(ARCH), policy=policy, rank=32, patch=monkeypatch, steps=2
    )
    divided.check()
    live, peak = divided.ledger.live, divided.ledger.peak
    held = [live[device]["weights"] for device in dict.fromkeys(divided.placement.blocks)]
    print(policy, divided.placement.cuts, [f"{peak[device] / 2**30:.2f} GiB" for device in peak])
    assert max(held) - min(held) < 1.1 * 2 * 708e6, "no more than a double block apart"


@pytest.mark.parametrize(("precision", "linear_bytes"), [("bf16", 2), ("8-bit", 1)])
def test_two_cards_are_fuller_alike_than_at_the_midpoint_of_the_single_blocks(precision, linear_bytes):
    """Upstream cuts there, which leaves 20.7 against 12.6 GB with 8-bit weights."""
    model = build_on_meta(FLUX2, ARCH, Precision())
    inject(model, AdapterConfig(rank=32), FLUX2.adapter_targets)
    loads = weight_loads(FLUX2, model, linear_bytes)

    def held(cut):
        return bytes_held(loads, 0, cut, is_last=False), bytes_held(loads, cut, NUM_BLOCKS, is_last=True)

    (cut,) = balanced_cuts(loads, [1.0, 1.0])
    ours, midpoint = held(cut), held(ARCH.double_layers + 1 + ARCH.single_layers // 2)
    for name, pair in ((f"cut {cut}", ours), ("midpoint", midpoint)):
        print(f"{precision}, {name}: {pair[0] / 1e9:.1f} against {pair[1] / 1e9:.1f} GB")
    largest = max(load.stays for load in loads.blocks)
    assert abs(ours[0] - ours[1]) <= largest < 0.2 * abs(midpoint[0] - midpoint[1])
    assert max(ours) < 0.85 * max(midpoint)
