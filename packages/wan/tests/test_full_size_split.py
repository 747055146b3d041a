"""Wan 14B at its published size, divided over two to four devices that refuse to mix, without memory."""

from typing import ClassVar

from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
from ditkit_wan.spec import WAN


class TestSplit(FullSizeSplitConformance):
    spec = WAN
    preset = "t2v-14b"
    size = (81, 480, 832)
    few: ClassVar = {"layers": 4}
    all_blocks = ("attn_only", 4)
    most_apart = 2 * 352e6 * 1.01  # no more than a block

    def crossing(self, arch, cut):
        """Tokens, modulation, time, rotary table, text; of these the tokens alone come from an adapter."""
        return 5, 1
