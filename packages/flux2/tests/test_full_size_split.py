"""FLUX.2 dev at its published size, divided over two to four devices that refuse to mix, without
memory."""

from itertools import pairwise
from typing import ClassVar

import pytest

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.models.precision import Precision
from ditkit_core.planner.memory import Budget, DeviceSpan
from ditkit_core.planner.partition import choose_split_points, weights_profile
from ditkit_core.planner.reduced_model import reduced_model
from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
from ditkit_core.testing.plans import step_of
from ditkit_flux2.presets import PRESETS
from ditkit_flux2.spec import FLUX2

ARCH = PRESETS["dev"]
NUM_BLOCKS = ARCH.double_layers + 1 + ARCH.single_layers


class TestSplit(FullSizeSplitConformance):
    spec = FLUX2
    preset = "dev"
    size = (1, 1024, 1024)
    few: ClassVar = {"double_layers": 2, "single_layers": 3}
    all_blocks = ("full", 3)
    most_apart = 1.1 * 2 * 708e6  # no more than a double block

    def crossing(self, arch, cut):
        """Two streams, three modulations, time, rotary table; after the join one stream and one
        modulation. The streams alone come from adapters."""
        return (7, 2) if cut <= arch.double_layers else (4, 1)


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_two_gpus_are_fuller_alike_than_at_the_midpoint_of_the_single_blocks(quantize):
    """Upstream cuts there, which leaves 20.7 against 12.6 GB with 8-bit weights."""
    step = step_of(FLUX2, ARCH, (1, 64, 64), AdapterConfig(rank=32)).with_execution(
        quantize=quantize
    )
    model = reduced_model(step, of_each=None).full_model
    profile = weights_profile(model, FLUX2, Precision(), averaged=True)
    card = Budget(name="a card", total=80 * 10**9, workspace=0)

    def held(*bounds):
        return [DeviceSpan(profile, start, end).plan(card).peak for start, end in pairwise(bounds)]

    (cut,) = choose_split_points(profile, [card, card])
    ours = held(0, cut, NUM_BLOCKS)
    midpoint = held(0, ARCH.double_layers + 1 + ARCH.single_layers // 2, NUM_BLOCKS)
    for name, pair in ((f"cut {cut}", ours), ("midpoint", midpoint)):
        print(f"{quantize}, {name}: {pair[0] / 1e9:.1f} against {pair[1] / 1e9:.1f} GB")
    # of the blocks that share no device with the embedding or the head
    largest = max(held(*range(1, NUM_BLOCKS)))
    assert abs(ours[0] - ours[1]) <= largest < 0.2 * abs(midpoint[0] - midpoint[1])
    assert max(ours) < 0.85 * max(midpoint)
