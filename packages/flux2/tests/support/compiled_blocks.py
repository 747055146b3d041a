"""Compile each kind of block, and print how far its numbers are from the plain ones: a process of its own, without type checks."""

import json
import sys
from typing import Any

import torch
from tiny_flux2 import ARCHS
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.testing.world import largest, make_model
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.spec import FLUX2


def numbers(block: nn.Module, run: Any, carry: Any) -> list[Tensor]:
    """Output, gradients of the carry's tensors, gradients of parameters."""
    # Rotary tables are never trained: the plain way computes no gradient of them.
    differentiable = {
        name: leaf.detach().clone().requires_grad_()
        for name, leaf in carry._asdict().items()
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and name != "rotary"
    }
    block.zero_grad()
    made = [leaf for leaf in run(carry._replace(**differentiable)) if isinstance(leaf, Tensor)]
    sum((leaf.float().square().sum() for leaf in made if leaf.requires_grad), torch.zeros(())).backward()
    gradients = [leaf.grad for leaf in (*differentiable.values(), *block.parameters())]
    return [*(leaf.detach() for leaf in made), *(gradient for gradient in gradients if gradient is not None)]


def difference(block: nn.Module, carry: Any) -> float:
    """The largest, relative to the largest value of its tensor; fails if the block is not one graph."""
    plain = numbers(block, block, carry)
    # A plain tuple: torch 2.11 builds a NamedTuple wrongly where a graph returns it.
    whole = torch.compile(lambda given: tuple(block(given)), fullgraph=True, backend="aot_eager")
    compiled = numbers(block, whole, carry)
    return largest(
        float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
        for expected, found in zip(plain, compiled, strict=True)
    )


def main(kind: str) -> None:
    """Print the differences by the kind of block, in fp32, of a full model or one with adapters."""
    model: Any = make_model(FLUX2, ARCHS["dev"], adapter=AdapterConfig(rank=4) if kind == "lora" else None)
    random = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    carry = model.embed(
        Flux2Inputs(
            latents=[noise(16, 1, 3, 4), noise(16, 1, 2, 3)],
            sigma=torch.tensor([0.3, 0.7]),
            guidance=torch.tensor([1.0, 2.0]),
            text=[noise(7, 12), noise(7, 12)],
            references=[[noise(16, 1, 2, 2)], []],
        )
    )
    found = {}
    for block in (model.double_blocks[0], model.join, model.single_blocks[0]):
        found[type(block).__name__] = difference(block, carry)
        carry = block(carry)
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
