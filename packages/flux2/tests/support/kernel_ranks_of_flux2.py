"""What the ranks do for `test_kernel_ranks.py`: a block of each kind, and images of two tokens and of three, one with a reference."""

from dataclasses import replace

import torch
from flux2_items import Images

from ditkit_core.testing.kernel_ranks import main

CASES = ("brief lora on nf4", "brief full", "brief full, split")
ARCH = replace(Images.arch, single_layers=1, text_tokens=2)


def items():
    random = torch.Generator().manual_seed(0)
    names = ("latents", "reference.0")
    return [
        {name: torch.randn(6, 1, *grid, generator=random) for name, grid in zip(names, sample, strict=False)}
        | {"text": torch.randn(2, 12, generator=random)}
        for sample in ([(1, 2)], [(1, 3), (1, 1)])
    ]


if __name__ == "__main__":
    main(Images.spec, ARCH, items(), CASES)
