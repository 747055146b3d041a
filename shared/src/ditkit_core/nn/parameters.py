"""Layers of a class by their weights' names, and what modules have inside a `with` block alone:
other values of parameters, copied in place, and other switches."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from ditkit_core.models.protocol import StagedModel

T = TypeVar("T")


def by_weight(model: nn.Module | StagedModel, kind: type[T]) -> dict[str, T]:
    """The layers of a class, by their weight's name in files: without the `base_layer` that peft
    inserts."""
    return {
        f"{name}.weight".replace(".base_layer.", "."): module
        for name, module in model.named_modules()
        if isinstance(module, kind)
    }


@contextmanager
def swapped(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters other values inside the `with` block, and afterwards exactly those from
    before.

    The values are copied into the parameters' own storage, so placement, sharding and every
    reference to a parameter see them. Parameters without a value of their name stay as they are.
    """
    before = {name: parameters[name].detach().clone() for name in values}
    try:
        copy_values(parameters, values)
        yield
    finally:
        copy_values(parameters, before)


@contextmanager
def switched(modules: Iterable[object], name: str, value: bool) -> Iterator[None]:
    """Give modules a value of an attribute inside the `with` block, and afterwards its opposite,
    which they had before."""
    switched_modules = list(modules)
    for module in switched_modules:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module in switched_modules:
            setattr(module, name, not value)


@torch.no_grad()
def copy_values(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Copy values into parameters by name, in place, to each parameter's device and dtype."""
    for name, value in values.items():
        parameters[name].copy_(value)
