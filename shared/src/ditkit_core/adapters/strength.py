"""Runs a model with its adapters at another strength, whose weights stay what they are."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.adapters.inject import adapter_layers, trains_magnitude
from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.parameters import switched


class DoraAtStrength(nn.Module):
    """A layer with a DoRA that makes (1 - t) · W + t · W' of a weight W, where the DoRA alone makes
    W' of it. A DoRA divides by the norm of its sum, so no scale of its factors does the same."""

    def __init__(self, layer: nn.Module, strength: float):
        super().__init__()
        self.layer, self._strength = layer, strength

    def forward(self, x: Tensor) -> Tensor:
        # Without the adapter and not the base alone: an assistant next to it stays as it is.
        with switched([self.layer], "_disable_adapters", True):
            without: Tensor = self.layer(x)
        return torch.lerp(without, self.layer(x), self._strength)


@contextmanager
def at_strength(model: nn.Module | StagedModel, strength: float) -> Iterator[None]:
    """Inside the block the model's adapters change its weights by this factor of what they are
    trained to; 1 changes no bit. Only forwards without gradients may run meanwhile."""
    with ExitStack() as stack:
        for name, layer in adapter_layers(model).items() if strength != 1 else ():
            if trains_magnitude(layer):
                owner, _, leaf = name.rpartition(".")
                parent = model.get_submodule(owner)
                setattr(parent, leaf, DoraAtStrength(layer, strength))
                stack.callback(setattr, parent, leaf, layer)
            else:
                scaling: dict[str, Any] = layer.scaling
                stack.callback(scaling.update, default=scaling["default"])
                scaling["default"] *= strength
        yield
