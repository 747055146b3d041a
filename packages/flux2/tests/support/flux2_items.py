"""A tiny FLUX.2 and its training items, for conformance checks and for scripts that run in
processes of their own."""

import torch

from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2


class Images:
    """A tiny FLUX.2 and its training items."""

    spec = FLUX2
    arch = Flux2Arch(
        dim=32, heads=2, double_layers=1, single_layers=2, text_dim=12, text_tokens=5,
        guidance=True, in_channels=6,
        out_channels=6, freq_dim=16, axes=(4, 4, 4, 4),
    )  # fmt: skip
    grids = ([(2, 3), (2, 2), (1, 3)], [(2, 5), (3, 3)], [(3, 2), (1, 3), (2, 2)])
    """Rows and columns of a sample's image and of its references."""

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        names = ("latents", "reference.0", "reference.1")
        return [
            {
                name: torch.randn(6, 1, *grid, generator=random)
                for name, grid in zip(names, grids, strict=False)
            }
            | {"text": torch.randn(5, 12, generator=random)}
            for grids in (self.grids[i % 3 if ragged else 0] for i in range(count))
        ]
