"""What the ranks do for `test_kernel_ranks.py`: one block, and clips of four tokens and of three, an odd number for two ranks that share them."""

import torch
from wan_items import SIZES, Clips

from ditkit_core.testing.kernel_ranks import main
from ditkit_wan.presets import WanArch

CASES = ("brief lora", "brief full", "brief full, stochastic")
ARCH = WanArch(**SIZES | {"layers": 1, "text_tokens": 3}, in_channels=4)


def items():
    random = torch.Generator().manual_seed(0)
    return [
        {"latents": torch.randn(4, *grid, generator=random), "text": torch.randn(2, 20, generator=random)}
        for grid in ((1, 4, 4), (1, 2, 6))
    ]


if __name__ == "__main__":
    main(Clips.spec, ARCH, items(), CASES)
