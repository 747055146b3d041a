"""How long an optimizer step takes on a divided model, and how much of it each device works: with pipelined micro-batches and without.

Devices take what they are given in order, as streams do, and the host gives it faster than they work it off. A copy from one device to
another is at its turn on both: torch has each wait for what the other was given before. So the end of every piece of work follows
from the order in which the host gives it, and that is all there is to simulate.

- *Accumulated*: forward and backward of a micro-batch, then those of the next. Its forward begins on the device where the backward
  before it ends, so that nothing overlaps.
- *Pipelined*: the forwards of all micro-batches, then one backward. Autograd has a queue for each device and takes from it what was made
  last: the last micro-batch goes backwards first, on every device, and the one before it follows one device behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """What one device's part of the model takes for one micro-batch."""

    forward: float
    backward: float
    """Recompute included."""
    send: float = 0.0
    """The carry to the next device; of the last, nothing."""
    send_back: float = 0.0
    """The next device's gradients to this one."""


@dataclass(frozen=True)
class Schedule:
    """A step as it runs on the devices."""

    seconds: float
    """From the first launch to the end of the last backward."""
    busy: tuple[float, ...]
    """Seconds that each device computes; copies and waits are no work."""

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the step that each device computes, in [0, 1]."""
        return tuple(busy / self.seconds for busy in self.busy)


@dataclass(frozen=True)
class Comparison:
    """A step in both orders."""

    accumulated: Schedule
    pipelined: Schedule
    source: Literal["measured", "estimated"]
    """Where the stages' times are from."""

    @property
    def gain(self) -> float:
        """How many times as fast pipelining makes the step; 1 for no gain."""
        return self.accumulated.seconds / self.pipelined.seconds

    def __str__(self) -> str:
        """One line."""
        shares = (" and ".join(f"{share:.0%}" for share in s.utilisation) for s in (self.accumulated, self.pipelined))
        without, with_ = shares
        return (
            f"devices compute {without} of a step, with train.pipelined {with_}, {self.gain:.2f} times as fast "
            f"(from {self.source} times)"
        )


def utilisation(
    stages: Sequence[StageSeconds], num_micro_batches: int, *, source: Literal["measured", "estimated"]
) -> Comparison:
    """Compare a step with pipelined micro-batches and without.

    Args:
        stages: The devices' parts in order; the first has the embedding, the last the head.
        num_micro_batches: In an optimizer step, those of prior preservation included.
        source: Whether the times were measured on the devices or estimated.
    """
    assert stages and num_micro_batches >= 1
    return Comparison(accumulated(stages, num_micro_batches), pipelined(stages, num_micro_batches), source)


def accumulated(stages: Sequence[StageSeconds], num_micro_batches: int) -> Schedule:
    """Each micro-batch forward and backward, one after the other."""
    step = _Step(stages)
    for _ in range(num_micro_batches):
        step.forward()
        step.backward()
    return step.done()


def pipelined(stages: Sequence[StageSeconds], num_micro_batches: int) -> Schedule:
    """All micro-batches forward, then all backward, the last one first."""
    step = _Step(stages)
    for _ in range(num_micro_batches):
        step.forward()
    for _ in range(num_micro_batches):
        step.backward()
    return step.done()


class _Step:
    """Devices, each with the time at which it has worked off all that it was given."""

    def __init__(self, stages: Sequence[StageSeconds]) -> None:
        self._stages, self._free = stages, [0.0] * len(stages)
        self._busy = [0.0] * len(stages)

    def forward(self) -> None:
        """Give a micro-batch's forward."""
        for device, stage in enumerate(self._stages):
            self._compute(device, stage.forward)
            if device + 1 < len(self._stages):
                self._copy(device, device + 1, stage.send)

    def backward(self) -> None:
        """Give a micro-batch's backward.

        The queues run their devices side by side, but give each the same as if one after the other did: the micro-batches come down
        the devices in one order, and none overtakes another.
        """
        for device in reversed(range(len(self._stages))):
            self._compute(device, self._stages[device].backward)
            if device > 0:
                self._copy(device, device - 1, self._stages[device - 1].send_back)

    def done(self) -> Schedule:
        """The step when everything is worked off."""
        return Schedule(max(self._free), tuple(self._busy))

    def _compute(self, device: int, seconds: float) -> None:
        self._free[device] += seconds
        self._busy[device] += seconds

    def _copy(self, source: int, target: int, seconds: float) -> None:
        self._free[source] = self._free[target] = max(self._free[source], self._free[target]) + seconds
