"""A device's copies to and from the host: a side stream that overlaps with the work on the device's own stream."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CopyLane:
    """A side stream, and how it and the device's own stream wait for each other. Where a device has no streams, copies run at once.

    A device's forwards and its backward never run at the same time, and each is in one thread: a lane needs no lock.

    Attributes:
        device: The device.
    """

    def __init__(self, device: torch.device):
        """Create the side stream of a device."""
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_called_back = False

    @property
    def overlaps(self) -> bool:
        """Whether copies run at the same time as the device's work, so that somebody has to wait for them."""
        return self._stream is not None

    def copies(self) -> AbstractContextManager[Any]:
        """Context in which copies run on the side stream. Memory allocated in it belongs to that stream alone."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """Have the next copies wait for the work that was launched on the device so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def record(self) -> torch.cuda.Event | None:
        """The event after the copies so far; None where a device has no streams and they are done."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Have the work that is launched next on the device wait for copies. The host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """Wait on the host for all copies, so that it can read their results."""
        if self._stream is not None:
            self._stream.synchronize()

    def after_backward(self, callback: Callable[[], None]) -> None:
        """Have autograd call back once when the running backward is over, however often this method is called."""
        if not self._is_called_back:
            self._is_called_back = True
            # Private, but what FSDP2 uses for the same purpose: torch has no public end of a backward.
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def restart(self) -> None:
        """Accept a new callback: the backward is over, or a forward begins. (A backward that failed never calls back.)"""
        self._is_called_back = False
