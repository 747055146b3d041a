"""Which settings let a run fit its cards, and of those the ones that slow it down least.

Searched are the checkpointing policy, what the frozen weights are held in, which of the cards are used, before which blocks the next one
begins, how many blocks of each are streamed, and whether micro-batches overlap.

Quantization is the only one of these that changes what is learned, so it has a price: weights in 8 bits are taken only where the fastest
exact way needs more than `PRICE` times as long, and 4 bits where 8 bits would need more than theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import Partition
from ditkit_core.planner.partition_search import PRICE, Candidate, FitTask, Search
from ditkit_core.planner.stage_costs import StageCost
from ditkit_core.planner.step_time import Workload, step_seconds

POLICIES = ("full", "attn_only", "none")
"""From the smallest to the fastest: where one does not fit, those behind it hold more yet."""
SMALLEST = "full+offload"
"""What is tried where none of them fits: host memory is dearer than time, and copies that are late are waited for."""
HARDLY_LONGER = 0.03
"""Share of the fastest step's time that is given for cards with room to spare, less host memory for streamed weights, fewer cards, and
cards that are less full (`_least_effort`). An estimate of time is not closer than that."""
ROOM = 0.05
"""Share of what a card can give that is left free where that costs no time: as far as a plan may be off."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a search found."""

    chosen: Candidate | None
    """None if nothing fits."""
    others: dict[str, Candidate]
    """What else fits, by what is best about it."""
    passed_over: tuple[str, ...] = ()
    """Quantizations that were not tried, since nothing exact is slow enough for them."""


def fit(task: FitTask) -> Fit:
    """Find the settings that fit and slow the run down least, prices of quantization included."""
    found: list[Candidate] = []
    passed_over: list[str] = []
    for quantize in task.quantizations:
        # Nothing held so can be faster than arithmetic alone, so with its price it could not win: its profiles, seconds each, are not made.
        if found and min(each.score for each in found) <= shortest_seconds(task) * PRICE[quantize]:
            passed_over.append(quantize)
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
    # Others are printed for comparison: one that differs only in its split points is no choice.
    known = {(chosen.setting.policy, chosen.setting.quantize, chosen.setting.swap)}
    for name, each in list(others.items()):
        key = (each.setting.policy, each.setting.quantize, each.setting.swap)
        if key in known or each.setting == fastest.setting:
            del others[name]
        known.add(key)
    return Fit(chosen=chosen, others=others, passed_over=tuple(passed_over))


def candidates(task: FitTask, policy: str, quantize: str) -> Iterator[Candidate]:
    """For each choice of GPUs, with and without overlapping micro-batches, the fastest division that fits."""
    for pipelined in (False, True) if task.micro_batches > 1 else (False,):
        search = Search(task, policy, quantize, pipelined=pipelined)
        for chosen in _choices(task.cards):
            if (len(chosen) > 1 or not pipelined) and (found := search.fastest(chosen)) is not None:
                yield found


def least_missing(task: FitTask) -> int:
    """Bytes that the fullest GPU lacks under the smallest of all settings, or else the host; 0 if they fit."""
    missing = min(map(_smallest_search(task, SMALLEST).least_missing, _choices(task.cards)))
    if missing or task.host is None:
        return missing
    needed = least_host(task)
    assert needed is not None, "it fits the GPUs"
    return max(0, needed - task.host)


def least_host(task: FitTask) -> int | None:
    """The fewest bytes on the host with which the smallest of all settings fit the GPUs; None if they do not."""
    # Of the two policies the first has less on the host where it fits.
    searches = [_smallest_search(task, policy) for policy in (POLICIES[0], SMALLEST)]
    each = [search.least_host(chosen) for search in searches for chosen in _choices(task.cards)]
    return min((needed for needed in each if needed is not None), default=None)


def _smallest_search(task: FitTask, policy: str) -> Search:
    return Search(task, policy, task.quantizations[-1])


def shortest_seconds(task: FitTask) -> float:
    """Seconds that no setting falls below: nothing recomputed, streamed or converted on the fastest card, shared where several can work."""
    profile = task.profile_of(POLICIES[0], "none")

    def without_recompute(stage: StageCost) -> StageCost:
        return replace(stage, flops_backward=max(0, stage.flops_backward - stage.flops_forward))

    profile = replace(profile, blocks=tuple(without_recompute(block) for block in profile.blocks))
    whole = Partition(devices=(0,) * len(profile.blocks))
    work = Workload(micro_batches=task.micro_batches, fp32=task.fp32)
    fastest = min(step_seconds(profile, whole, [card], work).seconds for card in task.cards)
    return fastest / (len(task.cards) if task.micro_batches > 1 else 1)


def _with_room(candidate: Candidate) -> Candidate | None:
    """The fastest division that leaves `ROOM`, everything else as in a candidate."""
    return candidate.search.fastest(candidate.setting.cards, 1 - ROOM)


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
    # By bisection, because how full the fullest is follows from which blocks are streamed, of which there are too many to look at.
    low = 0.0
    for _ in range(8):
        share = (low + best.fullness) / 2
        found = best.search.fastest(best.setting.cards, share)
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


def _choices(cards: Sequence[GPU]) -> list[tuple[int, ...]]:
    """Which cards could be used, in their order; of choices of equal cards the first."""
    found: dict[tuple[GPU, ...], tuple[int, ...]] = {}
    for count in range(1, len(cards) + 1):
        for chosen in combinations(range(len(cards)), count):
            found.setdefault(tuple(cards[i] for i in chosen), chosen)
    return list(found.values())
