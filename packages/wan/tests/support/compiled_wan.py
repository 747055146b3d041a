"""Steps of compiled Wan blocks, printed as JSON: run in a process of its own, because the type checks of tests cannot be traced."""

import json
import sys

import torch

from ditkit_core.testing.compiled_steps import compare
from ditkit_core.testing.world import ADAPTERS, make_model
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

ARCH = WanArch(
    dim=48, ffn_dim=64, heads=2, layers=2, in_channels=4, out_channels=4, text_dim=20, text_tokens=6, freq_dim=16
)


def main(adapter: str, dtype: str, backend: str) -> None:
    """Print what steps come to under each policy."""
    random = torch.Generator().manual_seed(0)
    items = [
        {"latents": torch.randn(4, 2, 4, width, generator=random), "text": torch.randn(3, 20, generator=random)}
        for width in (6, 10)
    ]
    model = make_model(WAN, ARCH, dtype=getattr(torch, dtype), adapter=ADAPTERS[adapter])
    print(json.dumps(compare(WAN, model, items, ("none", "full", "attn_only"), backend=backend)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
