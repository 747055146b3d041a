"""A step's memory on each device, composed from the costs of its stages. It takes milliseconds, so
a search can try thousands."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ditkit_core.engine.placement import Placement
from ditkit_core.planner.kernel_time import Rates, is_launched_slowly
from ditkit_core.planner.memory_tracker import KernelCounts, flops_in
from ditkit_core.planner.workload import PLAIN, Round, Workload

CUBLAS_WORKSPACE = 64 * 2**20
"""PyTorch keeps a workspace for each cuBLAS handle and stream, and a handle for each thread that
launches products: the program's and autograd's. Its sources set 32 MiB each on Hopper GPUs and 8.1
MiB (`:4096:2:16:8`) on older ones, unless CUBLAS_WORKSPACE_CONFIG is set. A plan uses twice the
larger for every GPU; assumed, not measured."""


class ParameterRows(NamedTuple):
    """The rows of one parameter, which ranks can divide among themselves."""

    number: int
    bytes_each: int
    is_trained: bool


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Bytes (and arithmetic) of one stage for one micro-batch: the embedding, a block, or the head
    with the loss."""

    weights: int = 0
    """Frozen base, with scales of quantization."""
    adapters: int = 0
    """Trained parameters; in a full fine-tune, all parameters."""
    gradients: int = 0
    optimizer: int = 0
    """The optimizer's state, and sums of gradients over micro-batches where it applies those."""
    sums: int = 0
    """Those sums alone."""
    average: int = 0
    update_extra: int = 0
    """Peak of clipping and the optimizer's step above the memory before them, as if the stage were
    the whole model."""
    kept: int = 0
    """Bytes that its forward keeps for the backward, with the carry for the next stage."""
    released: int = 0
    """Bytes of activations that its backward frees, not reduced by the gradients that it
    creates."""
    freed_at_cut: int = 0
    """Bytes of `kept` that are freed at once if the next stage is on another device: its output,
    unless it saved it for its backward."""
    on_host: int = 0
    """Bytes that its forward offloads to the host until its backward has fetched them."""
    forward_extra: int = 0
    """Peak of its forward, above the memory at its start."""
    backward_extra: int = 0
    """Peak of its backward, recompute included, above the memory at its start."""
    backward_extra_again: int = 0
    """The same if gradients of an earlier micro-batch exist, and are added to."""
    kernels_forward: KernelCounts = frozenset()
    """What its forward runs; the head's has the loss too."""
    kernels_backward: KernelCounts = frozenset()
    """The same for its backward, recompute included."""
    update_launches: int = 0
    """Operations of the optimizer's step; 0 where it is in the backward."""
    sent_forward: int = 0
    """Bytes of tokens that its forward sends to ranks with which it shares samples."""
    sent_backward: int = 0
    """The same for its backward, recompute included."""
    rows: tuple["ParameterRows", ...] = ()
    """Its parameters; empty if unknown."""
    gathered: int = 0
    """Of ranks that divide the weights: bytes of the whole ones, which a rank has while the stage
    runs."""
    reduced: int = 0
    """Of ranks that divide the weights: bytes of the whole gradients while they are added up over
    ranks."""
    whole_gradients: int = 0
    """The same before that: in the dtype of gradients, of all ranks' rows."""

    @property
    def flops_forward(self) -> int:
        """Floating-point operations of matmuls and attention in its forward."""
        return flops_in(self.kernels_forward)

    @property
    def flops_backward(self) -> int:
        """The same for its backward, recompute included."""
        return flops_in(self.kernels_backward)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The stages of a model in execution order."""

    embed: StageCost
    """The inputs of the micro-batch on the device included."""
    blocks: tuple[StageCost, ...]
    """One for each of the model's blocks; the same object where blocks are of one kind."""
    head: StageCost
    """The loss included; its kept bytes are the first gradient."""
    crossing: tuple[int, ...]
    """Bytes of the carry that enters each block, then the head: a split there sends them, and the
    next device allocates them."""
    crossing_back: tuple[int, ...]
    """Bytes of gradients that a split there sends back."""
    inputs: int = 0
    """Bytes of what a micro-batch reads: its items, noise and targets. Each kind of micro-batch
    that is replayed has them once more."""
    targets: int = 0
    """Bytes of the loss's targets: included in the embedding's figures, and on the head's device
    from before the forward."""
    trains_all: bool = False
    """Whether all parameters are trained: the host then also has the optimizer state and average of
    streamed blocks."""
    update_adds_up: bool = False
    """Whether the optimizer works on all parameters of a device at once, so that its temporary
    memory adds up over stages; else only the largest stage counts."""
    updates_in_backward: bool = False
    """Whether `kernels_backward` has the optimizer's step too: of several micro-batches the last
    one's backward alone has it."""
    attention: tuple[str, ...] = ()
    """Names of the attention calls in blocks."""

    @property
    def stages(self) -> tuple[StageCost, ...]:
        """Embedding, blocks, head."""
        return (self.embed, *self.blocks, self.head)


def mixed(of_blocks: Sequence[Profile]) -> Profile:
    """The profile of a model whose blocks run under different policies, from the profile of the
    whole model under the policy of each block.

    A stage's memory hardly depends on the policies of other blocks. Four things do, and are
    corrected here. A block without parameters runs without a policy, and frees its inputs unless
    the block before it keeps its results: it is taken under the policy of that block. If a block
    does not save its output (`freed_at_cut`), the backward of the next block frees it. Offloaded
    activations leave the device while the next block runs, and return during its backward. A tensor
    that all blocks receive (a time embedding) stays alive while any of them saves it.
    """
    profiles: list[Profile] = []
    for i, profile in enumerate(of_blocks):
        profiles.append(profile if not i or profile.blocks[i].rows else profiles[-1])
    used, last = list(dict.fromkeys(profiles)), profiles[-1]
    if len(used) == 1:
        return last
    assert all(profile.crossing == last.crossing for profile in used), (
        "the carry does not depend on policies"
    )
    blocks = [profiles[0].blocks[0]]
    for i, (before, here) in enumerate(pairwise(profiles)):
        block = behind(here.blocks[i + 1], here.blocks[i].on_host - before.blocks[i].on_host)
        passed_on = before.blocks[i].freed_at_cut - here.blocks[i].freed_at_cut
        blocks.append(replace(block, released=block.released + passed_on))
    embeds, heads = ([profile.embed for profile in used], [profile.head for profile in used])
    return replace(
        last,
        embed=replace(_most(embeds), freed_at_cut=min(embed.freed_at_cut for embed in embeds)),
        blocks=tuple(
            replace(block, freed_at_cut=_least([profile.blocks[i] for profile in used], block))
            for i, block in enumerate(blocks)
        ),
        head=replace(_most(heads), released=last.head.released),
    )


def behind(block: StageCost, not_sent: int) -> StageCost:
    """A block whose predecessor offloads `not_sent` bytes less than in the profile: they do not
    leave the device while the block runs, and need not return during its backward."""
    return replace(
        block,
        kept=block.kept + not_sent,
        released=block.released + not_sent,
        backward_extra=block.backward_extra - not_sent,
        backward_extra_again=block.backward_extra_again - not_sent,
    )


def _least(variants: Sequence[StageCost], block: StageCost) -> int:
    """Bytes that a block frees at a split, if it does not save its output, without tensors that
    blocks of another policy save."""
    freed = [variant.freed_at_cut for variant in variants if variant.freed_at_cut]
    return min(freed, default=0) if block.freed_at_cut else 0


def _most(variants: Sequence[StageCost]) -> StageCost:
    """The embedding or the head, which have no policy: the largest figures, because only some
    blocks may save tensors shared with it."""
    figures = [
        field.name
        for field in fields(StageCost)
        if isinstance(getattr(variants[0], field.name), int)
    ]
    highest: dict[str, Any] = {
        name: max(getattr(stage, name) for stage in variants) for name in figures
    }
    return replace(variants[0], **highest)


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
    rates: Rates | None = None
    """Of a GPU: they decide whether `train.cuda_graphs = auto` replays."""

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

    @classmethod
    def of(cls, placement: Placement) -> "Partition":
        """A placement, without the names of its devices."""
        order = list(dict.fromkeys(placement.blocks))
        devices = tuple(map(order.index, placement.blocks))
        return cls(devices=devices, streamed=placement.streamed)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first block of each device, then the number of blocks."""
        split_points = (
            i for i in range(1, len(self.devices)) if self.devices[i] != self.devices[i - 1]
        )
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
    """Bytes by purpose: weights, adapters, gradients, optimizer, average, activations,
    workspace."""
    crossing: int
    """Bytes of the carry that is sent to this device in each forward; 0 on the first."""
    host: int = 0
    """Bytes of activations that its blocks offload to the host."""
    gathered: int = 0
    """Bytes of the weights that are there for a forward alone: their rows are on other ranks."""

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


def work_as_run(
    profile: Profile, division: Partition, rates: Sequence[Rates], work: Workload
) -> Workload:
    """The work as it turns out on these devices, as `DeviceSpan.as_replayed` has it; without rates
    they are no GPUs."""
    start, end = division.bounds[:2]
    return DeviceSpan(profile, start, end, division.streamed).as_replayed(
        work, rates[0] if rates else None
    )


def compose(
    profile: Profile, division: Partition, budgets: Sequence[Budget], work: Workload = PLAIN
) -> tuple[DevicePlan, ...]:
    """The peak of each device over a whole step; there are as many budgets as the division has
    devices."""
    assert len(division.bounds) == len(budgets) + 1, (division.bounds, len(budgets))
    spans = [
        DeviceSpan(profile, blocks.start, blocks.stop, division.streamed)
        for blocks in division.blocks
    ]
    return tuple(span.plan(budget, work) for span, budget in zip(spans, budgets, strict=True))


class PeakMoment(NamedTuple):
    """Bytes on a device at a stage's peak, in addition to its static memory."""

    activations: int
    gradients: int
    state: int
    """Streamed optimizer state."""


class DeviceSpan:
    """The stages of one device, in a row. Its memory depends on no other device."""

    def __init__(self, profile: Profile, start: int, end: int, streamed: Collection[int] = ()):
        """Look up the stages of the blocks from `start` to before `end`; the embedding is with
        block 0, the head with the last block. The weights of `streamed` blocks stay on the host."""
        last = len(profile.blocks) + 1
        held = range(0 if start == 0 else start + 1, end + 1 + (end == last - 1))
        self.profile, self.held = profile, held
        named = {0: profile.embed, last: profile.head}
        self.stages = [
            named[stage] if stage in named else profile.blocks[stage - 1] for stage in held
        ]
        # the previous block is on another device, so its offloaded bytes do not leave this one
        if held.start > 1:
            self.stages[0] = behind(self.stages[0], profile.blocks[held.start - 2].on_host)
        self.receives = profile.crossing[held.start - 1] if held.start > 0 else 0
        self.receives_back = profile.crossing_back[held.stop - 1] if held.stop <= last else 0
        # Positive on the head's device, negative on the embedding's; they cancel if both are on one
        # device.
        self.targets = profile.targets * ((held.stop > last) - (held.start == 0))
        self.freed = self.stages[-1].freed_at_cut if held.stop <= last else 0
        self.passing = [
            cost for stage, cost in zip(held, self.stages, strict=True) if stage - 1 in streamed
        ]
        self.resident = [
            cost for stage, cost in zip(held, self.stages, strict=True) if stage - 1 not in streamed
        ]
        # Ranks that divide the weights gather two blocks at a time, one runs and the next arrives,
        # and all else for the whole micro-batch.
        ends = [profile.embed.gathered * (0 in held), profile.head.gathered * (last in held)]
        self.gathered = sum(ends) + _pair(
            [profile.blocks[stage - 1].gathered for stage in held if 0 < stage < last]
        )
        self.last_passing = max(
            (stage - held.start for stage in held if stage - 1 in streamed), default=0
        )

    def plan(self, budget: Budget, work: Workload = PLAIN) -> DevicePlan:
        """The peak, by purpose."""
        static, work = self.static(), self.as_replayed(work, budget.rates)
        moments: list[PeakMoment] = []
        # From the second micro-batch on, gradients of earlier ones are there, so its peaks are
        # others.
        for micro_batch in work.rounds(trains_all=self.profile.trains_all):
            moments += self.moments(micro_batch, waiting=max(0, work.waiting - micro_batch.again))
        # Graphs keep the memory of their activations, so all else of a step needs memory next to
        # it; and each kind of them has its inputs.
        pool = max(moment.activations for moment in moments) if work.has_cuda_graphs else 0
        inputs = work.kinds * self.profile.inputs if work.has_cuda_graphs else 0
        all_gradients = sum(cost.gradients for cost in self.stages)
        # An optimizer that works parameter by parameter frees its temporary memory in between.
        combine = sum if self.profile.update_adds_up else max
        # Updates come last: all gradients exist, and no activations.
        updating = combine(cost.update_extra for cost in self.stages)
        moments.append(PeakMoment(pool + max(0, updating - self.gathered), all_gradients, 0))
        if work.ranks is not None:
            moments.append(PeakMoment(pool, work.ranks.exchanged * all_gradients, 0))
        if work.has_cuda_graphs and work.validates:
            forward = self.stages[0].kept + max(cost.forward_extra for cost in self.stages)
            moments.append(PeakMoment(pool + forward, all_gradients, 0))
        highest = max(moments, key=sum)
        held = {
            **static,
            "optimizer": static["optimizer"] + highest.state,
            "gradients": highest.gradients,
            "activations": highest.activations + inputs,
        }
        return DevicePlan(
            budget=budget,
            purposes={**held, "workspace": budget.workspace},
            crossing=self.receives,
            host=(1 + work.waiting) * sum(cost.on_host for cost in self.stages),
            gathered=self.gathered,
        )

    def as_replayed(self, work: Workload, rates: Rates | None) -> Workload:
        """The work with `cuda_graphs` as it turns out here: `on` if its micro-batches are replayed,
        `off` if not. A CPU, without rates, replays nothing.

        `training/replay.py` decides by the same: a device that shares the model, or a host that has
        a part of it, runs eagerly, and `auto` replays where the host takes longer than the GPU. Of
        that the plan has an estimate, for a slow host.
        """
        if work.cuda_graphs == "off":
            return work
        is_alone = len(self.held) == len(self.profile.blocks) + 2
        if (
            rates is None
            or not is_alone
            or self.passing
            or any(stage.on_host for stage in self.stages)
        ):
            return replace(work, cuda_graphs="off")
        if work.cuda_graphs == "on":
            return work
        every = [
            counts
            for stage in self.stages
            for counts in (stage.kernels_forward, stage.kernels_backward)
        ]
        return replace(
            work,
            cuda_graphs="on"
            if is_launched_slowly(every, rates, work.execution.attention)
            else "off",
        )

    def static(self) -> dict[str, int]:
        """Static memory: bytes by purpose that are in use during the whole step."""
        trains_all = self.profile.trains_all
        on_device = self.resident if trains_all else self.stages
        static = {
            # of streamed blocks two are on the device at a time: one runs, the next arrives
            "weights": sum(cost.weights for cost in self.resident)
            + _pair([cost.weights for cost in self.passing])
            + self.gathered,
            "adapters": sum(cost.adapters for cost in on_device),
            "average": sum(cost.average for cost in on_device),
        }
        if trains_all:
            static["adapters"] += _pair([cost.adapters for cost in self.passing])
        return {**static, "optimizer": sum(cost.optimizer for cost in on_device)}

    def moments(self, of: Round, *, waiting: int) -> list[PeakMoment]:
        """The peak of each stage in a micro-batch: first the forwards in order, then the backwards
        in theirs, while `waiting` micro-batches have run forwards and not backwards.

        Optimizer state is streamed with trained weights for their backward; the last block's state
        arrives at the end of the forward.
        """
        again = of.again
        if self.gathered and again:
            gradients = sum(cost.whole_gradients for cost in self.stages)
        else:
            gradients = (of.sums + again) * sum(cost.gradients for cost in self.stages)
        kept = self.receives + self.targets + sum(cost.kept for cost in self.stages) - self.freed
        live = waiting * kept + self.receives + self.targets
        states = [cost.optimizer for cost in self.passing] if self.profile.trains_all else []
        moments: list[PeakMoment] = []
        for position, cost in enumerate(self.stages):
            state = states[-1] if states and position >= self.last_passing else 0
            moments.append(PeakMoment(live + cost.forward_extra, gradients, state))
            live += cost.kept
        # Gradients of the next device arrive here, and the carry that was sent to it is freed.
        live += self.receives_back - self.freed
        adding = 0  # the whole gradients of the stage before, while ranks add them up
        for position, cost in reversed(list(enumerate(self.stages))):
            extra = cost.backward_extra_again if again else cost.backward_extra
            state = states[-1] if states and position > self.last_passing else _pair(states)
            moments.append(PeakMoment(live + extra, gradients + adding, state))
            live -= cost.released
            gradients += _gradients_left(cost, of)
            adding = 0 if of.unsharded else cost.reduced
        return moments


def _gradients_left(cost: StageCost, of: Round) -> int:
    """Bytes by which a stage's backward changes its gradients."""
    if not cost.whole_gradients:
        # a later micro-batch adds to the gradients of the first in place
        return 0 if of.again else cost.gradients
    if of.unsharded:
        return 0 if of.again else cost.whole_gradients
    # Added up over ranks, and a rank keeps its part.
    return cost.gradients - cost.whole_gradients if of.again else 0 if of.sums else cost.gradients


def _pair(sizes: Sequence[int]) -> int:
    """The largest sum of two neighbours: one is used while the next is prefetched."""
    return max((sum(sizes[i : i + 2]) for i in range(max(1, len(sizes) - 1))), default=0)


def on_host(profile: Profile, streamed: Collection[int]) -> int:
    """Bytes of streamed blocks on the host: their frozen weights; in a full fine-tune also
    optimizer state and average."""
    blocks = [profile.blocks[index] for index in streamed]
    kept = (
        sum(block.adapters + block.optimizer + block.average for block in blocks)
        if profile.trains_all
        else 0
    )
    return sum(block.weights for block in blocks) + kept
