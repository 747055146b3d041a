"""Linear layers whose weight is made at each use, so that a model of any size runs with one matrix
in memory at a time.

They are for inference without haste: another program's copy of a base, and comparisons on the host.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.parameters import by_weight, switched


class WeightAtUse:
    """What such a layer has in addition to its own class."""

    make_weight: Callable[[], Tensor]
    dtype_at_use: torch.dtype
    is_made = True

    @property
    def weight(self) -> Tensor:
        """The weight, made anew."""
        if self.is_made:
            return self.make_weight()
        layer: Any = self
        return torch.zeros((), dtype=self.dtype_at_use).expand(
            layer.out_features, layer.in_features
        )


def make_at_use(layer: nn.Linear, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
    """Make a layer's weight at each use. A parameter on `meta` stays in its place, and only its
    shape counts.

    Args:
        dtype: The weight's dtype.
        make: Makes the weight.
    """
    # A property of the class, because an attribute of the layer would be a tensor that stays in
    # memory.
    kind: Any = type(layer)
    layer.__class__ = _class_of(kind)
    layer.__dict__.update(make_weight=make, dtype_at_use=dtype)


@cache
def _class_of(kind: Any) -> type:
    return type(f"{kind.__name__}AtUse", (WeightAtUse, kind), {})


def weights_at_use(model: nn.Module | StagedModel) -> dict[str, WeightAtUse]:
    """These layers, by their weight's name in files."""
    return by_weight(model, WeightAtUse)


def without_values(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block these weights are zeros without memory: programs that add adapters look at
    shape, dtype and device alone."""
    return switched(weights_at_use(model).values(), "is_made", False)
