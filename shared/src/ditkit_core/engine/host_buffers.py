"""Host memory that one device copies to and from, page-locked once and used again."""

import math
import mmap
from collections import deque

import torch
from torch import Tensor

from ditkit_core.engine.swap_buffers import HOST, Pages
from ditkit_core.io.console import warn


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
        self._pages = Pages(self)

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
