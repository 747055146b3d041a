"""Memory of the host that devices copy from and to, page-locked where they are GPUs: tensors that pass through a device, and buffers for copies.

`Streamed` is a group of tensors with one buffer on the host and, from time to time, one on their device: weights of a block, or what the
optimizer keeps of them. `HostBuffers` is a pool of buffers that are used again: activations of one forward after the other.
Without page-locking a GPU's copies would not overlap with its work.
"""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ditkit_core.io.console import warn

HOST = torch.device("cpu")
_ALIGNMENT = 256
"""Bytes; what CUDA's kernels may expect of a weight's address is at most that."""

Found = tuple[MutableMapping[str, Any], str]
"""Where a tensor is entered: a module's `_parameters` or `_buffers` or an optimizer's state of a parameter, and the key."""


@dataclass(frozen=True, eq=False, repr=False)  # torch crashes where it is to show an emptied tensor
class PinnedSlot:
    """A tensor's place, and its two values."""

    entries: MutableMapping[str, Any]
    leaf: str
    device: Tensor
    """A view into the device's buffer; empty most of the time."""
    host: Tensor

    @property
    def is_trained(self) -> bool:
        """Whether it is a trained weight."""
        return self.device.requires_grad


class Streamed:
    """Tensors that pass through a device together.

    Attributes:
        slots: Their places, one for each entry that was found.
        host, buffer: The buffers, uint8, on the host and on the device.
        num_bytes: Size of either.
    """

    def __init__(self, found: Sequence[Found], device: torch.device, *, returns: bool = False):
        """Take the tensors over, and enter views into the device's buffer, which is empty, in their places.

        Args:
            found: Where they are entered; several entries of one tensor stay one.
            device: Where they are used.
            returns: Whether `store` brings back all, not the trained weights alone.
        """
        originals = {id(tensor := entries[leaf]): tensor for entries, leaf in found}
        # what is brought back comes first, in one piece
        ordered = sorted(originals, key=lambda key: not originals[key].requires_grad)
        offsets, end, self._num_returned = {}, 0, 0
        for key in ordered:
            offsets[key], end = end, end + math.ceil(originals[key].nbytes / _ALIGNMENT) * _ALIGNMENT
            if returns or originals[key].requires_grad:
                self._num_returned = end
        self.num_bytes = end
        self.host = torch.empty(end, dtype=torch.uint8, device=HOST)
        self.buffer = torch.empty(end, dtype=torch.uint8, device=device)
        # Shares the memory but not the version: what autograd saved of a weight does not see it filled again.
        self._filled = self.buffer.data
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for key, tensor in originals.items():
            there, here = (_part(buffer, offsets[key], tensor) for buffer in (self.buffer, self.host))
            here.copy_(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                # with versions of their own, too: the update of one weight is no change of the others
                there, here = (nn.Parameter(part.data, requires_grad=tensor.requires_grad) for part in (there, here))
            pairs[key] = there, here
        self.slots = [PinnedSlot(entries, leaf, *pairs[id(entries[leaf])]) for entries, leaf in found]
        for slot in self.slots:
            slot.entries[slot.leaf] = slot.device
        self.empty()

    def trained(self) -> Iterator[PinnedSlot]:
        """The slots of trained weights."""
        return (slot for slot in self.slots if slot.is_trained)

    def fetch(self) -> None:
        """Fill the device's buffer."""
        self.buffer.untyped_storage().resize_(self.num_bytes)
        self._filled.copy_(self.host, non_blocking=True)

    def store(self) -> None:
        """Copy what may have changed on the device back to the host."""
        for slot in self.slots:
            assert slot.entries[slot.leaf] is slot.device, f"{slot.leaf} was replaced instead of changed in place"
        if self._num_returned:
            self.host[: self._num_returned].copy_(self._filled[: self._num_returned], non_blocking=True)

    def empty(self) -> None:
        """Free the device's memory."""
        # In place: another tensor for each weight would leave alive what autograd saved of these.
        self.buffer.untyped_storage().resize_(0)

    def put(self, *, on_host: bool) -> None:
        """Enter the host's values in the tensors' places, or the device's."""
        for slot in self.slots:
            slot.entries[slot.leaf] = slot.host if on_host else slot.device


def _part(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """A part of a buffer, as a tensor like another."""
    flat, expected = buffer[offset : offset + like.nbytes].view(like.dtype), 1
    for stride, size in sorted(zip(like.stride(), like.shape, strict=True)):
        if size > 1 and stride != expected:  # holes: laid out in order instead
            return flat.view(like.shape)
        expected *= size
    return flat.as_strided(like.shape, like.stride())  # a transposed matrix stays one: 8-bit kernels ask for it


def page_lock(tensor: Tensor, device: torch.device, locked: MutableMapping[int, torch.device]) -> bool:
    """Page-lock a host tensor where it is. `pin_memory` would round a block up to a power of two.

    Args:
        tensor: The tensor.
        device: The GPU that copies it.
        locked: Takes its address and the device, for `unlock`.

    Returns:
        Whether the system allowed it.
    """
    if not tensor.nbytes:
        return True
    succeeded = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1)) == 0
    if succeeded:
        locked[tensor.data_ptr()] = device
    else:
        # CUDA keeps the error for whoever asks next, and torch asks after each kernel: let it be one that nobody needs
        with suppress(RuntimeError):
            torch.ones((), device=device)
    return succeeded


def unlock(locked: Mapping[int, torch.device]) -> None:
    """Undo `page_lock`, once the devices have done what they were told to do with the memory."""
    for device in set(locked.values()):
        torch.cuda.synchronize(device)
    for address in locked:
        torch.cuda.cudart().cudaHostUnregister(address)


class PinnedPool:
    """Page-locked memory of the host.

    Attributes:
        all_locked: Whether the system allowed it every time.
    """

    def __init__(self, owner: object):
        """Hold nothing yet.

        Args:
            owner: While it is there so are its tensors; what is locked then, is unlocked with it.
        """
        self.all_locked = True
        self._locked: dict[int, torch.device] = {}
        weakref.finalize(owner, unlock, self._locked).atexit = False

    def lock(self, tensor: Tensor, device: torch.device) -> None:
        """Page-lock a tensor that a device copies, if the system allows it."""
        self.all_locked &= page_lock(tensor, device, self._locked)

    def unlock(self, tensors: Sequence[Tensor]) -> None:
        """Undo it, before the tensors' memory is given back: their devices are waited for once."""
        gone = [address for tensor in tensors if (address := tensor.data_ptr()) in self._locked]
        unlock({address: self._locked.pop(address) for address in gone})


class HostBuffers:
    """A pool of buffers, which has never more bytes than were in use at once.

    All copies of one pool have to be on one stream: a buffer is handed out again while the last copy from it may still be under way.

    Attributes:
        num_bytes: Bytes of all buffers, in use or not.
    """

    def __init__(self, device: torch.device):
        """Hold nothing yet.

        Args:
            device: What copies. For a GPU buffers are page-locked, without which its copies would not overlap with its work.
        """
        self.num_bytes = 0
        self._device = device
        self._used = self._most = 0
        self._free: dict[int, list[Tensor]] = {}
        # Given back by whatever thread frees a graph, in the middle of anything: a deque needs no lock.
        self._returned: deque[Tensor] = deque()
        self._pages = PinnedPool(self)

    def take(self, num_bytes: int) -> Tensor:
        """A buffer, uint8, of at least so many bytes: the smallest that is free, or a new one in place of others."""
        while self._returned:
            buffer = self._returned.popleft()
            self._used -= buffer.nbytes
            self._free.setdefault(buffer.nbytes, []).append(buffer)
        size = min((size for size, free in self._free.items() if free and size >= num_bytes), default=None)
        buffer = self._made(num_bytes) if size is None else self._free[size].pop()
        self._used += buffer.nbytes
        self._most = max(self._most, self._used)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, from any thread."""
        self._returned.append(buffer)

    def _made(self, num_bytes: int) -> Tensor:
        if self._device.type != "cuda":
            self._make_room(num_bytes)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=HOST)
        else:  # whole pages of its own: none can be locked twice
            size = math.ceil(num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
            self._make_room(size)
            around = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, device=HOST)
            start = -around.data_ptr() % mmap.PAGESIZE
            buffer = around[start : start + size]
            before = self._pages.all_locked
            self._pages.lock(buffer, self._device)
            if before and not self._pages.all_locked:
                warn(f"what is offloaded from {self._device} could not be page-locked: its copies will be waited for")
        self.num_bytes += buffer.nbytes
        return buffer

    def _make_room(self, num_bytes: int) -> None:
        """Free buffers, the largest first, until one more makes no more than were in use at once."""
        most, gone = max(self._most, self._used + num_bytes), list[Tensor]()
        while self.num_bytes + num_bytes > most:
            gone.append(self._free[max(size for size, free in self._free.items() if free)].pop())
            self.num_bytes -= gone[-1].nbytes
        self._pages.unlock(gone)
