"""What `torch.cuda` is to a GPU, for the pretended devices `cpu:1`, `cpu:2`, …: streams, events,
page-locking, generators, memory counters.

It has the names that the core asks of `torch.cuda`, and no others: what else is asked of it raises
AttributeError. Nothing runs on these streams; `HappensBefore` records what a GPU would have run on
them.
"""

import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, UntypedStorage

from ditkit_core.testing.happens_before import HOST_THREAD, Clock, HappensBefore

_ROUNDING = 512
"""CUDA's allocator rounds up to so many bytes."""
_ALREADY_LOCKED = 712
"""CUDA's number for memory with a page that is locked already."""


@dataclass(frozen=True)
class StandInEvent:
    """A place in a stream's work."""

    clock: Clock


@dataclass(frozen=True)
class StandInStream:
    """A stream of a pretended device."""

    device: torch.device
    name: str
    log: HappensBefore

    def record_event(self) -> StandInEvent:
        """An event behind the work so far."""
        return StandInEvent(self.log.record(self.name))

    def wait_event(self, event: StandInEvent) -> None:
        """Have the next work wait for an event."""
        self.log.wait(self.name, event.clock)

    def wait_stream(self, stream: "StandInStream") -> None:
        """Have the next work wait for another stream's work so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Have the host wait for the work so far."""
        self.log.synchronize(self.name)


class StandInRuntime:
    """Stands for `torch.cuda`; counts the memory of its devices, which differ in their index.

    Attributes:
        log: What ran on which stream, and its `races`.
    """

    def __init__(self) -> None:
        self.log = HappensBefore()
        self._thread = threading.local()
        self._names: dict[torch.device, list[str]] = {}
        self._defaults: dict[torch.device, StandInStream] = {}
        self._storages: dict[int, tuple[torch.device, int, weakref.ref[UntypedStorage]]] = {}
        self._live, self._peak = Counter[torch.device](), Counter[torch.device]()
        self._locked: dict[int, int] = {}
        self._pinned: set[int] = set()
        self._generators: dict[torch.device, Tensor] = {}
        self._seed = torch.initial_seed()

    # Streams

    def Stream(self, device: torch.device) -> StandInStream:
        """A new side stream."""
        names = self._names.setdefault(device, [str(device)])
        names.append(f"{device}, side stream {len(names)}")
        return StandInStream(device, names[-1], self.log)

    def default_stream(self, device: torch.device) -> StandInStream:
        """The stream on which a device's work runs if nobody says otherwise."""
        if device not in self._defaults:
            self._defaults[device] = StandInStream(device, str(device), self.log)
        return self._defaults[device]

    def current_stream(self, device: torch.device) -> StandInStream:
        """The stream on which this thread's work for a device runs."""
        return self._current.get(device) or self.default_stream(device)

    @contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        """Work of this thread for the stream's device runs on the stream, and the device is the
        current one."""
        before = self.current_stream(stream.device)
        self._current[stream.device] = stream
        try:
            with self.device(stream.device):
                yield
        finally:
            self._current[stream.device] = before

    def current_device(self) -> int:
        """The index of the device on which this thread launches what names no device; the first one
        at first."""
        return int(getattr(self._thread, "device", 1))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """A device is the current one."""
        before = self.current_device()
        self._thread.device = device.index
        try:
            yield
        finally:
            self._thread.device = before

    def synchronize(self, device: torch.device) -> None:
        """Have the host wait for all streams of a device."""
        self.log.synchronize(*self._names.get(device, [str(device)]))

    @property
    def _current(self) -> dict[torch.device, StandInStream]:
        streams: dict[torch.device, StandInStream] = self._thread.__dict__.setdefault("streams", {})
        return streams

    # Page-locked memory

    def cudart(self) -> Self:
        """The functions that lock pages."""
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Lock the pages of some memory; an error if one of them is locked already."""
        assert flags == 1, "portable: every device may copy it"
        pages = _pages(address, num_bytes)
        for other in self._locked.items():
            locked = _pages(*other)
            if pages.start < locked.stop and locked.start < pages.stop:
                return _ALREADY_LOCKED
        self._locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Unlock memory: no copy may still be running."""
        num_bytes = self._locked.pop(address)
        for key, (_, _, reference) in self._storages.items():
            storage = reference()
            if storage is not None and storage.data_ptr() <= address < storage.data_ptr() + max(
                storage.nbytes(), 1
            ):
                self.log.launch(HOST_THREAD, f"the unlocking of {num_bytes} bytes", writes=[key])
        return 0

    def pinned(self, tensor: Tensor) -> Tensor:
        """A copy in page-locked memory, as `Tensor.pin_memory` makes it: its memory is freed only
        after all copies from it."""
        copy = tensor.clone()
        self._pinned.add(self.follow(copy, HOST_THREAD))
        return copy

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether a host tensor's bytes are all page-locked."""
        if tensor.untyped_storage()._cdata in self._pinned:
            return True
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(
            start <= first and last <= start + num_bytes
            for start, num_bytes in self._locked.items()
        )

    # Generators

    def get_rng_state(self, device: torch.device) -> Tensor:
        """The state of a device's random generator."""
        if device not in self._generators:
            self._generators[device] = torch.Generator().manual_seed(self._seed).get_state()
        return self._generators[device]

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        """Put a state back."""
        self._generators[device] = state

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices, as `torch.manual_seed` does."""
        self._seed = seed
        self._generators.clear()

    @contextmanager
    def sampling_on(self, device: torch.device) -> Iterator[None]:
        """Random numbers come from a device's generator instead of the host's."""
        host = torch.get_rng_state()
        torch.set_rng_state(self.get_rng_state(device))
        try:
            yield
        finally:
            self._generators[device] = torch.get_rng_state()
            torch.set_rng_state(host)

    # Memory

    def memory_allocated(self, device: torch.device) -> int:
        """Bytes of a device's tensors."""
        return self._live[device]

    def max_memory_allocated(self, device: torch.device) -> int:
        """The most bytes of a device's tensors since `reset_peak_memory_stats`."""
        return self._peak[device]

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Measure the peak from now on."""
        self._peak[device] = self._live[device]

    def follow(self, tensor: Tensor, stream: str) -> int:
        """The number of a tensor's memory. Unless it is known, it was allocated on a stream, and
        its release is noticed."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key not in self._storages:
            self._storages[key] = (
                tensor.device,
                0,
                weakref.ref(storage, lambda _: self._forget(key)),
            )
            self.resized(key, storage.nbytes(), stream)
        return key

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is known."""
        return tensor.untyped_storage()._cdata in self._storages

    def is_copied(self, tensor: Tensor) -> bool:
        """Whether a device has copied from or to a host tensor's memory."""
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        return storage is not None and storage[0].index is None

    def resized(self, key: int, num_bytes: int, stream: str = "") -> None:
        """Note the size of memory that is emptied or filled again in place."""
        if key not in self._storages:
            return
        device, before, reference = self._storages[key]
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        if before:
            self.log.free(key)
        if size:
            self.log.allocate(key, stream or self.current_stream(device).name)
        self._storages[key] = device, size, reference
        self._live[device] += size - before
        self._peak[device] = max(self._peak[device], self._live[device])

    def _forget(self, key: int) -> None:
        if key in self._pinned:
            self._pinned.discard(key)
        else:
            self.resized(key, 0)
        del self._storages[key]


def _pages(address: int, num_bytes: int) -> range:
    """The pages of some memory."""
    return range(address // mmap.PAGESIZE, (address + max(num_bytes, 1) - 1) // mmap.PAGESIZE + 1)
