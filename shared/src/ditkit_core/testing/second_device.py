"""A second device on a machine that has none: CPU tensors that say they live on `cpu:1`, and refuse to meet the host's.

What they compute is real, so that a step there can be compared to the bit with one on the host. As on an accelerator, a
tensor without dimensions may come from the host, and copies cross over; everything else that mixes devices raises.
`torch.tensor(..., device="cpu:1")` and `torch.as_tensor` stay on the host here: torch makes their data before any mode
sees the call. Code that is to be tested uses `torch.full`.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

SECOND = torch.device("cpu:1")

_aten: Any = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


class SecondDeviceTensor(Tensor):
    """A CPU tensor that says it lives on `SECOND`."""

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> Self:
        """Present a tensor of the host as one of the second device; they share memory."""
        wrapper: Any = Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=SECOND,
        )
        wrapper.data_ = data
        return wrapper

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory that it really has: torch_remat recognises tensors by it."""
        return self.data_.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten._conj.default:  # lazy conjugation is resolved above this place, where it cannot be seen
            func = _aten.conj_physical.default
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = {id(leaf.data_): leaf for leaf in leaves if isinstance(leaf, cls)}
        if func not in _COPIES and any(leaf.dim() and not isinstance(leaf, cls) for leaf in leaves):
            raise RuntimeError(f"{func} mixes tensors of {SECOND} and of the host")
        stays = func is not _aten.copy_.default or isinstance(args[0], cls)
        if kwargs.get("device") is not None:
            stays, kwargs["device"] = torch.device(kwargs["device"]) == SECOND, "cpu"

        args, kwargs = tree_map_only(SecondDeviceTensor, lambda leaf: leaf.data_, (args, kwargs))
        out = func(*args, **kwargs)
        if not stays:
            return out
        # what an operation changed in place keeps its identity
        return tree_map_only(Tensor, lambda leaf: there[id(leaf)] if id(leaf) in there else cls(leaf), out)


class second_device(TorchDispatchMode):
    """Inside the block `torch.empty(..., device=SECOND)` and `x.to(SECOND)` make tensors of the second device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        crosses = kwargs.get("device") is not None and torch.device(kwargs["device"]) == SECOND
        if not crosses or SecondDeviceTensor in types:
            return func(*args, **kwargs)
        return SecondDeviceTensor(func(*args, **{**kwargs, "device": "cpu"}))


class CountCrossings(TorchDispatchMode):
    """Counts tensors that are copied from the host to the second device, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.there = self.back = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if func is _aten._to_copy.default and device is not None:
            goes = torch.device(device) == SECOND
            was = isinstance(args[0], SecondDeviceTensor)
            self.there += goes and not was
            self.back += was and not goes
        return func(*args, **(kwargs or {}))


def move_to_second_device(module: nn.Module) -> None:
    """Replace every parameter and buffer by a copy on the second device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                copied = SecondDeviceTensor(parameter.detach().clone())
                part._parameters[name] = nn.Parameter(copied, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = SecondDeviceTensor(buffer.clone())


def on_host(tensor: Tensor) -> Tensor:
    """The values of a tensor wherever it lives."""
    value: Any = tensor.detach()
    return value.data_ if isinstance(value, SecondDeviceTensor) else value.cpu()
