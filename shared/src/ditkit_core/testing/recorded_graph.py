"""A stand-in for CUDA graphs on a machine without a GPU: records each operation below autograd, and
runs exactly those again on the same memory.

No Python of the recorded work runs in between. So what a graph would bake in shows as a wrong
result: a Python number, a tensor that was made on the host, a decision, a seed that stays. Where a
careless stand-in would hide a fault, it does what CUDA does:

- recording changes nothing: what the work wrote to memory from before gets its old values back,
- memory of the pool that nobody refers to holds garbage before and after each replay: other graphs
  use it, too,
- memory from before the recording that was freed since holds garbage,
- a number that the host reads cannot be recorded, nor can a copy between host and device that the
  host waits for, and a copy that nobody waits for reads the host's memory when it is replayed.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, UntypedStorage

from ditkit_core.engine.generator_state import GeneratorHook, RewindTrace, rewinding
from ditkit_core.engine.graphs import GRAPHS, Graph, in_one_thread
from ditkit_core.testing.observer import Observer
from ditkit_core.testing.pretend_devices import PretendTensor

T = TypeVar("T")

_GARBAGE = 0xFF
"""A byte of memory that nobody may read: as any floating-point dtype it is NaN."""
_HOST = torch.device("cpu")
_aten: Any = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default, _aten._foreach_copy_.default)


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Inside the block the work of CPUs and of pretended devices is recorded and replayed by this
    stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GRAPHS, "cpu", RecordedGraphs)
        yield


class RecordedGraphs:
    """Records the work of one device."""

    def __init__(self, device: torch.device):
        """Start without graphs."""
        self._device = device

    def record(self, work: Callable[[], T], trace: RewindTrace) -> tuple[Graph, T]:
        """Record some work; nothing of it has happened afterwards."""
        hook, recording = GeneratorHook(self._device), _Recording()
        outside = hook.state()
        try:
            with in_one_thread(), rewinding(hook, recording), recording:
                results = work()
        finally:
            hook.set_state(outside)
            recording.undo()
        recording.spoil()
        return _RecordedGraph(recording, hook), results

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Run the block's work in one thread, as in a pool of memory."""
        with in_one_thread():
            yield


class _RecordedGraph:
    def __init__(self, recording: "_Recording", hook: GeneratorHook):
        self._recording, self._hook = recording, hook

    def replay(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._recording.replay(self._hook)

    def free(self) -> None:
        self._recording.calls.clear()
        self._recording.pool.clear()


class _Located:
    """A tensor by its place in memory. It keeps memory of the pool, and none from before the
    recording."""

    def __init__(self, tensor: Tensor, in_pool: bool):
        storage = tensor.untyped_storage()
        data: Any = tensor.data_ if isinstance(tensor, PretendTensor) else tensor
        self._storage: Callable[[], UntypedStorage | None] = (
            (lambda: storage) if in_pool else weakref.ref(storage)
        )
        self._geometry = data.storage_offset(), data.size(), data.stride()
        self._dtype, self._device, self._num_bytes = data.dtype, tensor.device, storage.nbytes()
        self._flags = data.is_conj(), data.is_neg()

    def tensor(self) -> Tensor:
        storage = self._storage()
        if storage is None or storage.nbytes() < self._num_bytes:
            storage = UntypedStorage(self._num_bytes)
            _spoil(storage)
        tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)
        is_conjugated, is_negated = self._flags
        tensor = tensor.conj() if is_conjugated else tensor
        tensor = tensor._neg_view() if is_negated else tensor
        return tensor if self._device.index is None else PretendTensor(tensor, self._device)


class _Recording(Observer):
    """The operations of some work, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[GeneratorHook], None]] = []
        self.pool: dict[int, UntypedStorage] = {}
        """The memory that the work allocated, by address."""
        self._before: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        """Memory from before the recording that the work wrote to, with its values before."""
        self._states: dict[int, Tensor] = {}
        self._num_states = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise RuntimeError(
                f"{func}: operation not permitted when stream is capturing: the host waits for its "
                f"result"
            )
        tensors = [*_tensors(args), *_tensors(list(kwargs.values()))]
        self._refuse_waiting(func, args, kwargs, tensors)
        written = [
            x
            for argument, value in _arguments(func, args, kwargs)
            if argument.is_write
            for x in _tensors(value)
        ]
        for tensor in written:
            self._keep(tensor)
        arguments = (
            self._located(args),
            {name: self._located(value) for name, value in kwargs.items()},
        )
        results = func(*args, **kwargs)
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
        new = [x for x in _tensors(results) if x.untyped_storage()._cdata not in inputs]
        for tensor in new:
            storage = tensor.untyped_storage()
            self.pool[storage._cdata] = storage
        if not written and not new:
            return results  # a view
        memory = [self._located(tensor) for tensor in new]

        def call(_: GeneratorHook) -> None:
            positional, named = (
                _rebuilt(arguments[0]),
                {name: _rebuilt(value) for name, value in arguments[1].items()},
            )
            addresses = {
                tensor.untyped_storage()._cdata
                for tensor in _tensors([*positional, *named.values()])
            }
            again = func(*positional, **named)
            computed = [x for x in _tensors(again) if x.untyped_storage()._cdata not in addresses]
            for target, tensor in zip(memory, computed, strict=True):
                target.tensor().copy_(tensor)

        self.calls.append(call)
        return results

    def snapshot(self, hook: GeneratorHook) -> int:
        """Note the generator's state, and again in each replay."""
        number, self._num_states = self._num_states, self._num_states + 1

        def call(hook: GeneratorHook) -> None:
            self._states[number] = hook.state()

        call(hook)
        self.calls.append(call)
        return number

    def restore(self, hook: GeneratorHook, state: int) -> None:
        """Put a state back, and again in each replay."""

        def call(hook: GeneratorHook) -> None:
            hook.set_state(self._states[state])

        call(hook)
        self.calls.append(call)

    @torch.no_grad()
    def replay(self, hook: GeneratorHook) -> None:
        """Do all of it again."""
        self.spoil()
        for call in self.calls:
            call(hook)
        self.spoil()

    def undo(self) -> None:
        """Give memory from before the recording its values back."""
        for storage, values in self._before.values():
            storage.copy_(values)
        self._before.clear()

    def spoil(self) -> None:
        """Fill the pool's memory that nobody refers to."""
        for storage in self.pool.values():
            if torch._C._storage_Use_Count(storage._cdata) <= 1:
                _spoil(storage)

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.pool and storage._cdata not in self._before:
            self._before[storage._cdata] = storage, storage.clone()

    def _located(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Located(value, value.untyped_storage()._cdata in self.pool)
        return (
            type(value)(self._located(part) for part in value)
            if type(value) in (list, tuple)
            else value
        )

    @staticmethod
    def _refuse_waiting(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        if func not in _COPIES:
            return
        there = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        devices = {tensor.device for tensor in tensors} | ({there} if there is not None else set())
        waits = not kwargs.get(
            "non_blocking", args[2] if func is not _COPIES[0] and len(args) > 2 else False
        )
        if len(devices) > 1 and _HOST in devices and waits:
            raise RuntimeError(
                f"{func}: operation not permitted when stream is capturing: the host waits for its "
                f"copy"
            )


def _spoil(storage: Any) -> None:
    storage.fill_(_GARBAGE)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield argument.alias_info, value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [tensor for part in value for tensor in _tensors(part)]
        if isinstance(value, list | tuple)
        else []
    )


def _rebuilt(value: Any) -> Any:
    if isinstance(value, _Located):
        return value.tensor()
    return type(value)(_rebuilt(part) for part in value) if type(value) in (list, tuple) else value
