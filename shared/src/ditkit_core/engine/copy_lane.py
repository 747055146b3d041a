"""One device's lane of copies between it and the host: a side stream whose work overlaps with that of the device's own stream."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CopyLane:
    """A side stream, and how it and the device's own stream wait for each other; where a device has no streams, copies are made at once.

    A device's forwards and its backward never run at the same time, and each is in one thread: a lane needs no lock.
    """

    def __init__(self, device: torch.device):
        """Open the lane of a device."""
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_called_back = False

    @property
    def overlaps(self) -> bool:
        """Whether copies run next to the device's work, so that somebody has to wait for them."""
        return self._stream is not None

    def copies(self) -> AbstractContextManager[Any]:
        """Inside the block, copies and memory are those of the side stream, which no other allocation shares."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """Copies that come next wait for what the device was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def record(self) -> torch.cuda.Event | None:
        """The event after the copies so far; None where they are made by now."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """What is launched next on the device waits for copies."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """Wait on the host for all copies: what they brought is read there from now on."""
        if self._stream is not None:
            self._stream.synchronize()

    def after_backward(self, callback: Callable[[], None]) -> None:
        """Have autograd call once when the backward that is running is over, however often this is asked for."""
        if not self._is_called_back:
            self._is_called_back = True
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def restart(self) -> None:
        """The backward is over, or a forward begins: the next `after_backward` is of another backward (the last may have failed)."""
        self._is_called_back = False
