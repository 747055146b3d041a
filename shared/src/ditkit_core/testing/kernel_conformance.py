"""Checks of the Triton kernels inside the blocks of a model: numbers near torch's, and bitwise the
same under every policy.

    TRITON_INTERPRET=1 python kernel_conformance.py tests/test_conformance.py::TestWan

The interpreter has to be chosen before Triton is imported, so a test runs this in a process of its
own (`check_kernels`).
"""

import json
import sys
from collections.abc import Sequence
from inspect import getfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.interpreter import repair_interpreter
from ditkit_core.testing.scripts import printed
from ditkit_core.testing.suite_process import class_at
from ditkit_core.testing.world import ADAPTERS, Items, largest, make_model

TOLERANCE = 2e-5
"""Of fp32, relative to the largest value of a tensor: kernels sum in another order."""


def check_kernels(*classes: type) -> None:
    """Check the Triton kernels in the blocks of models that classes of checks have."""
    pytest.importorskip("triton")
    wheres = [f"{getfile(kind)}::{kind.__qualname__}" for kind in classes]
    results = printed(Path(__file__), *wheres, seconds=1200, TRITON_INTERPRET="1")
    assert results.keys() == set(wheres)
    for where, trained in results.items():
        for under in trained.values():
            # Other last bits show that the kernels ran.
            assert under["equal"] and under["differs"] and under["from_torch"] <= TOLERANCE, (
                where,
                results,
            )


def compared(kind: Any) -> dict[str, Any]:
    """Results of one class of conformance checks, by what is trained: the difference from torch,
    and whether a policy changes a bit."""
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


def numbers(spec: ModelSpec, model: Any, items: Items, engine: BlockEngine) -> list[Tensor]:
    """Outputs, and gradients of inputs and parameters, from the same random state every time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    latents = [item["latents"].clone().requires_grad_() for item in items]
    inputs = spec.training.make_inputs(latents, torch.linspace(0.3, 0.8, len(items)), items, 1.0)
    outputs = list(model(inputs, engine=engine))
    sum((output.float().square().mean() for output in outputs), torch.zeros(())).backward()
    gradients = [tensor.grad for tensor in (*latents, *model.parameters())]
    return [
        *(output.detach() for output in outputs),
        *(gradient for gradient in gradients if gradient is not None),
    ]


def difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    return largest(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12))
        for a, b in zip(actual, expected, strict=True)
    )


if __name__ == "__main__":
    repair_interpreter()
    torch.set_num_threads(1)
    print(json.dumps({where: compared(class_at(where)) for where in sys.argv[1:]}))
