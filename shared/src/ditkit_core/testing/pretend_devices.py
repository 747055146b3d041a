"""Devices on a machine that has none: CPU tensors that say they live on `cpu:1`, `cpu:2`, …, and
refuse to meet the host's or each other's.

What they compute is real, so that a step there can be compared bitwise with one on the host. As on
accelerators, a tensor without dimensions may come from the host, and copies cross over; everything
else that mixes devices raises. `torch.tensor(..., device="cpu:1")` and `torch.as_tensor` stay on
the host here: torch makes their data before any mode sees the call. Code that is to be tested uses
`torch.full`.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from ditkit_core.testing.observer import Observer

HOST = torch.device("cpu")

_aten: Any = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default, _aten._foreach_copy_.default)


class PretendTensor(Tensor):
    """A CPU tensor that says it lives on a device with a number."""

    # What sees each operation below autograd need not see it above too, which took a tenth of the
    # time of a step.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, device: torch.device) -> Self:
        """Present a tensor of the host as one of the device; they share memory."""
        wrapper: Any = Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=device,
        )
        wrapper.data_ = data
        return wrapper

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory that it really has: torch_remat recognises tensors by it, and it can be
        emptied and filled again."""
        return self.data_.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # lazy conjugation is resolved above this place, where it cannot be seen
        if func is _aten._conj.default:
            func = _aten.conj_physical.default
        originals: dict[int, Tensor] = {}
        data = [_on_host(value, originals) for value in args]
        named = {key: _on_host(value, originals) for key, value in kwargs.items()} if kwargs else {}
        if func not in _COPIES:
            _refuse_mixed(func, args, originals.values())
        if named.get("device") is not None:
            target = torch.device(named["device"])
            named["device"] = target if target.type == "meta" else HOST
        else:
            target = next(leaf.device for leaf in originals.values() if isinstance(leaf, cls))
        return _presented(func(*data, **named), originals, target)


# An operation's arguments and results are tensors in lists at most; torch's general trees took most
# of a test's time. Types are compared before classes are asked for, because every value of every
# operation comes by here.


def _on_host(value: Any, originals: dict[int, Tensor]) -> Any:
    """An argument with tensors of the host in place of pretended ones; adds each argument to
    `originals`, by the identity of its replacement."""
    kind = type(value)
    if kind is PretendTensor:
        originals[id(value.data_)] = value
        return value.data_
    if kind is list or kind is tuple:
        return kind([_on_host(item, originals) for item in value])
    if isinstance(value, Tensor):
        originals[id(value)] = value
    return value


def _presented(value: Any, originals: Mapping[int, Tensor], device: torch.device) -> Any:
    """A result as tensors of the device; what an operation changed in place keeps its identity, on
    whatever device it is."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_presented(item, originals, device) for item in value])
    if isinstance(value, Tensor):
        leaf = originals.get(id(value))
        return _on(value, device) if leaf is None else leaf
    return value


def _on(data: Tensor, device: torch.device) -> Tensor:
    return data if device.index is None else PretendTensor(data, device)


def _refuse_mixed(func: Any, args: Any, leaves: Collection[Tensor]) -> None:
    """Raise where an accelerator would: at two devices, at a tensor of the host, and at a number of
    the host that is to be changed."""
    into_host = _is_in_place(func) and isinstance(args[0], Tensor) and args[0].device == HOST
    devices = {
        leaf.device for leaf in leaves if type(leaf) is PretendTensor or leaf.dim() or into_host
    }
    if len(devices) > 1:
        names = sorted("the host" if device == HOST else str(device) for device in devices)
        raise RuntimeError(f"{func} mixes tensors of {' and of '.join(names)}")


@cache  # asked of every operation
def _is_in_place(func: Any) -> bool:
    """Whether an operation writes into its first argument."""
    arguments = func._schema.arguments
    return bool(arguments and (alias := arguments[0].alias_info) and alias.is_write)


class PretendDevices(Observer):
    """Inside the block `torch.empty(..., device="cpu:1")` and `x.to("cpu:2")` make tensors of these
    devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if PretendTensor in types:
            # where torch goes next, by a longer way, if no other mode is to see the operation
            if len(types) == 1 and not torch._C._len_torch_dispatch_stack():
                return PretendTensor.__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))
        device = kwargs.get("device") if kwargs else None
        if device is None or torch.device(device).index is None:
            return func(*args, **(kwargs or {}))
        return _presented(func(*args, **{**kwargs, "device": HOST}), {}, torch.device(device))


class CountCrossings(Observer):
    """Counts tensors that are copied from one device to another.

    Attributes:
        copies: Number of copies by (from, to).
        num_bytes: Their bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies = Counter[tuple[torch.device, torch.device]]()
        self.num_bytes = Counter[tuple[torch.device, torch.device]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (_aten._to_copy.default, _aten.copy_.default):
            way = (args[1] if func is _aten.copy_.default else args[0]).device, out.device
            if way[0] != way[1]:
                self.copies[way] += 1
                self.num_bytes[way] += out.nbytes
        return out


def move_to(module: nn.Module, device: torch.device) -> None:
    """Replace every parameter and buffer by a copy on a device, which may be the host."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                copied = _on(on_host(parameter).clone(), device)
                part._parameters[name] = nn.Parameter(copied, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _on(on_host(buffer).clone(), device)


def divide(model: Any, devices: Sequence[torch.device]) -> None:
    """Put the embedding, each block and the head of a staged model on a device each."""
    for stage, device in zip([model.embed, *model.blocks(), model.head], devices, strict=True):
        move_to(stage, device)


def on_host(tensor: Tensor) -> Tensor:
    """The values of a tensor wherever it lives."""
    value: Any = tensor.detach()
    return value.data_ if isinstance(value, PretendTensor) else value.cpu()
