"""A machine with GPUs, for tests on one without: the pretended devices `cpu:1`, `cpu:2`, … with
streams of their own.

Work runs at once, so that numbers are true. On which stream a GPU would have run it is logged, and
`HappensBefore` finds what a GPU could have run in another order. Where a careless stand-in would
hide a fault, it does what CUDA does:

- a copy between the host and a device ends before the host goes on, unless it is `non_blocking` and
  the host's memory is page-locked,
- a copy between two devices runs on the stream of the first, waits for both, and both wait for it,
- a number that the host reads waits for the stream that computes it, and one that it has is read
  when work with it is launched,
- memory is given back to the stream that allocated it, and each device has a random generator of
  its own.

The host is one thread here: backwards of several devices, which autograd runs at the same time on
GPUs, run one after the other.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor, UntypedStorage

from ditkit_core.engine import pinned_memory
from ditkit_core.io.runtimes import RUNTIMES
from ditkit_core.testing.happens_before import HOST_THREAD
from ditkit_core.testing.pretend_devices import HOST, PretendDevices, PretendTensor
from ditkit_core.testing.stand_in_runtime import StandInRuntime

_aten: Any = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default, _aten._foreach_copy_.default)
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_OF_A_SHAPE = (
    "new_zeros",
    "new_ones",
    "new_full",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
)
"""Their tensor says the shape alone."""


class _Generator(torch.Generator):
    """A generator whose device is known by its seed: torch's forgets the index of a CPU, and
    operations get another object."""

    of: ClassVar[dict[int, torch.device]] = {}

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def manual_seed(self, seed: int) -> Self:
        self.of[seed] = self._device
        super().manual_seed(seed)
        return self


@dataclass(frozen=True)
class _Role:
    """What an operation does to its arguments."""

    name: str
    is_view: bool
    touches: bool
    """Whether it reads or writes any values; views and new empty tensors do not."""
    reads: bool
    written: frozenset[str | int]
    """Arguments that it writes, by position and by name."""
    is_waited_for: bool
    """Whether the host reads its result, or needs its size."""
    samples: bool


class StandIn(PretendDevices):
    """Inside the block `cpu:1`, `cpu:2`, … are devices with a runtime of their own, whose log says
    what nothing orders."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = StandInRuntime()
        self._patches, self._is_over = ExitStack(), False

    def __enter__(self) -> Self:
        patch = self._patches.enter_context(pytest.MonkeyPatch.context())
        patch.setitem(RUNTIMES, "cpu", self.runtime)
        resize, seed, unlock = UntypedStorage.resize_, torch.manual_seed, pinned_memory.unlock

        def unlock_inside(locked: Mapping[int, torch.device]) -> None:
            if not self._is_over:  # an owner may be freed later, and its memory with it
                unlock(locked)

        def resize_in_place(storage: UntypedStorage, size: int) -> Any:
            self.runtime.resized(storage._cdata, size)
            return resize(storage, size)

        def seed_all(number: int) -> torch.Generator:
            self.runtime.manual_seed_all(number)
            return seed(number)

        # No dispatch mode sees these.
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(UntypedStorage, "resize_", resize_in_place)
        patch.setattr(torch, "manual_seed", seed_all)
        patch.setattr(Tensor, "pin_memory", lambda tensor: self.runtime.pinned(tensor))
        patch.setattr(pinned_memory, "unlock", unlock_inside)
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        super().__exit__(*exception)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, role = kwargs or {}, _role(func)
        if role.is_view and self._knows(args[0]):
            return super().__torch_dispatch__(func, types, args, kwargs)
        inputs = [(i, tensor) for i, value in enumerate(args) for tensor in _tensors(value)]
        if kwargs:
            inputs += [(i, tensor) for i, value in kwargs.items() for tensor in _tensors(value)]
        locations = [tensor.device for _, tensor in inputs]
        there = [location for location in locations if location != HOST]
        named = kwargs.get("device")
        if named is not None and (location := torch.device(named)) != HOST:
            there.append(location)
        if role.samples and there:
            with self._sampling(func, kwargs.get("generator"), there):
                out = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        results = _tensors(out)
        if func in _COPIES and len({*locations, *(tensor.device for tensor in results)}) > 1:
            self._copied(func, args, kwargs, out)
        elif there:
            self._ran(role, inputs, locations, results, there[0])
        elif role.touches:
            self._ran_on_host(role, inputs)
        return out

    def _knows(self, tensor: Tensor) -> bool:
        """Whether a view of a tensor is nothing new to the log."""
        return type(tensor) is not PretendTensor or self.runtime.follows(tensor)

    def _sampling(
        self, func: Any, generator: Any, devices: Sequence[torch.device]
    ) -> AbstractContextManager[None]:
        """Random numbers of an operation come from its device's generator."""
        of = None if generator is None else _Generator.of.get(generator.initial_seed(), HOST)
        assert of is None or of in devices, (
            f"{func}: a generator of {of}, and a tensor of {[*dict.fromkeys(devices)]}"
        )
        return self.runtime.sampling_on(devices[0])

    def _ran_on_host(self, role: _Role, inputs: Sequence[tuple[Any, Tensor]]) -> None:
        """Log an operation of the host, if a device has copied what it touches."""
        copied = [(i, tensor) for i, tensor in inputs if self.runtime.is_copied(tensor)]
        if copied:
            keys = [(i in role.written, self._key(tensor)) for i, tensor in copied]
            reads = [key for _, key in keys]
            writes = [key for written, key in keys if written]
            self.runtime.log.launch(HOST_THREAD, role.name, reads, writes)

    def _ran(
        self,
        role: _Role,
        inputs: Sequence[tuple[Any, Tensor]],
        locations: Sequence[torch.device],
        results: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        """Log an operation on one device; `locations` are the devices of its inputs."""
        runtime = self.runtime
        stream = runtime.current_stream(device).name
        reads, writes, numbers = list[int](), list[int](), list[int]()
        for (i, tensor), location in zip(inputs, locations, strict=True):
            if location != HOST:
                owner = stream if location == device else self._own(location)
                (writes if i in role.written else reads).append(runtime.follow(tensor, owner))
            elif runtime.is_copied(tensor):
                numbers.append(self._key(tensor))
        # A number on the host: CUDA gets its value with the launch, so the host reads it now.
        if numbers:
            runtime.log.launch(HOST_THREAD, role.name, numbers)
        keys = [runtime.follow(tensor, stream) for tensor in results if tensor.device != HOST]
        if role.touches:
            writes += [key for key in keys if key not in reads]
            runtime.log.launch(stream, role.name, reads if role.reads else (), writes)
        if role.is_waited_for:
            runtime.log.synchronize(stream)

    def _copied(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Log copies between devices."""
        if func is _COPIES[0]:
            pairs: Iterable[tuple[Tensor, Tensor]] = [(args[0], out)]
        else:
            pairs = zip(_tensors(args[0]), _tensors(args[1]), strict=True)
            pairs = [(source, target) for target, source in pairs]
        non_blocking = kwargs.get(
            "non_blocking", args[2] if func is not _COPIES[0] and len(args) > 2 else False
        )
        for source, target in pairs:
            # What `to("cpu", non_blocking=True)` makes is page-locked.
            is_locked = func is _COPIES[0] and target.device == HOST
            self._copied_one(source, target, non_blocking=non_blocking, is_locked=is_locked)

    def _copied_one(
        self, source: Tensor, target: Tensor, *, non_blocking: bool, is_locked: bool
    ) -> None:
        log, runtime = self.runtime.log, self.runtime
        here, there = source.device, target.device
        stream = runtime.current_stream(there if here == HOST else here).name
        reads, writes = self._key(source), runtime.follow(target, self._own(there))
        if here != HOST and there != HOST:
            other = runtime.current_stream(there).name
            log.wait(stream, log.record(other))
            log.launch(stream, f"the copy to {there}", [reads], [writes])
            log.wait(other, log.record(stream))
            return
        is_locked |= runtime.is_locked(source if here == HOST else target)
        if here == HOST and not is_locked:
            # into the driver's own memory, and from there later
            log.launch(HOST_THREAD, f"the copy to {there}", [reads])
            log.launch(stream, f"the copy to {there}", [], [writes])
        else:
            log.launch(stream, f"the copy to {there}", [reads], [writes])
        if not non_blocking or (there == HOST and not is_locked):
            log.synchronize(stream)

    def _key(self, tensor: Tensor) -> int:
        return self.runtime.follow(tensor, self._own(tensor.device))

    def _own(self, device: torch.device) -> str:
        return HOST_THREAD if device == HOST else self.runtime.current_stream(device).name


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return ()


@cache  # asked of every operation
def _role(func: Any) -> _Role:
    name, tags, schema = func._schema.name.partition("::")[2], func.tags, func._schema
    is_view = func.is_view or name == "_unsafe_view" or torch.Tag.inplace_view in tags
    return _Role(
        name=name,
        is_view=is_view,
        touches=not is_view and name not in _EMPTY,
        reads=name not in _OF_A_SHAPE,
        written=frozenset(
            key
            for i, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for key in (i, argument.name)
        ),
        is_waited_for=bool(
            {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(tags)
        ),
        samples=torch.Tag.nondeterministic_seeded in tags,
    )
