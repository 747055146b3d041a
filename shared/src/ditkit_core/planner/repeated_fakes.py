"""Fake tensors that are made faster where an operation is repeated, which is most of a plan's time.

A model of some equal blocks, or a film in equal chunks, runs the same operations on tensors of the
same shapes again and again. torch remembers their results too, but needs twice the time of all else
to look one up, and computes them anew on each device: a plan runs equal blocks on one device, and
then each of them on another one.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

_PLAIN = (
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.layout, torch.memory_format),
)
"""Types of arguments whose values decide what an operation returns, besides tensors and lists."""


class _Result(NamedTuple):
    """What an operation returns: one of its arguments, a view of one, or a new tensor. Its device
    is the number of the argument's, or one that no argument has."""

    argument: int | None
    view_of: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device | int


class RepeatedFakes(FakeTensorMode):
    """A mode of fake tensors that keeps, for the process, what torch puts into its own cache, or
    answers from it.

    torch alone decides which results depend on nothing but shapes: an operation that it does not
    keep is always run by it. A release of torch that calls its cache otherwise is slower here, and
    not wrong.
    """

    _results: ClassVar[dict[tuple[Any, ...], _Result]] = {}
    _answer: Any = None
    """What torch's cache took or returned in the operation that runs now."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under it, as under `MemoryTracker`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = list[torch.device]()
        content = self._content((*args, *kwargs.values()), devices)
        key = None
        if content is not None:
            key = (
                *(func, len(args), *kwargs, *content),
                *(device if not device.index else device.type for device in devices),
                *(torch.get_default_dtype(), torch.is_inference_mode_enabled()),
            )
            if (result := self._results.get(key)) is not None:
                return self._again(result, args, devices)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        answer, self._answer = self._answer, None
        result = _result_of(out, args, devices) if answer is out else None
        if key is not None and result is not None:
            self._results[key] = result
        return out

    def _make_cache_entry(self, *call: Any) -> Any:
        entry = super()._make_cache_entry(*call)
        self._answer = call[-1]
        return entry

    def _output_from_cache_entry(self, *entry: Any) -> Any:
        self._answer = super()._output_from_cache_entry(*entry)
        return self._answer

    def _content(
        self, values: Iterable[Any], devices: list[torch.device]
    ) -> tuple[Any, ...] | None:
        """What a result may depend on; None where it could be more. Devices are numbered as they
        come, and added to `devices`: an operation depends on which are the same."""
        parts = list[Any]()
        for value in values:
            if isinstance(value, FakeTensor):
                if value.fake_mode is not self or value.constant is not None or value.is_sparse:
                    return None
                parts += (
                    *(value.shape, value.stride(), value.storage_offset(), value.dtype),
                    *(_number(value.fake_device, devices), value.requires_grad),
                    *(value.is_conj(), value.is_neg()),
                    *(value.is_inference(), value.untyped_storage().nbytes()),
                )
            elif type(value) is torch.device:
                parts += (torch.device, _number(value, devices))
            elif type(value) in _PLAIN:
                parts += (type(value), value)  # 1 equals 1.0, which may return another dtype
            elif isinstance(value, list | tuple) and not isinstance(value, Tensor):
                inside = self._content(value, devices)
                if inside is None:
                    return None
                parts.append(inside)
            else:
                return None
        return tuple(parts)

    def _again(self, result: _Result, args: Sequence[Any], devices: Sequence[torch.device]) -> Any:
        if result.argument is not None:
            return args[result.argument]
        shape, stride = result.shape, result.stride
        storage = None
        if result.view_of is not None:
            shape, stride, storage = (), (), args[result.view_of].untyped_storage()
        with in_kernel_invocation_manager(self):
            empty = torch.empty_strided(shape, stride, dtype=result.dtype, device="meta")
            if storage is not None:
                empty.set_(storage, result.offset, result.shape, result.stride)
        device = result.device
        return FakeTensor(self, empty, devices[device] if isinstance(device, int) else device)


def _number(device: torch.device, devices: list[torch.device]) -> int:
    if device not in devices:
        devices.append(device)
    return devices.index(device)


def _result_of(out: Any, args: Sequence[Any], devices: Sequence[torch.device]) -> _Result | None:
    """How to make this again; None where it is not a tensor alone, or a special one."""
    if type(out) is not FakeTensor or out.requires_grad or out.is_conj() or out.is_neg():
        return None
    if (device := out.fake_device) not in devices and device.index:
        return None
    storage = out.untyped_storage()._cdata
    shared = [
        index
        for index, arg in enumerate(args)
        if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == storage
    ]
    same = next((index for index in shared if args[index] is out), None)
    if same is None and len(shared) > 1:
        return None
    return _Result(
        argument=same,
        view_of=shared[0] if shared else None,
        shape=out.shape,
        stride=out.stride(),
        offset=int(out.storage_offset()),
        dtype=out.dtype,
        device=devices.index(device) if device in devices else device,
    )
