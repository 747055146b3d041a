"""A training step at full size without memory: fake tensors on a device that is not the host."""

from collections import Counter
from typing import Any

import torch
from torch import nn

from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn import context
from ditkit_core.planner import reduced_model
from ditkit_core.testing.observer import Observer

DEVICE = torch.device("cpu:1")
"""Under fake tensors another device than the host."""

_aten = torch.ops.aten
_MATMULS = {
    _aten.mm.default: 0,
    _aten.mm.out: 0,
    _aten.mm.dtype: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.addmm_.default: 1,
}
"""Operations, and the position of their first factor."""


class Arithmetic(Observer):
    """Counts FLOPs of matmuls by dtype and device, and operations that make the host wait for the
    device."""

    def __init__(self) -> None:
        """Count nothing yet."""
        super().__init__()
        self.flops = Counter[tuple[torch.dtype, torch.device]]()
        self.waits: list[str] = []
        """Reads of a number by the host, and copies that are waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _MATMULS:
            a, b = args[_MATMULS[func] :][:2]
            self.flops[a.dtype, a.device] += 2 * a.numel() * b.shape[-1]
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == DEVICE:
            self.waits.append("a number")
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].device != out.device
            and not kwargs.get("non_blocking")
        ):
            self.waits.append(f"a copy of {list(out.shape)} to {out.device}")
        return out


def materialise(model: nn.Module, spec: ModelSpec) -> None:
    """Under `FakeTensorMode`, parameters on `DEVICE` in place of those on `meta`, in the dtypes
    that `load` gives to a bf16 model."""
    reduced_model.materialise(model, "", spec, dtype=torch.bfloat16, device=DEVICE)


def as_on_a_gpu(patch: Any) -> None:
    """Let code that depends on the kind of device behave as on a GPU, although the fake device is
    of type CPU.

    Args:
        patch: pytest's `monkeypatch`.
    """
    patch.setattr(context, "_stand_in", ["cuda"])
