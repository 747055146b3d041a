"""Animate passes every check of the seam: its face adapters are inside blocks, and the motion of a
face travels in the carry."""

import torch
from wan_items import SIZES

from ditkit_core.testing.conformance import Conformance
from ditkit_wan.presets import AnimateArch, WanArch
from ditkit_wan.spec import WAN


class TestAnimate(Conformance):
    """Ragged clips differ in frames, in the shape of these, and in the number of tokens."""

    spec = WAN
    one_in = 23
    slow = True
    arch = WanArch(
        **SIZES, in_channels=10, image_dim=14,
        animate=AnimateArch(layers=(0,), pose_channels=3, face_channels=(3, 4), style=5, motion=2,
        motion_dim=6, width=8, tokens=2),
    )  # fmt: skip
    last_layers = ("WanBlock ffn.2", "face.linear2")
    added_as_they_are = ("face.linear2",)

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = [(3, 4, 6), (2, 4, 10), (3, 6, 4)] if ragged else [(3, 4, 6)]
        return [
            {
                name: torch.randn(size, generator=random)
                for name, size in self.sizes(i, grids[i % len(grids)]).items()
            }
            for i in range(count)
        ]

    def sizes(self, index, grid):
        """Sizes of an item's tensors; the first of its latent frames is the reference image."""
        frames, *rest = grid
        return {
            "latents": (4, *grid), "text": (3 + index, 20), "y": (6, *grid), "image": (7, 14),
            "pose": (3, frames - 1, *rest), "face": (3, 4 * frames - 7, 8, 8),
        }  # fmt: skip
