"""Which settings let a run fit its cards, and of those the ones that slow it down least.

Searched are the checkpointing policy, what the frozen weights are held in, which of the cards are used, before which blocks the next one
begins, how many blocks of each are streamed, and whether micro-batches overlap.

Quantization is the only one of these that changes what is learned, so it has a price: weights in 8 bits are taken only where the fastest
exact way needs more than `PRICE` times as long, and 4 bits where 8 bits would need more than theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from ditkit_core.planner.gpus import Card
from ditkit_core.planner.memory import DevicePlan, Division, on_host
from ditkit_core.planner.partition_search import Search
from ditkit_core.planner.profiler import Profile, StageCost
from ditkit_core.planner.step_time import StepTime, Workload, step_seconds

POLICIES = ("full", "attn_only", "none")
"""From the smallest to the fastest: where one does not fit, those behind it hold more yet."""
SMALLEST = "full+offload"
"""What is tried where none of them fits: host memory is dearer than time, and copies that are late are waited for."""
PRICE = {"none": 1.0, "int8": 1.5, "fp8": 1.5, "nf4": 3.0}
"""What a step's time is multiplied with before settings are compared, by what the weights are held in."""
HARDLY_LONGER = 0.03
"""Share of the fastest step's time that is given for cards with room to spare, less host memory for streamed weights, fewer cards, and
cards that are less full (`_least_effort`). An estimate of time is not closer than that."""
ROOM = 0.05
"""Share of what a card can give that is left free where that costs no time: as far as a plan may be off."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is chosen."""

    policy: str
    quantize: str
    cards: tuple[int, ...]
    """Which of the cards are used, in their order."""
    cuts: tuple[int, ...]
    swap: tuple[int, ...]
    """Streamed blocks of each card used."""
    pipelined: bool


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings with what they lead to."""

    setting: Setting
    division: Division
    plan: tuple[DevicePlan, ...]
    """Of the cards used."""
    time: StepTime
    branch: "Branch" = field(repr=False)
    """Where it was found."""

    @property
    def score(self) -> float:
        """Seconds, times the price of what the weights are held in."""
        return self.time.seconds * PRICE[self.setting.quantize]

    @property
    def fullness(self) -> float:
        """Of the fullest card, the share that is used of what it can give."""
        return max(plan.peak / (plan.budget.total - plan.budget.reserve) for plan in self.plan)

    @property
    def host(self) -> int:
        """Bytes of the weights that stay on the host, and of activations that wait there."""
        return self.weights_on_host + sum(plan.host for plan in self.plan)

    @property
    def weights_on_host(self) -> int:
        """Bytes of the weights that stay on the host."""
        return on_host(self.branch.task.profile_of(self.setting.policy, self.setting.quantize), self.division.streamed)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be fitted: a training step, and the cards there are."""

    cards: tuple[Card, ...]
    profile_of: Callable[[str, str], Profile]
    """(policy, quantize) to the profile, always the same one for the same two."""
    micro_batches: int = 1
    fp32: bool = False
    quantizations: tuple[str, ...] = ("none", "int8", "nf4")
    """From the exact one on; a full fine-tune has no other."""
    host: int | None = None
    """Bytes that streamed weights and offloaded activations may take on the host; None for any."""
    streams_trained: bool = False
    """Whether blocks whose weights are trained can be streamed."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """What is searched with one policy, with weights held in one way."""

    task: Task
    policy: str
    quantize: str
    pipelined: bool

    @cached_property
    def search(self) -> Search:
        """Ways to divide its profile."""
        profile = self.task.profile_of(self.policy, self.quantize)
        return Search(profile, self._work, streams_trained=self.task.streams_trained)

    @property
    def _work(self) -> Workload:
        return Workload(
            micro_batches=self.task.micro_batches, pipelined=self.pipelined, fp32=self.task.fp32, quantize=self.quantize
        )

    def fastest(self, chosen: tuple[int, ...], share: float = 1.0) -> Candidate | None:
        """The fastest division over the chosen cards that takes no more than `share` of what each can give; None if none fits."""
        cards = [self.task.cards[i] for i in chosen]
        spans = self.search.fastest(cards, share, self.task.host)
        if spans is None:
            return None
        setting = Setting(
            policy=self.policy, quantize=self.quantize, cards=chosen, cuts=tuple(span.start for span in spans[1:]),
            swap=tuple(span.num_streamed for span in spans), pipelined=self.pipelined,
        )  # fmt: skip
        profile = self.task.profile_of(self.policy, self.quantize)
        division = self.search.division(spans)
        time = step_seconds(profile, division, cards, self._work)
        return Candidate(setting=setting, division=division, plan=self.search.plan(spans), time=time, branch=self)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a search found."""

    chosen: Candidate | None
    """None if nothing fits."""
    others: dict[str, Candidate]
    """What else fits, by what is best about it."""
    passed_over: tuple[str, ...] = ()
    """Quantizations that were not tried, since nothing exact is slow enough for them."""


def fit(task: Task) -> Fit:
    """Find the settings that fit and slow the run down least, prices of quantization included."""
    found: list[Candidate] = []
    passed_over: list[str] = []
    for quantize in task.quantizations:
        if found and min(each.score for each in found) <= shortest_seconds(task) * PRICE[quantize]:
            passed_over.append(quantize)  # and its profiles need not be made
            continue
        for policy in POLICIES:
            if not (fitting := list(candidates(task, policy, quantize))):
                break
            found += fitting
    if not found:
        passed_over.clear()
        found = next(filter(None, ([*candidates(task, SMALLEST, quantize)] for quantize in task.quantizations)), [])
    if not found:
        return Fit(chosen=None, others={})
    fastest = min(found, key=_rank)
    limit = fastest.score * (1 + HARDLY_LONGER)
    about_as_fast = [each for each in found if each.score <= limit]
    roomy = [each for each in map(_with_room, about_as_fast) if each is not None and each.score <= limit]
    chosen = _evened_out(_least_effort(roomy or about_as_fast), limit)
    exact = [each for each in found if each.setting.quantize == "none"]
    others = {
        **({"fastest with exact weights": min(exact, key=_rank)} if exact else {}),
        "least memory": _smallest(found),
        "fastest": min(found, key=lambda each: (each.time.seconds, *_rank(each))),
    }
    known = {(chosen.setting.policy, chosen.setting.quantize, chosen.setting.swap)}
    for name, each in list(others.items()):
        key = (each.setting.policy, each.setting.quantize, each.setting.swap)
        if key in known or each.setting == fastest.setting:
            del others[name]
        known.add(key)
    return Fit(chosen=chosen, others=others, passed_over=tuple(passed_over))


def candidates(task: Task, policy: str, quantize: str) -> Iterator[Candidate]:
    """For each choice of cards, with and without overlapping micro-batches, the fastest division that fits."""
    for pipelined in (False, True) if task.micro_batches > 1 else (False,):
        branch = Branch(task=task, policy=policy, quantize=quantize, pipelined=pipelined)
        for chosen in _choices(task.cards):
            if (len(chosen) > 1 or not pipelined) and (found := branch.fastest(chosen)) is not None:
                yield found


def least_missing(task: Task) -> int:
    """Bytes that the fullest card lacks under the smallest of all settings, or else the host; 0 if they fit."""
    search = _smallest_search(task)
    missing = min(search.least_missing([task.cards[i] for i in chosen]) for chosen in _choices(task.cards))
    if missing or task.host is None:
        return missing
    needed = least_host(task)
    assert needed is not None, "it fits the cards"
    return max(0, needed - task.host)


def least_host(task: Task) -> int | None:
    """The fewest bytes on the host with which the smallest of all settings fit the cards; None if they do not."""
    searches = [
        _smallest_search(task, policy) for policy in (POLICIES[0], SMALLEST)
    ]  # the first has less on the host where it fits
    cards = [[task.cards[i] for i in chosen] for chosen in _choices(task.cards)]
    each = [search.least_host(chosen) for search in searches for chosen in cards]
    return min((needed for needed in each if needed is not None), default=None)


def _smallest_search(task: Task, policy: str = SMALLEST) -> Search:
    return Branch(task=task, policy=policy, quantize=task.quantizations[-1], pipelined=False).search


def shortest_seconds(task: Task) -> float:
    """Seconds that no setting falls below: nothing recomputed, streamed or converted on the fastest card, shared where several can work."""
    profile = task.profile_of(POLICIES[0], "none")

    def without_recompute(stage: StageCost) -> StageCost:
        return replace(stage, flops_backward=max(0, stage.flops_backward - stage.flops_forward))

    profile = replace(profile, blocks=tuple(without_recompute(block) for block in profile.blocks))
    whole = Division(devices=(0,) * len(profile.blocks))
    work = Workload(micro_batches=task.micro_batches, fp32=task.fp32)
    fastest = min(step_seconds(profile, whole, [card], work).seconds for card in task.cards)
    return fastest / (len(task.cards) if task.micro_batches > 1 else 1)


def _with_room(candidate: Candidate) -> Candidate | None:
    """The fastest division that leaves `ROOM`, everything else as in a candidate."""
    return candidate.branch.fastest(candidate.setting.cards, 1 - ROOM)


def _evened_out(best: Candidate, limit: float) -> Candidate:
    """Settings that stream no more and score no worse than `limit`, with the fullest card as empty as possible."""
    return _emptiest(best, lambda each: each.score <= limit and each.host <= best.host)


def _smallest(found: Sequence[Candidate]) -> Candidate:
    """Settings under which the fullest card is as empty as can be, however slow, with no weights less exact than need be."""
    policies = [each for each in found if each.setting.policy in (POLICIES[0], SMALLEST) and not each.setting.pipelined]
    return _emptiest(
        min(policies, key=lambda each: (PRICE[each.setting.quantize], -len(each.setting.cards))), lambda each: True
    )


def _emptiest(best: Candidate, accepted: Callable[[Candidate], bool]) -> Candidate:
    low = 0.0
    for _ in range(8):
        share = (low + best.fullness) / 2
        found = best.branch.fastest(best.setting.cards, share)
        if found is not None and accepted(found):
            best = found
        else:
            low = share
    return best


def _least_effort(candidates: Sequence[Candidate]) -> Candidate:
    """Of about equally fast ones the one with fewest cards, then least host memory; more cards are taken where that spares the host
    a quarter of what it has to hold."""
    ordered = sorted(candidates, key=lambda each: (len(each.setting.cards), *_effort(each)))
    best = ordered[0]
    for each in ordered:
        if each.host <= 0.75 * best.host and each.host < best.host:
            best = each
    return best


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    """The fastest, prices included, comes first."""
    return candidate.score, *_effort(candidate)


def _effort(candidate: Candidate) -> tuple[Any, ...]:
    """Of equally fast ones comes first what takes least of the host, then what takes fewest cards, and leaves them emptiest."""
    setting = candidate.setting
    return candidate.host, setting.pipelined, len(setting.cards), candidate.fullness


def _choices(cards: Sequence[Card]) -> list[tuple[int, ...]]:
    """Which cards could be used, in their order; of choices of equal cards the first."""
    found: dict[tuple[Card, ...], tuple[int, ...]] = {}
    for count in range(1, len(cards) + 1):
        for chosen in combinations(range(len(cards)), count):
            found.setdefault(tuple(cards[i] for i in chosen), chosen)
    return list(found.values())
