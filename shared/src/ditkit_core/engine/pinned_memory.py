"""Host memory that devices copy from and to, page-locked for GPUs: tensors that are streamed
through a device, and buffers for copies.

`Streamed` is a group of tensors with one buffer on the host and, from time to time, one on their
device: weights of a block, or their optimizer state. `HostBuffers` is a pool of reusable buffers,
for the activations of one forward after the other. `CopyLane` is the side stream on which the
copies overlap with the device's work. Without page-locking, a GPU's copies would not overlap with
its work.
"""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.io.console import warn
from ditkit_core.io.runtimes import runtime_of

HOST = torch.device("cpu")
_ALIGNMENT = 256
"""Alignment of each tensor in a buffer, in bytes: the most that CUDA's kernels may expect of a
weight's address."""

Location = tuple[MutableMapping[str, Any], str]
"""An entry that has a tensor: a module's `_parameters` or `_buffers`, or an optimizer's state of a
parameter, and the key in it."""


@dataclass(frozen=True, eq=False, repr=False)  # torch crashes when it prints an emptied tensor
class PinnedSlot:
    """A tensor's entry, and its values on the device and on the host."""

    entries: MutableMapping[str, Any]
    leaf: str
    device: Tensor
    """A view into the device's buffer; empty most of the time."""
    host: Tensor


class Streamed:
    """Tensors that are streamed through a device together.

    Attributes:
        slots: Their entries, one for each that was found.
        host, buffer: The buffers, uint8, of `num_bytes`, on the host and on the device.
    """

    def __init__(
        self, locations: Sequence[Location], device: torch.device, *, returns: bool = False
    ):
        """Take over the tensors, and replace them by views into the device's buffer, which is
        empty.

        Args:
            locations: Their entries; several entries of one tensor stay one tensor.
            returns: Whether `store` copies back all tensors, not only trained weights.
        """
        originals = {id(tensor := entries[leaf]): tensor for entries, leaf in locations}
        # What is copied back comes first, so that one copy brings all of it.
        ordered = sorted(originals, key=lambda key: not originals[key].requires_grad)
        offsets, end, self._num_returned = {}, 0, 0
        for key in ordered:
            offsets[key], end = (
                end,
                end + math.ceil(originals[key].nbytes / _ALIGNMENT) * _ALIGNMENT,
            )
            if returns or originals[key].requires_grad:
                self._num_returned = end
        self.num_bytes = end
        self.host = host_memory(end, device)[:end]
        self.buffer = torch.empty(end, dtype=torch.uint8, device=device)
        # Shares the memory but not the version counter: otherwise autograd would report every saved
        # weight as changed when the buffer is filled again with the same values.
        self._filled = self.buffer.data
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for key, tensor in originals.items():
            there, here = (
                _part(buffer, offsets[key], tensor) for buffer in (self.buffer, self.host)
            )
            here.copy_(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                # `.data` gives each its own version counter: the update of one weight does not
                # count as a change of the others.
                there, here = (
                    nn.Parameter(part.data, requires_grad=tensor.requires_grad)
                    for part in (there, here)
                )
            pairs[key] = there, here
        self.slots = [
            PinnedSlot(entries, leaf, *pairs[id(entries[leaf])]) for entries, leaf in locations
        ]
        for slot in self.slots:
            slot.entries[slot.leaf] = slot.device
        self.empty()

    def trained(self) -> Iterator[PinnedSlot]:
        """The slots of trained weights."""
        return (slot for slot in self.slots if slot.device.requires_grad)

    def make_room(self) -> None:
        """Allocate the device's buffer, for values that are written there."""
        self.buffer.untyped_storage().resize_(self.num_bytes)

    def fetch(self) -> None:
        """Fill the device's buffer."""
        self.make_room()
        self._filled.copy_(self.host, non_blocking=True)

    def store(self) -> None:
        """Copy back to the host what may have changed on the device."""
        # A new tensor in a slot would be updated on the device and never copied back: the training
        # would be lost without a word.
        for slot in self.slots:
            assert slot.entries[slot.leaf] is slot.device, (
                f"{slot.leaf} was replaced instead of changed in place"
            )
        if self._num_returned:
            self.host[: self._num_returned].copy_(
                self._filled[: self._num_returned], non_blocking=True
            )

    def empty(self) -> None:
        """Free the device's memory."""
        # In place: a new tensor for each weight would keep alive those that autograd saved.
        self.buffer.untyped_storage().resize_(0)

    def put(self, *, on_host: bool) -> None:
        """Put the host's tensors into the entries, or the device's."""
        for slot in self.slots:
            slot.entries[slot.leaf] = slot.host if on_host else slot.device


def _part(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """The part of a buffer from an offset on, as a tensor with the dtype, shape and, if possible,
    strides of another."""
    flat, expected = buffer[offset : offset + like.nbytes].view(like.dtype), 1
    for stride, size in sorted(zip(like.stride(), like.shape, strict=True)):
        if size > 1 and stride != expected:  # strides with holes: laid out contiguously instead
            return flat.view(like.shape)
        expected *= size
    # a transposed matrix stays transposed, as 8-bit kernels need it
    return flat.as_strided(like.shape, like.stride())


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Uint8 host memory that a device copies from and to; for a GPU, complete pages that belong to
    this tensor alone.

    CUDA locks whole pages and none twice: a buffer that shared one with its neighbour could not be
    locked.
    """
    if runtime_of(device) is None:
        return torch.empty(num_bytes, dtype=torch.uint8, device=HOST)
    size = math.ceil(num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
    around = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, device=HOST)
    start = -around.data_ptr() % mmap.PAGESIZE
    return around[start : start + size]


def page_lock(
    tensor: Tensor, device: torch.device, locked: MutableMapping[int, torch.device]
) -> bool:
    """Page-lock a host tensor in place, and note its address and device in `locked`; returns
    whether the system allowed it.

    `pin_memory` would round its size up to a power of two.
    """
    if not tensor.nbytes:
        return True
    succeeded = (
        int(runtime_of(device).cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1)) == 0
    )
    if succeeded:
        locked[tensor.data_ptr()] = device
    else:
        # CUDA keeps the error for the next caller that asks, and torch asks after each kernel: this
        # kernel takes the error.
        with suppress(RuntimeError):
            torch.ones((), device=device)
    return succeeded


def unlock(locked: Mapping[int, torch.device]) -> None:
    """Undo `page_lock`, once the devices have finished all work on the memory."""
    for device in set(locked.values()):
        runtime_of(device).synchronize(device)
    for address, device in locked.items():
        runtime_of(device).cudart().cudaHostUnregister(address)


class PinnedPool:
    """Page-locked host memory.

    Attributes:
        all_locked: Whether the system allowed every lock.
    """

    def __init__(self, owner: object):
        """Start without locked memory. Whatever is still locked when the owner of the tensors is
        freed, is unlocked then."""
        # `atexit = False`: at the end of the process CUDA may be gone, and the system frees the
        # memory anyway.
        self.all_locked = True
        self._locked: dict[int, torch.device] = {}
        weakref.finalize(owner, unlock, self._locked).atexit = False

    def lock(self, tensor: Tensor, device: torch.device) -> None:
        """Page-lock a tensor that a device copies, if the system allows it."""
        self.all_locked &= page_lock(tensor, device, self._locked)

    def unlock(self, tensors: Sequence[Tensor]) -> None:
        """Unlock tensors before their memory is freed. Their devices are waited for once."""
        gone = [address for tensor in tensors if (address := tensor.data_ptr()) in self._locked]
        unlock({address: self._locked.pop(address) for address in gone})


class HostBuffers:
    """A pool of buffers that never has more bytes than were in use at once.

    All copies of one pool must be on one stream: a buffer is handed out again while the last copy
    from it may still be running.

    Attributes:
        num_bytes: Bytes of all buffers, in use or not.
    """

    def __init__(self, device: torch.device):
        """Start without buffers. For a GPU they are page-locked, so that copies overlap with its
        work."""
        self.num_bytes = 0
        self._device = device
        self._used = self._most = 0
        self._free: dict[int, list[Tensor]] = {}
        # Any thread that frees a graph gives buffers back, at any moment. Appending to a deque is
        # atomic and needs no lock.
        self._returned: deque[Tensor] = deque()
        self._pages = PinnedPool(self)

    def take(self, num_bytes: int) -> Tensor:
        """A uint8 buffer of at least so many bytes: the smallest free one, or a new one in place of
        others."""
        while self._returned:
            buffer = self._returned.popleft()
            self._used -= buffer.nbytes
            self._free.setdefault(buffer.nbytes, []).append(buffer)
        size = min(
            (size for size, free in self._free.items() if free and size >= num_bytes), default=None
        )
        buffer = self._allocate(num_bytes) if size is None else self._free[size].pop()
        self._used += buffer.nbytes
        self._most = max(self._most, self._used)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool, from any thread."""
        self._returned.append(buffer)

    def _allocate(self, num_bytes: int) -> Tensor:
        is_locked = runtime_of(self._device) is not None
        num_pages = math.ceil(num_bytes / mmap.PAGESIZE)
        self._make_room(num_pages * mmap.PAGESIZE if is_locked else num_bytes)
        buffer = host_memory(num_bytes, self._device)
        if is_locked:
            # Only the first failure is reported: later ones have the same cause.
            before = self._pages.all_locked
            self._pages.lock(buffer, self._device)
            if before and not self._pages.all_locked:
                warn(
                    f"host memory for {self._device} could not be page-locked: {self._device} will "
                    f"wait for its copies"
                )
        self.num_bytes += buffer.nbytes
        return buffer

    def _make_room(self, num_bytes: int) -> None:
        """Free buffers, the largest first, until a new one keeps the pool within the most bytes
        that were in use at once."""
        most = max(self._most, self._used + num_bytes)
        freed: list[Tensor] = []
        while self.num_bytes + num_bytes > most:
            largest = max(size for size, free in self._free.items() if free)
            buffer = self._free[largest].pop()
            self.num_bytes -= buffer.nbytes
            freed.append(buffer)
        self._pages.unlock(freed)


class CopyLane:
    """A side stream, and how it and the device's own stream wait for each other. Where a device has
    no streams, copies run at once.

    A device's forwards and its backward never run at the same time, and each is in one thread: a
    lane needs no lock.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._runtime = runtime_of(device)
        self._stream = None if self._runtime is None else self._runtime.Stream(device)
        self._is_called_back = False

    @property
    def overlaps(self) -> bool:
        """Whether copies run at the same time as the device's work, so that somebody has to wait
        for them."""
        return self._stream is not None

    def copies(self) -> AbstractContextManager[Any]:
        """Context in which copies run on the side stream. Memory allocated in it belongs to that
        stream alone."""
        return nullcontext() if self._stream is None else self._runtime.stream(self._stream)

    def follow(self) -> None:
        """Have the next copies wait for the work that was launched on the device so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._runtime.current_stream(self.device))

    def record(self) -> torch.cuda.Event | None:
        """The event after the copies so far; None where a device has no streams and they are
        done."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Have the work that is launched next on the device wait for copies. The host does not
        wait."""
        if event is not None:
            self._runtime.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """Wait on the host for all copies, so that it can read their results."""
        if self._stream is not None:
            self._stream.synchronize()

    def after_backward(self, callback: Callable[[], None]) -> None:
        """Have autograd call back once when the running backward is over, however often this method
        is called."""
        if not self._is_called_back:
            self._is_called_back = True
            # Private, but what FSDP2 uses for the same purpose: torch has no public end of a
            # backward.
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def restart(self) -> None:
        """Accept a new callback: the backward is over, or a forward begins. (A backward that failed
        never calls back.)"""
        self._is_called_back = False
