"""Values of named parameters, copied in place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def swapped(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters other values inside the `with` block, and afterwards exactly those from before.

    The values are copied into the parameters' own storage, so placement, sharding and every reference to a parameter
    see them. Parameters without a value of their name stay as they are.
    """
    before = {name: parameters[name].detach().clone() for name in values}
    try:
        copy_values(parameters, values)
        yield
    finally:
        copy_values(parameters, before)


@torch.no_grad()
def copy_values(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Copy values into parameters by name, in place, to each parameter's device and dtype."""
    for name, value in values.items():
        parameters[name].copy_(value)
