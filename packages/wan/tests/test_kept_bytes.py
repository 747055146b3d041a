"""What a tiny Wan keeps under each policy of checkpointing: planned on fake tensors, and counted on real ones."""

from typing import ClassVar

from ditkit_core.testing.conformance_plans import KeptBytesConformance
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN


class TestKeptBytes(KeptBytesConformance):
    spec = WAN
    arch = WanArch(
        dim=48, ffn_dim=64, heads=2, layers=4, in_channels=4, out_channels=4, text_dim=20, text_tokens=6, freq_dim=16
    )
    size = (5, 128, 128)
    wider: ClassVar = {"dim": 576, "ffn_dim": 576}
    larger = (13, 256, 256)
    daily = ("ops(matmul, attention)",)
    nightly = ("none", "full", "attn_only", "attn_only(self)", "attn_only, 1-2=full")
