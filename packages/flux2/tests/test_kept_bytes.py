"""What a tiny FLUX.2 keeps under each policy of checkpointing: planned on fake tensors, and counted on real ones."""

from typing import ClassVar

import pytest

from ditkit_core.testing.conformance_plans import KeptBytesConformance
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2


class TestKeptBytes(KeptBytesConformance):
    spec = FLUX2
    arch = Flux2Arch(
        dim=32, heads=2, double_layers=2, single_layers=3, text_dim=12, text_tokens=5, guidance=True, in_channels=6,
        out_channels=6, freq_dim=16, axes=(4, 4, 4, 4),
    )  # fmt: skip
    size = (1, 256, 256)
    wider: ClassVar = {"dim": 512, "axes": (64, 64, 64, 64)}
    larger = (1, 512, 512)
    daily = (pytest.param("attn_only, 1-3=full", marks=pytest.mark.slow),)
    nightly = ("none", "full", "attn_only", "ops(matmul, attention)")
