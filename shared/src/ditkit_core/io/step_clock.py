"""What every device does during a step, in seconds: marks in the order of its work, each with the
name of what follows it.

On a GPU a mark is an event in the stream of its work, so that times are the device's own and
nothing waits for them. A device without streams is timed by the host's clock.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch

from ditkit_core.io.trackers import TIMES

Part = Literal["forward", "recompute", "backward", "optimizer", "copies", "waiting"]
"""`copies`: inputs and streamed weights that the device waits for; weights of other ranks are
gathered within forward and backward. `waiting`: for data, for another device, for the host."""
PARTS: tuple[Part, ...] = ("forward", "recompute", "backward", "optimizer", "copies", "waiting")

_BETWEEN = "between steps"


class StepClock:
    """The times of the parts of a step on each device.

    A backward runs on a thread for each device, and several of them at once where micro-batches are
    pipelined. So a device is marked by the thread that launches its work and by no other one, which
    could not know what was launched before.

    An optimizer's work on a GPU is not waited for: it runs into the next step, whose times have it.
    """

    def __init__(self, devices: Iterable[torch.device] = (), *, in_graph: bool = False):
        """Time these devices; without any, nothing is timed.

        Args:
            in_graph: Whether the marks are recorded in a CUDA graph: they have the times of its
                last replay.
        """
        self._marks: dict[torch.device, list[tuple[Any, Any]]] = {device: [] for device in devices}
        self._in_graph = in_graph

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that are timed."""
        return tuple(self._marks)

    def mark(self, device: torch.device | None, part: str) -> None:
        """Name what the device does from here on. Devices that are not timed are ignored."""
        marks = None if device is None else self._marks.get(device)
        if device is None or marks is None or (marks and marks[-1][0] == part):
            return
        marks.append((part, _now(device, in_graph=self._in_graph)))

    def replayed(self, device: torch.device, clock: "StepClock") -> None:
        """A replay begins at the last mark, and ends here. Its parts come from a clock whose marks
        are in the graph."""
        if (marks := self._marks.get(device)) is not None:
            marks[-1] = clock, marks[-1][1]
            marks.append(("waiting", _now(device)))

    def mark_all(self, part: str) -> None:
        """Name what all devices do from here on."""
        for device in self._marks:
            self.mark(device, part)

    @contextmanager
    def recompute(self, device: torch.device) -> Iterator[None]:
        """Name a recompute, which a backward continues after."""
        self.mark(device, "recompute")
        try:
            yield
        finally:
            self.mark(device, "backward")

    def begin(self) -> None:
        """A step begins. What the optimizer of the step before still does on a GPU counts towards
        this one."""
        for device, marks in self._marks.items():
            tail = [index for index, (part, _) in enumerate(marks) if part == "optimizer"]
            tail_marks = marks[tail[-1] : tail[-1] + 2] if tail and device.type == "cuda" else []
            marks[:] = (
                []
                if not tail_marks
                else [tail_marks[0], (_BETWEEN, (tail_marks[1:] or [("", _now(device))])[0][1])]
            )
        self.mark_all("waiting")

    def end(self) -> None:
        """The step's work was launched."""
        self.mark_all(_BETWEEN)

    def read(self) -> dict[torch.device, Mapping[Part, float]]:
        """Seconds of each part on each device since `begin`, zeros included. The host waits for
        what a GPU did before its optimizer."""
        seconds_by_device: dict[torch.device, Mapping[Part, float]] = {}
        for device, marks in self._marks.items():
            done = marks
            if device.type == "cuda":  # the last optimizer's work is read with the next step's
                last = max(
                    (index for index, (part, _) in enumerate(marks) if part == "optimizer"),
                    default=len(marks) - 1,
                )
                done = marks[: last + 1]
                for _, event in done[-1:]:
                    # where the backward updates weights, nobody has waited for the last update
                    event.synchronize()
            seconds = dict.fromkeys(PARTS, 0.0)
            for (part, begin), (_, end) in pairwise(done):
                # Several replays of a graph have the times of the last: their shares count.
                for name, share in (
                    part._shares(device) if isinstance(part, StepClock) else {part: 1.0}
                ).items():
                    if name in seconds:
                        seconds[name] += share * _between(begin, end)
            seconds_by_device[device] = seconds
        return seconds_by_device

    def _shares(self, device: torch.device) -> dict[Any, float]:
        """The share of each part in the time between the first and the last mark."""
        seconds: dict[Any, float] = {}
        for (part, begin), (_, end) in pairwise(self._marks[device]):
            seconds[part] = seconds.get(part, 0.0) + _between(begin, end)
        total = sum(seconds.values())
        return (
            {part: part_seconds / total for part, part_seconds in seconds.items()}
            if total > 0
            else {}
        )

    def numbers(self) -> dict[str, float]:
        """The times of `read` as metrics: `seconds/forward`, with several devices
        `seconds/cuda:1/forward`."""
        times = self.read()
        return {
            f"{TIMES}{device}/{part}" if len(times) > 1 else f"{TIMES}{part}": seconds
            for device, parts in times.items()
            for part, seconds in parts.items()
        }


def _now(device: torch.device, *, in_graph: bool = False) -> Any:
    """The time, or on a GPU an event; with `in_graph` it is a node of the graph that is being
    recorded."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=in_graph)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
