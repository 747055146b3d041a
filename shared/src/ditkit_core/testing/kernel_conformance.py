"""Checks of the Triton kernels inside the blocks of a model, printed as JSON; for a process of its own with TRITON_INTERPRET=1.

    TRITON_INTERPRET=1 python -m ditkit_core.testing.kernel_conformance test_conformance TestWan,TestVace

The interpreter has to be chosen before Triton is imported, so no test can run this in its own process.
"""

import json
import sys
from typing import Any

import torch

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.testing.compiled_conformance import kinds
from ditkit_core.testing.compiled_steps import difference, numbers
from ditkit_core.testing.interpreter import repair_interpreter
from ditkit_core.testing.world import ADAPTERS, make_model


def compared(kind: Any) -> dict[str, Any]:
    """Results of one class of conformance checks, by what is trained: the difference from torch, and whether a policy changes a bit."""
    results, items = {}, kind().items(1)
    for name, policy in (("lora", "attn_only"), ("full", "full")):
        model = make_model(kind.spec, kind.arch, adapter=ADAPTERS[name])
        plain = numbers(kind.spec, model, items, BlockEngine())
        under, again = (
            numbers(kind.spec, model, items, BlockEngine(policy=checkpointing, kernels="triton"))
            for checkpointing in ("none", policy)
        )
        results[name] = {
            "from_torch": difference(under, plain),
            "differs": not all(map(torch.equal, under, plain)),
            "equal": all(map(torch.equal, under, again)),
        }
    return results


if __name__ == "__main__":
    repair_interpreter()
    torch.set_num_threads(1)
    print(json.dumps({name: compared(kind) for name, kind in kinds(*sys.argv[1:]).items()}))
