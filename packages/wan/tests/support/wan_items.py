"""Tiny Wans and their training items, for conformance checks and for scripts that run in processes
of their own."""

import torch

from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

SIZES = {
    "dim": 48, "ffn_dim": 64, "heads": 2, "layers": 2, "out_channels": 4, "text_dim": 20,
    "text_tokens": 6, "freq_dim": 16,
}  # fmt: skip


class Clips:
    """Training items of text and video; variants add to them."""

    spec = WAN
    arch = WanArch(**SIZES, in_channels=4)
    last_layers = ("ffn.2",)

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = [(4, 6), (4, 10), (6, 4)] if ragged else [(4, 6)]
        return [
            {
                name: torch.randn(size, generator=random)
                for name, size in self.sizes(i, grids[i % len(grids)]).items()
            }
            for i in range(count)
        ]

    def sizes(self, index, grid):
        """Sizes of an item's tensors."""
        return {"latents": (4, 2, *grid), "text": (3 + index, 20)}


class Images(Clips):
    """Image tokens in every block."""

    arch = WanArch(**SIZES, in_channels=10, image_dim=14)

    def sizes(self, index, grid):
        return super().sizes(index, grid) | {"y": (6, 2, *grid), "image": (7, 14)}
