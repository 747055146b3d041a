"""Wan against the checks that every model passes."""

import torch

from ditkit_core.testing.conformance import Conformance, CoreChecks
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

SIZES = {
    "dim": 48, "ffn_dim": 64, "heads": 2, "layers": 2, "out_channels": 4, "text_dim": 20, "text_tokens": 6, "freq_dim": 16,
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
            {name: torch.randn(size, generator=random) for name, size in self.sizes(i, grids[i % len(grids)]).items()}
            for i in range(count)
        ]

    def sizes(self, index, grid):
        """Sizes of an item's tensors."""
        return {"latents": (4, 2, *grid), "text": (3 + index, 20)}


class TestWan(Clips, Conformance):
    """Text to video."""


class Pictures(Clips):
    """Image tokens in every block."""

    arch = WanArch(**SIZES, in_channels=10, image_dim=14)

    def sizes(self, index, grid):
        return super().sizes(index, grid) | {"y": (6, 2, *grid), "image": (7, 14)}


class TestImageToVideo(Pictures, Conformance):
    one_in = 11


class TestFirstAndLastFrame(Pictures, CoreChecks):
    """Only the embedding differs, which levers do not see."""

    one_in = 11
    arch = WanArch(**SIZES, in_channels=10, image_dim=14, image_positions=7)


class TestTextImageToVideo(Clips, Conformance):
    """Every other sample begins with a clean frame."""

    one_in = 11
    arch = WanArch(**SIZES, in_channels=4, token_times=True)

    def sizes(self, index, grid):
        return super().sizes(index, grid) | ({} if index % 2 else {"first_frame": (4, 1, *grid)})


class TestVace(Clips, Conformance):
    """A stream beside the main one."""

    one_in = 11
    arch = WanArch(**SIZES | {"layers": 3}, in_channels=4, vace_layers=(0, 1), vace_channels=7)
    last_layers = ("ffn.2", "after_proj")
    added_as_they_are = ("after_proj",)
    num_streams = 2

    def sizes(self, index, grid):
        return super().sizes(index, grid) | {"vace": (7, 2, *grid)}
