"""The step of an optimizer that goes from weight to weight, for one weight of each kind."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ditkit_core.planner.memory_tracker import Meter


def step_one_of_each(optimizer: torch.optim.Optimizer, meter: Meter) -> None:
    """Step with one parameter of each shape and dtype, count its kernels and its peak for all of
    them, and give the others a state of the same size.

    A step that is `OptimizerKind.one_after_another` frees what it allocates for a parameter before
    the next, so that on each device its peak above the memory in use is the highest of one.
    """
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]
    kinds: dict[Any, list[nn.Parameter]] = {}
    for index, parameters in enumerate(before):
        groups[index]["params"] = []
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                kind = (index, *_kind(parameter), *_kind(gradient), parameter in optimizer.state)
                kinds.setdefault(kind, []).append(parameter)
    try:
        for (index, *_), (first, *others) in kinds.items():
            groups[index]["params"] = [first]
            kernels, peak, in_use = Counter(meter.kernels), meter.peak, meter.total(first.device)
            meter.restart_peak()
            type(optimizer).step(optimizer)
            more = meter.peak[first.device] - in_use
            meter.peak |= peak
            for kernel, count in list(meter.kernels.items()):
                meter.kernels[kernel] += (count - kernels[kernel]) * len(others)
            for other in others:
                highest = meter.total(other.device) + more
                meter.peak[other.device] = max(meter.peak[other.device], highest)
                if other not in optimizer.state:
                    optimizer.state[other] = {
                        name: _like(value, first.device, other.device)
                        for name, value in optimizer.state[first].items()
                    }
            groups[index]["params"] = []
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _like(value: Any, device: torch.device, other: torch.device) -> Any:
    """A value of the same size, on the other device where it is on the first; of an 8-bit average
    all its tensors."""
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        inside = {name: _like(getattr(value, name), device, other) for name in names}
        return type(value).__tensor_unflatten__(inside, context, value.shape, value.stride())
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, device=other if value.device == device else value.device)
