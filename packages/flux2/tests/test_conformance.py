"""FLUX.2 against the checks that every model passes."""

import torch

from ditkit_core.testing.conformance import Conformance
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2

ARCH = Flux2Arch(
    dim=32, heads=2, double_layers=1, single_layers=2, text_dim=12, text_tokens=5, guidance=True, in_channels=6,
    out_channels=6, freq_dim=16, axes=(4, 4, 4, 4),
)  # fmt: skip


class TestTextToImage(Conformance):
    spec = FLUX2
    arch = ARCH

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = [(2, 3), (2, 5), (3, 2)] if ragged else [(2, 3)]
        sizes = [(6, 1, *grids[i % len(grids)]) for i in range(count)]
        return [
            {"latents": torch.randn(size, generator=random), "text": torch.randn(5, 12, generator=random)}
            for size in sizes
        ]


class TestEditing(TestTextToImage):
    """One or two references, in a batch with as many of different size."""

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(1)
        sizes = [[(2, 2), (1, 3)], [(3, 3)], [(1, 3), (2, 2)]] if ragged else [[(2, 2), (1, 3)]]
        return [
            item
            | {
                f"reference.{k}": torch.randn(6, 1, *grid, generator=random)
                for k, grid in enumerate(sizes[i % 3 if ragged else 0])
            }
            for i, item in enumerate(super().items(count, ragged))
        ]
