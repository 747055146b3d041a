"""A stand-in for CUDA graphs on a machine without a GPU: records each operation below autograd, and
runs exactly those again on the same memory.

No Python of the recorded work runs in between. So what a graph would bake in shows as a wrong
result: a Python number, a tensor that was made on the host, a decision, a seed that stays. A replay
is one piece of work to the device's stream, as CUDA has it: no mode sees its operations, which
compute on the memory itself. Where a careless stand-in would hide a fault, it does what CUDA does:

- recording changes nothing: what the work wrote to memory from before gets its old values back,
- memory of the pool that nobody refers to holds garbage before and after each replay: other graphs
  use it, too,
- memory from before the recording that was freed since holds garbage,
- a number that the host reads cannot be recorded, nor can a copy between host and device that the
  host waits for, and a copy that nobody waits for reads the host's memory when it is replayed.
"""

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, UntypedStorage

from ditkit_core.engine.generator_state import GeneratorHook, RewindTrace, rewinding
from ditkit_core.engine.graphs import GRAPHS, Graph, in_one_thread
from ditkit_core.io.runtimes import runtime_of
from ditkit_core.testing.observer import Observer
from ditkit_core.testing.pretend_devices import PretendTensor
from ditkit_core.testing.stand_in_runtime import StandInRuntime

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
        recording.end()
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
    """A tensor of any device by its place in memory. It keeps memory of the pool, and none from
    before the recording."""

    def __init__(self, tensor: Tensor, in_pool: bool):
        storage = tensor.untyped_storage()
        data: Any = tensor.data_ if isinstance(tensor, PretendTensor) else tensor
        self.address = storage._cdata
        self.storage: Callable[[], UntypedStorage | None] = (
            (lambda: storage) if in_pool else weakref.ref(storage)
        )
        self._geometry = data.storage_offset(), data.size(), data.stride()
        self._dtype, self._num_bytes = data.dtype, storage.nbytes()
        self._flags = data.is_conj(), data.is_neg()
        self._kept: Tensor | None = None

    def keep(self) -> None:
        """Make the tensor once for all replays."""
        self._kept = self.tensor()

    def tensor(self) -> Tensor:
        """The values there, as a tensor of the host."""
        storage = self.storage()
        if storage is None or storage.nbytes() < self._num_bytes:
            storage = UntypedStorage(self._num_bytes)
            _spoil(storage)
        elif self._kept is not None:
            return self._kept
        tensor = torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)
        is_conjugated, is_negated = self._flags
        tensor = tensor.conj() if is_conjugated else tensor
        return tensor._neg_view() if is_negated else tensor


@dataclass(frozen=True)
class _Facts:
    """What is known of an operation without its arguments."""

    is_view: bool
    """Whether it makes no memory on any device; a pretended one has no lazy conjugate."""
    is_waited_for: bool
    samples: bool
    written: Sequence[tuple[int, str]]
    """The arguments that it writes, by position and name."""


@cache  # asked of every operation
def _facts(func: Any) -> _Facts:
    tags = set(func.tags)
    waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    written = [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _Facts(
        is_view=func.is_view and func is not _aten._conj.default,
        is_waited_for=bool(waits & tags),
        samples=torch.Tag.nondeterministic_seeded in tags,
        written=written,
    )


class _Recording(Observer):
    """The operations of some work, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[GeneratorHook], None]] = []
        self.pool: dict[int, UntypedStorage] = {}
        """The memory that the work allocated, by address."""
        self._before: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        """Memory from before the recording that the work wrote to, with its values before."""
        self._read: dict[int, _Located] = {}
        """Memory from before the recording, by address, and what of it is written to."""
        self._written: set[int] = set()
        self._in_pool: list[_Located] = []
        self._num_kept: Counter[int] = Counter()
        """Tensors that this recording itself has of the pool's memory, by address."""
        self._states: dict[int, Tensor] = {}
        self._num_states = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, facts = kwargs or {}, _facts(func)
        if facts.is_view:
            return func(*args, **kwargs)
        if facts.is_waited_for:
            raise RuntimeError(
                f"{func}: operation not permitted when stream is capturing: the host waits for its "
                f"result"
            )
        tensors = [*_tensors(args), *_tensors(list(kwargs.values()))]
        self._refuse_waiting(func, args, kwargs, tensors)
        written = [
            tensor
            for index, name in facts.written
            for tensor in _tensors(args[index] if index < len(args) else kwargs.get(name))
        ]
        for tensor in written:
            self._keep(tensor)
        located: list[_Located] = []
        positional = self._located(args, located)
        named = {name: self._located(value, located) for name, value in kwargs.items()}
        results = func(*args, **kwargs)
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors}
        new = [
            (index, tensor)
            for index, tensor in enumerate(_tensors(results))
            if tensor.untyped_storage()._cdata not in inputs
        ]
        for _, tensor in new:
            storage = tensor.untyped_storage()
            self.pool[storage._cdata] = storage
        if written or new:
            memory = [(index, self._located(tensor, located)) for index, tensor in new]
            self._know(located)
            self.calls.append(_again(func, positional, named, memory, facts.samples))
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
        with torch._C._DisableTorchDispatch():
            self.spoil()
            for call in self.calls:
                call(hook)
            self.spoil()
        runtime = runtime_of(hook.device)
        if isinstance(runtime, StandInRuntime):
            there = [address for address, of in self._read.items() if of.storage() is not None]
            runtime.log.launch(
                runtime.current_stream(hook.device).name,
                "a replay",
                there,
                [*(address for address in there if address in self._written), *self.pool],
            )

    def undo(self) -> None:
        """Give memory from before the recording its values back."""
        for storage, values in self._before.values():
            storage.copy_(values)
        self._before.clear()

    def end(self) -> None:
        """Make what replays need, and fill the pool's memory that nobody refers to."""
        with torch._C._DisableTorchDispatch():
            for located in self._in_pool:
                located.keep()
        self._num_kept.update(located.address for located in self._in_pool)
        self._in_pool.clear()
        self.spoil()

    def spoil(self) -> None:
        """Fill the pool's memory that nobody else refers to."""
        for address, storage in self.pool.items():
            if torch._C._storage_Use_Count(address) <= 1 + self._num_kept[address]:
                _spoil(storage)

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.pool and storage._cdata not in self._before:
            self._before[storage._cdata] = storage, storage.clone()
            self._written.add(storage._cdata)

    def _located(self, value: Any, located: list[_Located]) -> Any:
        """An argument with places in memory in place of tensors, which are added to `located`."""
        if isinstance(value, Tensor):
            located.append(_Located(value, value.untyped_storage()._cdata in self.pool))
            return located[-1]
        if type(value) in (list, tuple):
            return type(value)([self._located(part, located) for part in value])
        return value

    def _know(self, located: Iterable[_Located]) -> None:
        """Note what a replay reads and writes."""
        for tensor in located:
            if tensor.address in self.pool:
                self._in_pool.append(tensor)
            else:
                self._read[tensor.address] = tensor

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


def _again(
    func: Any,
    positional: Any,
    named: dict[str, Any],
    memory: Sequence[tuple[int, _Located]],
    samples: bool,
) -> Callable[[GeneratorHook], None]:
    """An operation of a recording, to be run again on the same memory.

    Args:
        memory: Where its new tensors belong, by their number among its results.
        samples: Whether it takes numbers of the device's generator.
    """
    if func is _aten._conj.default:  # of a pretended device, where it is no view
        func = _aten.conj_physical.default
    if named.get("device") is not None and torch.device(named["device"]).type != "meta":
        named = {**named, "device": _HOST}

    def call(hook: GeneratorHook) -> None:
        runtime = runtime_of(hook.device) if samples else None
        with nullcontext() if runtime is None else runtime.sampling_on(hook.device):
            again = func(
                *_rebuilt(positional), **{name: _rebuilt(value) for name, value in named.items()}
            )
        results = _tensors(again)
        for index, target in memory:
            target.tensor().copy_(results[index])

    return call


def _spoil(storage: UntypedStorage) -> None:
    ctypes.memset(storage.data_ptr(), _GARBAGE, storage.nbytes())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [tensor for part in value for tensor in _tensors(part)]
        if isinstance(value, list | tuple)
        else []
    )


def _rebuilt(value: Any) -> Any:
    kind = type(value)
    if kind is _Located:
        return value.tensor()
    return kind([_rebuilt(part) for part in value]) if kind is list or kind is tuple else value
