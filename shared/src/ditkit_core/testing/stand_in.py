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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor, UntypedStorage

from ditkit_core.engine import pinned_memory
from ditkit_core.io.runtimes import RUNTIMES
from ditkit_core.testing.happens_before import HOST_THREAD
from ditkit_core.testing.pretend_devices import HOST, PretendDevices
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
        inputs = [
            (i, tensor)
            for i, value in (*enumerate(args), *kwargs.items())
            for tensor in _tensors(value)
        ]
        named = kwargs.get("device")
        devices = dict.fromkeys(tensor.device for _, tensor in inputs if tensor.device != HOST)
        if named is not None and torch.device(named) != HOST:
            devices[torch.device(named)] = None
        source: AbstractContextManager[None] = nullcontext()
        if role.samples and devices:
            chosen = kwargs.get("generator")
            generator_device = (
                None if chosen is None else _Generator.of.get(chosen.initial_seed(), HOST)
            )
            assert generator_device is None or generator_device in devices, (
                f"{func}: a generator of {generator_device}, and a tensor of {[*devices]}"
            )
            source = self.runtime.sampling_on(next(iter(devices)))
        with source:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        if (
            func in _COPIES
            and len({tensor.device for tensor in (*_tensors(out), *(t for _, t in inputs))}) > 1
        ):
            self._copied(func, args, kwargs, out)
        else:
            self._ran(role, inputs, [*_tensors(out)], next(iter(devices), None))
        return out

    def _ran(
        self,
        role: _Role,
        inputs: Sequence[tuple[Any, Tensor]],
        out: Sequence[Tensor],
        device: torch.device | None,
    ) -> None:
        """Log an operation on one device, or on the host."""
        runtime = self.runtime
        if device is None:
            if role.touches:
                copied = [(i, tensor) for i, tensor in inputs if runtime.is_copied(tensor)]
                keys = [(i in role.written, self._key(tensor)) for i, tensor in copied]
                runtime.log.launch(
                    HOST_THREAD,
                    role.name,
                    [key for _, key in keys],
                    [key for written, key in keys if written],
                )
            return
        stream = runtime.current_stream(device).name
        # A number on the host: CUDA gets its value with the launch, so the host reads it now.
        numbers = [
            self._key(tensor)
            for _, tensor in inputs
            if tensor.device == HOST and runtime.is_copied(tensor)
        ]
        if numbers:
            runtime.log.launch(HOST_THREAD, role.name, numbers)
        reads = [
            self._key(tensor)
            for i, tensor in inputs
            if tensor.device != HOST and i not in role.written
        ]
        writes = [
            self._key(tensor) for i, tensor in inputs if tensor.device != HOST and i in role.written
        ]
        results = [runtime.follow(tensor, stream) for tensor in out if tensor.device != HOST]
        if role.touches:
            runtime.log.launch(
                stream,
                role.name,
                reads if role.reads else (),
                [*writes, *(key for key in results if key not in reads)],
            )
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@cache  # asked of every operation
def _role(func: Any) -> _Role:
    name, tags, schema = func._schema.name.partition("::")[2], func.tags, func._schema
    is_view = func.is_view or name == "_unsafe_view" or torch.Tag.inplace_view in tags
    return _Role(
        name=name,
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
