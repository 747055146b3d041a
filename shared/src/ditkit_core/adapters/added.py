"""Adds adapter files to a loaded model for samples alone: none of its weights changes, and nothing stays of them afterwards.

The products are added to those of each layer, whatever it is: quantized, streamed, divided, or with an adapter that is trained. Merging the
files would round the base once more, and a second copy of it would be needed to take them out bitwise.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ditkit_core.adapters.files.read import AdapterFile
from ditkit_core.nn.factored import Piece, add_products


class AddedAdapter(NamedTuple):
    """An open adapter file, and the strength to add it with."""

    file: AdapterFile
    strength: float

    def method(self, module: str) -> str:
        """The method of its adapter of a module; empty if it has none."""
        return self.file.modules[module].method if module in self.file.modules else ""

    def pieces(self, module: str, device: torch.device) -> list[Piece]:
        """The LoKr or LoHa of a module on a device, in fp32."""
        return [
            Piece(
                {part: tensor.to(device) for part, tensor in each.parts.items()},
                scale * self.strength,
                each.index,
                each.of,
            )
            for each, scale in self.file.factored(module)
        ]


class AddedLora(nn.Module):
    """A layer, and a low-rank product that is added to its output."""

    def __init__(self, layer: nn.Module, down: Tensor, up: Tensor):
        super().__init__()
        self.layer = layer
        # Neither parameters nor buffers, so that whatever goes through those of the model finds its own alone.
        self._down, self._up = down, up

    def forward(self, x: Tensor) -> Tensor:
        low = x.flatten(0, -2).to(self._down.dtype) @ self._down.T
        out: Tensor = self.layer(x)
        # In place: the widest layer's output is the largest tensor of a block, and nobody else has it yet.
        out.view(-1, out.shape[-1]).addmm_(low.to(out.dtype), self._up.T.to(out.dtype))
        return out


class AddedFactors(nn.Module):
    """A layer, and the product of a LoKr or LoHa that is added to its output."""

    def __init__(self, layer: nn.Module, pieces: Sequence[Piece]):
        super().__init__()
        self.layer, self._pieces = layer, pieces

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        add_products(out, x, self._pieces)
        return out


@contextmanager
def added(model: nn.Module, adapters: Sequence[AddedAdapter], dtype_of: Callable[[str], torch.dtype]) -> Iterator[None]:
    """Add adapters to a model as long as the context is open; only forwards without gradients may run meanwhile.

    Args:
        model: The `StagedModel` with its weights, perhaps with adapters of its own.
        adapters: Files that fit the model, none of them a DoRA.
        dtype_of: The dtype of a base parameter that is not quantized, by name; the products are made in it.
    """
    modules = dict.fromkeys(module for each in adapters for module in each.file.modules)
    before: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for module in modules:
            owner, _, leaf = module.rpartition(".")
            parent, layer = model.get_submodule(owner), model.get_submodule(module)
            # The layer's own device: its parameters name it even while a streamed block is on the host.
            device, dtype = next(layer.parameters()).device, dtype_of(f"{module}.weight")
            before.append((parent, leaf, layer))
            own = layer
            if loras := [each for each in adapters if each.method(module) == "lora"]:
                own = AddedLora(own, *(matrix.to(device, dtype) for matrix in _joined(loras, module)))
            for each in adapters:
                if each.method(module) not in ("", "lora"):
                    own = AddedFactors(own, each.pieces(module, device))
            setattr(parent, leaf, own)
        yield
    finally:
        for parent, leaf, layer in before:
            setattr(parent, leaf, layer)


def _joined(adapters: Sequence[AddedAdapter], module: str) -> tuple[Tensor, Tensor]:
    """A and B of all LoRAs of a module side by side along the rank, with scales and strengths in B."""
    downs, ups = [], []
    for file, strength in adapters:
        read = file.read(module)
        assert read.magnitude is None, "refused when the file was opened"
        downs.append(read.down)
        ups.append(read.up * (strength * file.modules[module].scale))
    return torch.cat(downs), torch.cat(ups, 1)


def added_bytes(
    adapters: Sequence[AddedAdapter],
    shapes: Mapping[str, tuple[int, ...]],
    dtype_of: Callable[[str], torch.dtype],
    within: Collection[str],
) -> int:
    """Bytes that adapters take on a device while they are added.

    Args:
        adapters: The files.
        shapes: Weight shapes [out, in] of the model's Linear layers.
        dtype_of: As for `added`.
        within: Names of the modules on the device.
    """
    stored, changes = 0, [0]
    for file, _ in adapters:
        for name, found in file.modules.items():
            if name not in within:
                continue
            if found.method == "lora":
                stored += found.rank * sum(shapes[name]) * dtype_of(f"{name}.weight").itemsize
                continue
            stored += 4 * found.num_factors(file.source)
            # A LoHa's change and the two products that it is made of, for one layer at a time.
            changes.append(3 * 4 * math.prod(shapes[name]) * (found.method == "loha"))
    return stored + max(changes)
