"""A step's memory on each device, composed from the costs of its stages. It takes milliseconds, so a search can try thousands."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ditkit_core.planner.stage_costs import Profile, behind

CUBLAS_WORKSPACE = 64 * 2**20
"""PyTorch keeps a workspace for each cuBLAS handle and stream, and a handle for each thread that launches products: the program's and
autograd's. Its sources set 32 MiB each on Hopper GPUs and 8.1 MiB (`:4096:2:16:8`) on older ones, unless CUBLAS_WORKSPACE_CONFIG is set.
A plan uses twice the larger for every GPU; assumed, not measured."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A device to plan for."""

    name: str
    total: int
    """Bytes of its memory."""
    reserve: int = 0
    """Bytes that are left to other programs."""
    workspace: int = CUBLAS_WORKSPACE
    """Bytes that libraries allocate; 0 for a CPU."""

    @property
    def available(self) -> int:
        """Bytes that a run can use."""
        return self.total - self.reserve


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which device runs which block; the embedding is on device 0, the head on the last."""

    devices: tuple[int, ...]
    """Index of the device of each block, in execution order."""
    streamed: frozenset[int] = frozenset()
    """Blocks whose weights stay on the host."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first block of each device, then the number of blocks."""
        split_points = (i for i in range(1, len(self.devices)) if self.devices[i] != self.devices[i - 1])
        return 0, *split_points, len(self.devices)

    @property
    def blocks(self) -> tuple[range, ...]:
        """The blocks of each device."""
        return tuple(range(start, end) for start, end in pairwise(self.bounds))


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The memory of a device at its peak."""

    budget: Budget
    purposes: Mapping[str, int]
    """Bytes by purpose: weights, adapters, gradients, optimizer, average, activations, workspace."""
    crossing: int
    """Bytes of the carry that is sent to this device in each forward; 0 on the first."""
    host: int = 0
    """Bytes of activations that its blocks offload to the host."""

    @property
    def peak(self) -> int:
        """Bytes in total."""
        return sum(self.purposes.values())

    @property
    def free(self) -> int:
        """Bytes that stay available; negative if it does not fit."""
        return self.budget.available - self.peak

    @property
    def fits(self) -> bool:
        """Whether the peak and the reserve fit the device."""
        return self.free >= 0

    @property
    def missing(self) -> int:
        """Missing bytes; 0 if it fits."""
        return max(0, -self.free)


def compose(
    profile: Profile,
    division: Partition,
    budgets: Sequence[Budget],
    *,
    micro_batches: int = 1,
    pipelined: bool = False,
) -> tuple[DevicePlan, ...]:
    """The peak of each device over a whole step.

    Args:
        profile: Costs of the stages.
        division: Device of each block.
        budgets: The devices, as many as the division has.
        micro_batches: Number accumulated in a step; gradients of the first exist while the second runs.
        pipelined: Whether all forwards run before one backward, so that their activations are alive at once.
    """
    assert len(division.bounds) == len(budgets) + 1, (division.bounds, len(budgets))
    return tuple(
        plan_device(
            profile,
            blocks.start,
            blocks.stop,
            budget,
            streamed=division.streamed,
            micro_batches=micro_batches,
            pipelined=pipelined,
        )
        for budget, blocks in zip(budgets, division.blocks, strict=True)
    )


def plan_device(
    profile: Profile,
    start: int,
    end: int,
    budget: Budget,
    *,
    streamed: Collection[int] = (),
    micro_batches: int = 1,
    pipelined: bool = False,
) -> DevicePlan:
    """The peak of one device, which depends on no other.

    Args:
        profile: Costs of the stages.
        start: Its first block; a device with block 0 also has the embedding.
        end: One past its last block; a device with the last block also has the head.
        budget: The device.
        streamed: Blocks whose weights stay on the host.
        micro_batches, pipelined: As for `compose`.
    """
    return DeviceSpan(profile, start, end, streamed).plan(budget, micro_batches=micro_batches, pipelined=pipelined)


class PeakMoment(NamedTuple):
    """Bytes on a device at a stage's peak, in addition to its static memory."""

    activations: int
    gradients: int
    state: int
    """Streamed optimizer state."""


class DeviceSpan:
    """The stages of one device, in a row."""

    def __init__(self, profile: Profile, start: int, end: int, streamed: Collection[int] = ()):
        """Look the stages up.

        Args:
            profile, start, end, streamed: As for `plan_device`.
        """
        last = len(profile.blocks) + 1
        held = range(0 if start == 0 else start + 1, end + 1 + (end == last - 1))
        self.profile, self.held = profile, held
        ends = {0: profile.embed, last: profile.head}
        self.stages = [ends[stage] if stage in ends else profile.blocks[stage - 1] for stage in held]
        if held.start > 1:  # the previous block is on another device, so its offloaded bytes do not leave this one
            self.stages[0] = behind(self.stages[0], profile.blocks[held.start - 2].on_host)
        self.receives = profile.crossing[held.start - 1] if held.start > 0 else 0
        self.receives_back = profile.crossing_back[held.stop - 1] if held.stop <= last else 0
        # Positive on the head's device, negative on the embedding's; they cancel if both are on one device.
        self.targets = profile.targets * ((held.stop > last) - (held.start == 0))
        self.freed = self.stages[-1].freed_at_cut if held.stop <= last else 0
        self.passing = [cost for stage, cost in zip(held, self.stages, strict=True) if stage - 1 in streamed]
        self.resident = [cost for stage, cost in zip(held, self.stages, strict=True) if stage - 1 not in streamed]
        self.last_passing = max((stage - held.start for stage in held if stage - 1 in streamed), default=0)

    def plan(self, budget: Budget, *, micro_batches: int, pipelined: bool) -> DevicePlan:
        """The peak, by purpose."""
        static = self.static()
        # Pipelined, the first backward runs while the activations of all other micro-batches are alive.
        waiting = micro_batches - 1 if pipelined else 0
        moments = self.moments(again=False, waiting=waiting)
        # From the second micro-batch on, gradients of the first are there, so its peaks are others.
        if micro_batches > 1:
            moments += self.moments(again=True, waiting=max(0, waiting - 1))
        all_gradients = sum(cost.gradients for cost in self.stages)
        # An optimizer that works parameter by parameter frees its temporary memory in between.
        whole = sum if self.profile.update_adds_up else max
        # Updates come last: all gradients exist, and no activations.
        moments.append(PeakMoment(whole(cost.update_extra for cost in self.stages), all_gradients, 0))
        highest = max(moments, key=sum)
        held = {
            **static,
            "optimizer": static["optimizer"] + highest.state,
            "gradients": highest.gradients,
            "activations": highest.activations,
        }
        return DevicePlan(
            budget=budget,
            purposes={**held, "workspace": budget.workspace},
            crossing=self.receives,
            host=(1 + waiting) * sum(cost.on_host for cost in self.stages),
        )

    def static(self) -> dict[str, int]:
        """Static memory: bytes by purpose that are in use during the whole step."""
        trains_all = self.profile.trains_all
        on_device = self.resident if trains_all else self.stages
        static = {
            # of streamed blocks two are on the device at a time: one runs, the next arrives
            "weights": sum(cost.weights for cost in self.resident) + _pair([cost.weights for cost in self.passing]),
            "adapters": sum(cost.adapters for cost in on_device),
            "average": sum(cost.average for cost in on_device),
        }
        if trains_all:
            static["adapters"] += _pair([cost.adapters for cost in self.passing])
        return {**static, "optimizer": sum(cost.optimizer for cost in on_device)}

    def moments(self, *, again: bool, waiting: int) -> list[PeakMoment]:
        """The peak of each stage: first the forwards in order, then the backwards in theirs.

        Optimizer state is streamed with trained weights for their backward; that of the last block arrives at the end of the forward.

        Args:
            again: Whether gradients of an earlier micro-batch exist.
            waiting: Micro-batches whose forward has run, and whose backward has not.
        """
        gradients = sum(cost.gradients for cost in self.stages) if again else 0
        kept = self.receives + self.targets + sum(cost.kept for cost in self.stages) - self.freed
        live = waiting * kept + self.receives + self.targets
        states = [cost.optimizer for cost in self.passing] if self.profile.trains_all else []
        moments: list[PeakMoment] = []
        for place, cost in enumerate(self.stages):
            state = states[-1] if states and place >= self.last_passing else 0
            moments.append(PeakMoment(live + cost.forward_extra, gradients, state))
            live += cost.kept
        # Gradients of the next device arrive here, and the carry that was sent to it is freed.
        live += self.receives_back - self.freed
        for place, cost in reversed(list(enumerate(self.stages))):
            extra = cost.backward_extra_again if again else cost.backward_extra
            state = states[-1] if states and place > self.last_passing else _pair(states)
            moments.append(PeakMoment(live + extra, gradients, state))
            live -= cost.released
            # A later micro-batch adds to the gradients of the first in place.
            gradients += 0 if again else cost.gradients
        return moments


def _pair(sizes: Sequence[int]) -> int:
    """The largest sum of two neighbours: one is used while the next is prefetched."""
    return max((sum(sizes[i : i + 2]) for i in range(max(1, len(sizes) - 1))), default=0)


def on_host(profile: Profile, streamed: Collection[int]) -> int:
    """Bytes of streamed blocks on the host: their frozen weights; in a full fine-tune also optimizer state and average."""
    blocks = [profile.blocks[index] for index in streamed]
    kept = sum(block.adapters + block.optimizer + block.average for block in blocks) if profile.trains_all else 0
    return sum(block.weights for block in blocks) + kept


def sent_to_host(profile: Profile, blocks: Collection[int], *, micro_batches: int = 1, pipelined: bool = False) -> int:
    """Bytes of activations that these blocks offload to the host, for all micro-batches that are alive at once."""
    return (micro_batches if pipelined else 1) * sum(profile.blocks[index].on_host for index in blocks)
