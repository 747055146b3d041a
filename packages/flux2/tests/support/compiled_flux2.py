"""Steps of compiled FLUX.2 blocks, printed as JSON: run in a process of its own, because the type checks of tests cannot be traced."""

import json
import sys

import torch
from tiny_flux2 import ARCHS

from ditkit_core.testing.compiled_steps import compare
from ditkit_core.testing.world import ADAPTERS, make_model
from ditkit_flux2.spec import FLUX2


def main(adapter: str, dtype: str, backend: str) -> None:
    """Print what steps come to under each policy."""
    random = torch.Generator().manual_seed(0)
    items = [
        {"latents": torch.randn(16, 1, 3, width, generator=random), "text": torch.randn(7, 12, generator=random)}
        for width in (4, 6)
    ]
    model = make_model(FLUX2, ARCHS["dev"], dtype=getattr(torch, dtype), adapter=ADAPTERS[adapter])
    print(json.dumps(compare(FLUX2, model, items, ("none", "full", "attn_only"), backend=backend)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
