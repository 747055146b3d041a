"""`train.checkpointing = budget`: the policy of each block with which a step recomputes least and every device keeps within its bytes.

What a device holds depends on its own blocks alone, so each device is solved by itself, exactly: block after block in forward order, all
ways to have come so far are kept of which no other recomputes less and holds less. A way is dropped as soon as one of its moments is above
the budget. That moments of a block depend on nothing but its own policy and on what the blocks before it keep is what makes this work; the
plan has the last word, and where it disagrees the search goes on with less.

Where kept blocks sit is part of the search. The answer is mostly the end: the backward begins there, while everything is alive, and a
block that recomputes then makes again what one that keeps has already; it had better do so when the blocks behind it are gone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from ditkit_core.config.sizes import GIB
from ditkit_core.engine.ac_policies import AttentionOnly, Full, Policy
from ditkit_core.engine.ac_schedule import KEY, ACSchedule, check_sizes
from ditkit_core.errors import UserError
from ditkit_core.planner.memory import Budget, DevicePlan, DeviceSpan, Partition, compose
from ditkit_core.planner.stage_costs import Profile, mixed

SELF = "self"
"""Attention whose outputs are worth more arithmetic than those of other calls, which cost equal bytes."""
_HOST_PRICE = 2**50
"""Floating-point operations that are recomputed rather than leave a byte on the host: more than any step has."""
_FINEST = 2000
"""Ways that are followed at once. More are thinned to the one that recomputes least in each of so many steps of bytes, which no model that
is known needs: blocks of one kind come to few different sums."""


@dataclass(frozen=True, kw_only=True)
class BudgetTask:
    """What is to be chosen for: a step, divided over devices."""

    profile_of: Callable[[Policy], Profile]
    """The profile of a step in which all blocks have the policy; always the same one, and asked for only if it can matter."""
    division: Partition
    budgets: tuple[Budget, ...]
    micro_batches: int = 1
    pipelined: bool = False
    host: int | None = None
    """Bytes that offloaded activations may take on the host; None for any."""
    can_offload: bool = True
    """Whether the devices are others than the host."""

    def plan(self, policies: Sequence[Policy]) -> tuple[DevicePlan, ...]:
        """What each device holds under these policies."""
        profile = mixed([self.profile_of(policy) for policy in policies])
        return compose(profile, self.division, self.budgets, micro_batches=self.micro_batches, pipelined=self.pipelined)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen."""

    policies: tuple[Policy, ...]
    plans: tuple[DevicePlan, ...]

    @property
    def schedule(self) -> ACSchedule:
        """As the engine reads it."""
        return ACSchedule.of_blocks(self.policies)

    def described(self) -> str:
        """One line for people."""
        held = ", ".join(
            f"{_gib(plan.peak)} of {_gib(plan.budget.total - plan.budget.reserve)} GiB" for plan in self.plans
        )
        host = sum(plan.host for plan in self.plans)
        waiting = f", and {_gib(host)} GiB of activations on the host" if host else ""
        return f"{KEY} = budget chose {self.schedule}: {held}{waiting}"


def choose(task: BudgetTask) -> Choice:
    """The policies that recompute least and fit; with activations on the host only where nothing fits without.

    Raises:
        UserError: If nothing fits.
    """
    for policies in _menus(task):
        for found in _within(task, policies):
            return found
    smallest = (Full(offload=task.can_offload),) * len(task.division.devices)
    plans = task.plan(smallest)
    lacking = [f"{plan.budget.name} lacks {_gib(plan.missing)} GiB" for plan in plans if plan.missing]
    held = sum(plan.host for plan in plans)
    if not lacking and task.host is not None:
        lacking = [f"the host lacks {_gib(held - task.host)} GiB for {_gib(held)} GiB of activations"]
    raise UserError(
        f"{KEY} = budget: nothing fits; with {smallest[0]} for all blocks {', '.join(lacking)}; give it more, train.swap_blocks, "
        "fewer data.frames or a smaller data.height and width; --fit says which"
    )


def limited(budgets: Sequence[Budget], sizes: Sequence[str]) -> tuple[Budget, ...]:
    """The devices with no more than `budget(20GiB, 12GiB)` gives; without sizes as they are.

    Raises:
        UserError: As `check_sizes`.
    """
    given = check_sizes(sizes, len(budgets))
    return (
        tuple(
            replace(budget, total=min(size, budget.total - budget.reserve), reserve=0)
            for budget, size in zip(budgets, given, strict=True)
        )
        if given
        else tuple(budgets)
    )


def _menus(task: BudgetTask) -> Iterator[tuple[Policy, ...]]:
    """What blocks may have, from the menu that costs nothing on; each asks for more profiles than the one before.

    What keeps least comes first: of ways that are equal in all else, that is taken whose blocks keep more towards the end.
    """
    yield (Policy(),)
    names = task.profile_of(Full()).attention
    named = (AttentionOnly(names=(SELF,)),) if SELF in names and len(names) > 1 else ()
    menu = (Full(), *((*named, AttentionOnly()) if names else ()), Policy())
    yield menu
    if task.can_offload:
        yield (Full(offload=True), *menu)


def _within(task: BudgetTask, menu: tuple[Policy, ...]) -> Iterator[Choice]:
    """The best of a menu; nothing if it does not fit."""
    allowed = [budget.total - budget.reserve for budget in task.budgets]
    policies: dict[int, tuple[Policy, ...]] = {}
    while True:
        for device in range(len(task.division.blocks)):
            if device not in policies:
                found = _Device(task, menu, device, allowed[device]).best()
                if found is None:
                    return
                policies[device] = found
        chosen = tuple(policy for device in range(len(task.division.blocks)) for policy in policies[device])
        plans = task.plan(chosen)
        for device, plan in enumerate(plans):
            if plan.missing:  # two policies next to each other hold more than the sum of what they hold alone
                allowed[device] -= plan.missing
                del policies[device]
        if len(policies) == len(task.division.blocks):
            if task.host is None or sum(plan.host for plan in plans) <= task.host:
                yield Choice(policies=chosen, plans=plans)
            return


class _Way(NamedTuple):
    """Policies of the blocks so far."""

    live: int
    """Bytes that they keep."""
    price: int
    """What they recompute, in floating-point operations; each byte on the host is dearer than all of that."""
    highest: tuple[int, ...]
    """Their highest moment in the first micro-batch and in another, where they are still to grow: each micro-batch that waits adds all that
    is kept in the end. Empty where none waits."""
    chosen: tuple[int, ...]
    """Of each block, which of the menu."""


class _Variant(NamedTuple):
    """A stage under one of the policies."""

    kept: int
    forward: tuple[int, ...]
    """Its highest moment in the forward above what is kept before it, all that is always there included: in the first micro-batch, and in
    another."""
    backward: tuple[int, ...]
    """The same of the backward, above what is kept up to it."""
    sent: int
    """Bytes that it leaves on the host."""
    freed_at_cut: int
    price: int


class _Device:
    """One device's part of the problem."""

    def __init__(self, task: BudgetTask, menu: tuple[Policy, ...], device: int, allowed: int):
        own = task.division.blocks[device]
        start, end = own.start, own.stop
        self._menu, self._allowed = menu, allowed
        waiting = task.micro_batches - 1 if task.pipelined else 0
        self._waiting = (waiting, waiting - 1) if waiting else ()
        self._blocks = range(int(start == 0), int(start == 0) + end - start)
        spans = [DeviceSpan(task.profile_of(policy), start, end, task.division.streamed) for policy in menu]
        self._before = max(span.receives + span.targets for span in spans)
        rounds = (False, True) if task.micro_batches > 1 else (False,)
        by_policy = [_variants(span, rounds, task.budgets[device].workspace) for span in spans]
        self._stages = [_priced(stage) for stage in zip(*by_policy, strict=True)]
        for place in set(range(len(self._stages))) - set(self._blocks):
            # no policy is of the embedding or the head; what only some blocks hold of it is held by any of them
            self._stages[place] = [_most(self._stages[place])]

    def best(self) -> tuple[Policy, ...] | None:
        """The cheapest way that never holds more than is allowed; of equal ones the one that keeps least. None if there is none."""
        ways = [_Way(self._before, 0, (0,) * len(self._waiting), ())]
        for place, variants in enumerate(self._stages):
            by_last: list[list[_Way]] = [[] for _ in variants]
            for way in ways:
                for number, variant in enumerate(variants):
                    if (following := self._with(way, place, number, variant)) is not None:
                        by_last[number].append(following)
            ways = [way for found in by_last for way in _undominated(found, self._allowed)]
        found = min(filter(self._fits, ways), key=lambda way: (way.price, way.live, way.chosen), default=None)
        return None if found is None else tuple(self._menu[number] for number in found.chosen)

    def _with(self, way: _Way, place: int, number: int, variant: _Variant) -> _Way | None:
        """One stage more; None if that is above what is allowed."""
        is_block, not_sent = place in self._blocks, 0
        if is_block and way.chosen:
            # What the block before sends to the host leaves while this one runs; its figures have it that the two are of one policy.
            before = self._stages[place - 1]
            not_sent = before[number].sent - before[way.chosen[-1]].sent
        live = way.live + variant.kept + not_sent
        moments = [
            max(way.live + forward, live + backward - not_sent)
            for forward, backward in zip(variant.forward, variant.backward, strict=True)
        ]
        if max(moments) > self._allowed:
            return None
        highest = tuple(map(max, way.highest, moments)) if self._waiting else ()
        return _Way(live, way.price + variant.price, highest, (*way.chosen, number) if is_block else way.chosen)

    def _fits(self, way: _Way) -> bool:
        """Whether it does with what waiting micro-batches keep."""
        kept = way.live - self._freed(way)
        return all(high + count * kept <= self._allowed for high, count in zip(way.highest, self._waiting, strict=True))

    def _freed(self, way: _Way) -> int:
        """What goes over to the next device."""
        is_cut = self._blocks.stop == len(self._stages)
        return self._stages[-1][way.chosen[-1]].freed_at_cut if is_cut else 0


def _variants(span: DeviceSpan, rounds: Sequence[bool], workspace: int) -> list[_Variant]:
    """The stages of a device under one policy, from the moments that its plan is made of."""
    always = sum(span.static().values()) + workspace
    before = span.receives + span.targets
    kept = list(accumulate((stage.kept for stage in span.stages), initial=before))
    count = len(span.stages)
    moments = [[always + sum(moment) for moment in span.moments(again=again, waiting=0)] for again in rounds]
    return [
        _Variant(
            kept=stage.kept,
            forward=tuple(each[place] - kept[place] for each in moments),
            backward=tuple(each[2 * count - 1 - place] - kept[place + 1] for each in moments),
            sent=stage.on_host,
            freed_at_cut=stage.freed_at_cut,
            price=stage.flops_backward,
        )
        for place, stage in enumerate(span.stages)
    ]


def _priced(stage: Sequence[_Variant]) -> list[_Variant]:
    """With prices of what is recomputed alone, and of bytes on the host."""
    least = min(variant.price for variant in stage)
    return [variant._replace(price=variant.price - least + _HOST_PRICE * variant.sent) for variant in stage]


def _most(variants: Sequence[_Variant]) -> _Variant:
    first = variants[0]
    return first._replace(
        kept=max(each.kept for each in variants),
        forward=tuple(map(max, zip(*(each.forward for each in variants), strict=True))),
        backward=tuple(map(max, zip(*(each.backward for each in variants), strict=True))),
        price=0,
    )


def _undominated(ways: list[_Way], allowed: int) -> list[_Way]:
    """Of ways that end in the same policy, those of which none other keeps less, recomputes less and has been less high."""
    if len(ways) > _FINEST:
        cheapest: dict[int, _Way] = {}
        for way in sorted(ways, key=lambda way: (way.price, way)):
            cheapest.setdefault(way.live * _FINEST // max(1, allowed), way)
        ways = list(cheapest.values())
    kept: list[_Way] = []
    for way in sorted(ways):
        # Prices fall along those that are kept, unless heights count, too: the last is the cheapest.
        others = kept if way.highest else kept[-1:]
        if not any(
            each.price <= way.price and all(a <= b for a, b in zip(each.highest, way.highest, strict=True))
            for each in others
        ):
            kept.append(way)
    return kept


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
