"""S2V passes every check of the seam: its injectors are parts of blocks, and speech travels in the
carry."""

import torch
from wan_items import SIZES

from ditkit_core.testing.conformance import Conformance
from ditkit_wan.presets import SpeechArch, WanArch
from ditkit_wan.spec import WAN


class TestSpeechToVideo(Conformance):
    """Of three ragged clips the second has no frames before it, and the third no poses."""

    spec = WAN
    one_in = 23
    slow = True
    arch = WanArch(
        **SIZES,
        in_channels=4,
        speech=SpeechArch(layers=(0,), features=5, states=3, tokens=2, pose_channels=3),
    )
    last_layers = ("WanBlock ffn.2", "audio.injector.o")
    added_as_they_are = ("audio.injector.o",)
    idle = ("embed.speech.frame_packer.",)

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = [(8, 16), (16, 16), (16, 8)] if ragged else [(8, 8)]
        return [
            {
                name: torch.randn(size, generator=random)
                for name, size in self.sizes(i, grids[i % len(grids)]).items()
            }
            for i in range(count)
        ]

    def sizes(self, index, grid):
        """Sizes of an item's tensors."""
        sizes = {
            "latents": (4, 2, *grid),
            "text": (3 + index, 20),
            "audio": (3, 5, 8),
            "reference": (4, 1, *grid),
        }
        optional = {"motion": (4, 3, *grid), "pose": (3, 2, *grid)}
        without = {(16, 16): "motion", (16, 8): "pose"}.get(grid)
        return sizes | {name: size for name, size in optional.items() if name != without}
