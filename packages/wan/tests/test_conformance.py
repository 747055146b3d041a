"""Wan against the checks that every model passes."""

import torch

from ditkit_core.testing.conformance import Conformance
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN


class TestWan(Conformance):
    spec = WAN
    arch = WanArch(
        dim=48, ffn_dim=64, heads=2, layers=2, in_channels=4, out_channels=4, text_dim=20, text_tokens=6, freq_dim=16
    )
    last_layers = ("ffn.2",)

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = [(4, 6), (4, 10), (6, 4)] if ragged else [(4, 6)]
        sizes = [(4, 2, *grids[i % len(grids)]) for i in range(count)]
        return [
            {"latents": torch.randn(size, generator=random), "text": torch.randn(3 + i, 20, generator=random)}
            for i, size in enumerate(sizes)
        ]
