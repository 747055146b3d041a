"""`train.checkpointing = budget`: chooses the policy of each block so that a step recomputes least
and every device fits its budget.

A device's memory depends only on its own blocks, so each device is solved separately and exactly,
by dynamic programming over its blocks in forward order. Of all partial choices, those stay that no
other beats in both recompute and memory. A choice is dropped as soon as one of its peaks exceeds
the budget. This works because the peaks of a block depend only on its own policy and on the bytes
that earlier blocks keep. The full plan decides in the end; if it needs more memory than the search
assumed, the search is repeated with a smaller budget.

A step that recomputes more can be shorter: the host launches more, so that the GPU waits for it,
and the step is replayed. The plan alone knows for which policies that is so. Where it can be, the
search is made for the prices of both kinds of step, and what it finds is compared with each policy
for all blocks.

The search also decides where in the model the kept blocks are. They are mostly at the end: the
backward begins there, while all other activations are alive, so recomputing there would add to the
peak. Earlier blocks recompute when the later ones are freed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from ditkit_core.config.sizes import gib
from ditkit_core.engine.ac_policies import AttentionOnly, Full, Policy
from ditkit_core.engine.ac_schedule import KEY, ACSchedule, check_sizes
from ditkit_core.errors import UserError
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import (
    Budget,
    DevicePlan,
    DeviceSpan,
    Partition,
    Profile,
    StageCost,
    compose,
    mixed,
)
from ditkit_core.planner.step_time import compute_time, step_seconds
from ditkit_core.planner.workload import PLAIN, CudaGraphs, Workload

SELF = "self"
"""The attention call whose outputs save most recompute per byte; other calls save less for the same
bytes."""
_HOST_PRICE = 2**50
"""Price of a byte on the host, in nanoseconds or floating-point operations: more than any step has,
so that recompute is always preferred."""
HARDLY_LONGER = 1.01
"""Times a replayed step without recompute: no other policy is tried to shorten a step that takes
less."""
_FINEST = 2000
"""Number of partial choices to follow at once. Beyond it, bytes are divided into as many bins, and
each keeps the choice that recomputes least. No known model needs that, because equal blocks have
few different sums."""


@dataclass(frozen=True, kw_only=True)
class BudgetTask:
    """The input of the search: a step, split across devices."""

    profile_of: Callable[[Policy], Profile]
    """The profile of a step in which all blocks have the policy; cached, and requested only where
    needed: profiling takes seconds."""
    division: Partition
    budgets: tuple[Budget, ...]
    work: Workload = PLAIN
    host: int | None = None
    """Bytes that offloaded activations may take on the host; None for any."""
    can_offload: bool = True
    """Whether the devices are not the host itself."""
    gpus: tuple[GPU, ...] = ()
    """The devices, whose time recomputes take; without rates, as on CPUs, recomputed operations are
    counted."""

    @property
    def works(self) -> tuple[Workload, ...]:
        """The work as it can turn out, with replays and without. Without rates it does not matter,
        and several devices replay nothing."""
        if not self.gpus or self.work.cuda_graphs != "auto":
            return (self.work,)
        settings: tuple[CudaGraphs, ...] = ("on", "off") if len(self.gpus) == 1 else ("off",)
        return tuple(replace(self.work, cuda_graphs=setting) for setting in settings)

    def seconds(self, policies: Sequence[Policy], work: Workload) -> float:
        """The estimated time of a step under these policies; needs rates."""
        profile = mixed([self.profile_of(policy) for policy in policies])
        return step_seconds(profile, self.division, self.gpus, work)

    def plan(self, policies: Sequence[Policy]) -> tuple[DevicePlan, ...]:
        """The memory of each device under these policies."""
        profile = mixed([self.profile_of(policy) for policy in policies])
        return compose(profile, self.division, self.budgets, self.work)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen policies, with their plans."""

    policies: tuple[Policy, ...]
    plans: tuple[DevicePlan, ...]

    @property
    def schedule(self) -> ACSchedule:
        """As the engine reads it."""
        return ACSchedule.of_blocks(self.policies)

    def described(self) -> str:
        """One line for the log."""
        held = ", ".join(
            f"{gib(plan.peak)} of {gib(plan.budget.available)} GiB" for plan in self.plans
        )
        host = sum(plan.host for plan in self.plans)
        waiting = f", and {gib(host)} GiB of activations on the host" if host else ""
        return f"{KEY} = budget chose {self.schedule}: {held}{waiting}"


def choose(task: BudgetTask) -> Choice:
    """The policies that fit and recompute least; activations are offloaded to the host only if
    nothing fits otherwise."""
    for menu in _menus(task):
        choices = [choice for work in task.works for choice in _within(task, menu, work)]
        if not choices:
            continue
        if len(task.works) == 1:
            return choices[0]
        # No step is shorter than one that keeps everything and is replayed.
        shortest = task.seconds(choices[0].policies, task.works[0])
        if task.seconds(choices[0].policies, task.work) <= shortest * HARDLY_LONGER:
            return choices[0]
        if len(menu) > 1:
            return _fastest(task, menu, choices)
    smallest = (Full(offload=task.can_offload),) * len(task.division.devices)
    plans = task.plan(smallest)
    lacking = [
        f"{plan.budget.name} lacks {gib(plan.missing)} GiB" for plan in plans if plan.missing
    ]
    held = sum(plan.host for plan in plans)
    if not lacking and task.host is not None:
        lacking = [f"the host lacks {gib(held - task.host)} GiB for {gib(held)} GiB of activations"]
    raise UserError(
        f"{KEY} = budget: nothing fits; with {smallest[0]} for all blocks {', '.join(lacking)}; "
        f"set train.swap_blocks, "
        "fewer data.frames, or a smaller data.height and width; --fit says which"
    )


def _fastest(task: BudgetTask, menu: tuple[Policy, ...], choices: Sequence[Choice]) -> Choice:
    """Of these choices and what else can be faster, the fastest; of equals the one that needs least
    memory."""
    tried = [choice.policies for choice in choices]
    tried += [(policy,) * len(task.division.devices) for policy in menu if not policy.offload]
    low, high = 0.0, 1.0
    # in search of the most memory with which a step is replayed: with more the host launches less
    for _ in range(6):
        share = (low + high) / 2
        budgets = [
            replace(budget, total=int(budget.available * share), reserve=0)
            for budget in task.budgets
        ]
        smaller = replace(task, budgets=tuple(budgets))
        policies = next((choice.policies for choice in _within(smaller, menu, task.works[0])), None)
        if policies is None or task.seconds(policies, task.work) == task.seconds(
            policies, task.works[0]
        ):
            low = share
        else:
            high = share
        tried += [policies] if policies else []
    plans = {policies: task.plan(policies) for policies in tried}
    fitting = [
        policies for policies, of_devices in plans.items() if all(plan.fits for plan in of_devices)
    ]
    best = min(
        fitting,
        key=lambda policies: (
            task.seconds(policies, task.work),
            sum(plan.peak for plan in plans[policies]),
        ),
    )
    return Choice(policies=best, plans=plans[best])


def limited(budgets: Sequence[Budget], sizes: Sequence[str]) -> tuple[Budget, ...]:
    """The devices limited to the sizes of `budget(20GiB, 12GiB)`; unchanged without sizes."""
    if not (limits := check_sizes(sizes, len(budgets))):
        return tuple(budgets)
    pairs = zip(budgets, limits, strict=True)
    return tuple(
        replace(budget, total=min(size, budget.available), reserve=0) for budget, size in pairs
    )


def _menus(task: BudgetTask) -> Iterator[tuple[Policy, ...]]:
    """Lists of policies to choose from, cheapest first: each list needs more profiles than the one
    before.

    In a list, the policy that keeps least comes first, so that the choice wins whose later blocks
    keep more, if several are equal.
    """
    # Keeping everything first: if that fits, no other policy has to be profiled.
    yield (Policy(),)
    names = task.profile_of(Full()).attention
    named = (AttentionOnly(names=(SELF,)),) if SELF in names and len(names) > 1 else ()
    menu = (Full(), *((*named, AttentionOnly()) if names else ()), Policy())
    yield menu
    if task.can_offload:
        yield (Full(offload=True), *menu)


def _within(task: BudgetTask, menu: tuple[Policy, ...], work: Workload) -> Iterator[Choice]:
    """The best choice of a menu at the prices of this work; yields nothing if none fits."""
    allowed = [budget.available for budget in task.budgets]
    policies: dict[int, tuple[Policy, ...]] = {}
    # Budgets only shrink from round to round, so this ends: the plan agrees, or nothing fits.
    while True:
        for device in range(len(task.division.blocks)):
            if device not in policies:
                best = _Device(task, menu, device, allowed[device], work).best()
                if best is None:
                    return
                policies[device] = best
        chosen = tuple(
            policy for device in range(len(task.division.blocks)) for policy in policies[device]
        )
        plans = task.plan(chosen)
        for device, plan in enumerate(plans):
            if plan.missing:  # two neighbouring policies can need more than the sum of both
                allowed[device] -= plan.missing
                del policies[device]
        # All devices have agreed with the plan; only the host's limit is left to check.
        if len(policies) == len(task.division.blocks):
            if task.host is None or sum(plan.host for plan in plans) <= task.host:
                yield Choice(policies=chosen, plans=plans)
            return


class _Way(NamedTuple):
    """A choice of policies for the blocks so far."""

    live: int
    """Bytes that these blocks keep."""
    price: int
    """Their recompute, in nanoseconds or floating-point operations, plus `_HOST_PRICE` for each
    byte on the host."""
    highest: tuple[int, ...]
    """Their peaks in the first and in a later micro-batch, if micro-batches wait: each of those
    adds all bytes that are kept in the end. Empty if none waits."""
    chosen: tuple[int, ...]
    """Index in the menu of each block's policy."""


class _Variant(NamedTuple):
    """Costs of a stage under one policy."""

    kept: int
    forward: tuple[int, ...]
    """Its peak in the forward above the bytes kept before it, static memory included: in the first
    micro-batch, and in a later one."""
    backward: tuple[int, ...]
    """Its peak in the backward, above the bytes kept up to it."""
    sent: int
    """Bytes that it offloads to the host."""
    freed_at_cut: int
    price: int


class _Device:
    """The search for one device."""

    def __init__(
        self, task: BudgetTask, menu: tuple[Policy, ...], device: int, allowed: int, work: Workload
    ):
        span = task.division.blocks[device]
        start, end = span.start, span.stop
        self._menu, self._allowed = menu, allowed
        waiting = task.work.waiting
        self._waiting = (waiting, waiting - 1) if waiting else ()
        self._blocks = range(int(start == 0), int(start == 0) + end - start)
        spans = [
            DeviceSpan(task.profile_of(policy), start, end, task.division.streamed)
            for policy in menu
        ]
        self._before = max(span.receives + span.targets for span in spans)
        # What the backward of a stage costs there, recompute included.
        price: Callable[[StageCost], int] = lambda stage: stage.flops_backward
        if task.gpus:
            price = partial(compute_time, gpu=task.gpus[device], work=work, backward=True)
        by_policy = [_variants(span, task.work, task.budgets[device], price) for span in spans]
        self._stages: list[list[_Variant]] = []
        for stage in zip(*by_policy, strict=True):
            # Priced are only the recompute above the cheapest policy, and the bytes on the host.
            least = min(variant.price for variant in stage)
            prices = [variant.price - least + _HOST_PRICE * variant.sent for variant in stage]
            self._stages.append(
                [one._replace(price=price) for one, price in zip(stage, prices, strict=True)]
            )
        for stage_index in set(range(len(self._stages))) - set(self._blocks):
            # Embedding and head have no policy. Their costs differ between profiles, because some
            # blocks share their tensors: take the highest.
            self._stages[stage_index] = [_most(self._stages[stage_index])]

    def best(self) -> tuple[Policy, ...] | None:
        """The choice with the least recompute that never exceeds the budget; of equals the one that
        keeps least. None if none fits."""
        ways = [_Way(self._before, 0, (0,) * len(self._waiting), ())]
        for stage_index, variants in enumerate(self._stages):
            by_last: list[list[_Way]] = [[] for _ in variants]
            for way in ways:
                for number, variant in enumerate(variants):
                    if (following := self._with(way, stage_index, number, variant)) is not None:
                        by_last[number].append(following)
            ways = [way for choices in by_last for way in _undominated(choices, self._allowed)]
        cheapest = min(
            filter(self._fits, ways),
            key=lambda way: (way.price, way.live, way.chosen),
            default=None,
        )
        return None if cheapest is None else tuple(self._menu[number] for number in cheapest.chosen)

    def _with(self, way: _Way, stage_index: int, number: int, variant: _Variant) -> _Way | None:
        """Add a stage to a choice; None if a peak exceeds the budget."""
        is_block, not_sent = stage_index in self._blocks, 0
        if is_block and way.chosen:
            # A block's offloaded bytes leave the device while the next block runs. The figures
            # assume that both have one policy.
            before = self._stages[stage_index - 1]
            not_sent = before[number].sent - before[way.chosen[-1]].sent
        live = way.live + variant.kept + not_sent
        moments = [
            max(way.live + forward, live + backward - not_sent)
            for forward, backward in zip(variant.forward, variant.backward, strict=True)
        ]
        if max(moments) > self._allowed:
            return None
        highest = tuple(map(max, way.highest, moments)) if self._waiting else ()
        return _Way(
            live,
            way.price + variant.price,
            highest,
            (*way.chosen, number) if is_block else way.chosen,
        )

    def _fits(self, way: _Way) -> bool:
        """Whether it fits together with the activations of waiting micro-batches."""
        moves_on = self._blocks.stop == len(self._stages)
        kept = way.live - (self._stages[-1][way.chosen[-1]].freed_at_cut if moves_on else 0)
        return all(
            high + count * kept <= self._allowed
            for high, count in zip(way.highest, self._waiting, strict=True)
        )


def _variants(
    span: DeviceSpan, work: Workload, budget: Budget, price: Callable[[StageCost], int]
) -> list[_Variant]:
    """The stages of a device under one policy, from the peaks of its plan."""
    rounds = span.as_replayed(work, budget.rates).rounds(trains_all=span.profile.trains_all)
    always = sum(span.static().values()) + budget.workspace
    before = span.receives + span.targets
    kept = list(accumulate((stage.kept for stage in span.stages), initial=before))
    count = len(span.stages)
    peaks = [
        [always + sum(moment) for moment in span.moments(micro_batch, waiting=0)]
        for micro_batch in rounds
    ]
    return [
        _Variant(
            kept=stage.kept,
            forward=tuple(moments[stage_index] - kept[stage_index] for moments in peaks),
            backward=tuple(
                moments[2 * count - 1 - stage_index] - kept[stage_index + 1] for moments in peaks
            ),
            sent=stage.on_host,
            freed_at_cut=stage.freed_at_cut,
            price=price(stage),
        )
        for stage_index, stage in enumerate(span.stages)
    ]


def _most(variants: Sequence[_Variant]) -> _Variant:
    first = variants[0]
    return first._replace(
        kept=max(variant.kept for variant in variants),
        forward=tuple(map(max, zip(*(variant.forward for variant in variants), strict=True))),
        backward=tuple(map(max, zip(*(variant.backward for variant in variants), strict=True))),
        price=0,
    )


def _undominated(ways: list[_Way], allowed: int) -> list[_Way]:
    """Of choices that end in the same policy, those that no other beats in kept bytes, recompute
    and peaks."""
    if len(ways) > _FINEST:
        cheapest: dict[int, _Way] = {}
        for way in sorted(ways, key=lambda way: (way.price, way)):
            cheapest.setdefault(way.live * _FINEST // max(1, allowed), way)
        ways = list(cheapest.values())
    kept: list[_Way] = []
    for way in sorted(ways):
        # Sorted by kept bytes, prices fall, so the last one is the cheapest. With peaks all have to
        # be compared.
        others = kept if way.highest else kept[-1:]
        if not any(
            rival.price <= way.price
            and all(a <= b for a, b in zip(rival.highest, way.highest, strict=True))
            for rival in others
        ):
            kept.append(way)
    return kept
