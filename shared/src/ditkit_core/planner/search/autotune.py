"""The settings that let a run fit its GPUs and slow it down least.

The search covers the checkpointing policy, the format of the frozen weights, the GPUs to use, the split points, the number of streamed
blocks on each GPU, and whether micro-batches overlap.

Only quantization changes the training result, so it has a price: 8-bit weights are chosen only if the fastest exact setting takes more than
`PRICE` times as long, and 4 bits by the same rule against 8 bits.

If no settings fit, `run/plans/changes.py: levers` lists changes of the run itself, or of the GPUs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from typing import Any

from ditkit_core.errors import UserError
from ditkit_core.planner.ac_budget import BudgetTask, choose
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import Partition, StageCost, compose, mixed
from ditkit_core.planner.search.partition_search import PRICE, Candidate, FitTask, Search
from ditkit_core.planner.step_time import step_seconds

POLICIES = ("full", "attn_only", "none")
"""From the smallest to the fastest: if one does not fit, the later ones need even more memory."""
SMALLEST = "full+offload"
"""Tried only if none of them fits, because it uses host memory and may wait for copies."""
SELF_ONLY = "attn_only(self)"
"""Between the first two, for blocks with more than one attention: tried where blocks may have different policies."""
HARDLY_LONGER = 0.03
"""Share of the fastest step's time that may be given up for GPUs with room to spare, less host memory for streamed weights, fewer GPUs, and
emptier GPUs (`_least_effort`). The estimate of time is no more accurate than that."""
ROOM = 0.05
"""Share of a GPU's available memory that stays free if that costs no time: the error that a plan may have."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The result of a search."""

    chosen: Candidate | None
    """None if nothing fits."""
    others: dict[str, Candidate]
    """Other settings that fit, by their advantage."""


def fit(task: FitTask) -> Fit:
    """Find the settings that fit and slow the run down least, prices of quantization included."""
    fitting_settings: list[Candidate] = []
    for quantize in task.quantizations:
        # No quantized setting is faster than its arithmetic alone. If that loses with its price, skip its profiles, which take seconds each.
        if (
            fitting_settings
            and min(candidate.score for candidate in fitting_settings) <= shortest_seconds(task) * PRICE[quantize]
        ):
            continue
        for policy in _policies(task, quantize):
            # Sorted by memory, so if this policy does not fit, no later one does.
            if not (fitting := list(candidates(task, policy, quantize))):
                break
            fitting_settings += fitting
    if task.schedules:
        fitting_settings += scheduled(task, fitting_settings)
    if not fitting_settings:
        # Now everything is tried, whatever its price.
        # Sorted from exact to coarse, so the first quantization that fits is the most exact.
        fitting_settings = next(
            filter(None, ([*candidates(task, SMALLEST, quantize)] for quantize in task.quantizations)), []
        )
    if not fitting_settings:
        return Fit(chosen=None, others={})
    fastest = min(fitting_settings, key=_rank)
    limit = fastest.score * (1 + HARDLY_LONGER)
    about_as_fast = [candidate for candidate in fitting_settings if candidate.score <= limit]
    # A plan may be off by a few percent, so settings with room to spare win over equally fast full ones.
    roomy = [
        candidate
        for candidate in (like.within(1 - ROOM) for like in about_as_fast)
        if candidate is not None and candidate.score <= limit
    ]
    chosen = _evened_out(_least_effort(roomy or about_as_fast), limit)
    exact = [candidate for candidate in fitting_settings if candidate.setting.quantize == "none"]
    others = {
        **({"fastest with exact weights": min(exact, key=_rank)} if exact else {}),
        "least memory": _smallest(fitting_settings),
        "fastest": min(fitting_settings, key=lambda candidate: (candidate.seconds, *_rank(candidate))),
    }
    # Others are printed for comparison: one that differs only in its split points is no choice.
    shown = {(chosen.setting.policy, chosen.setting.quantize, chosen.setting.swap)}
    for name, candidate in list(others.items()):
        key = (candidate.setting.policy, candidate.setting.quantize, candidate.setting.swap)
        if key in shown or candidate.setting == fastest.setting:
            del others[name]
        shown.add(key)
    return Fit(chosen=chosen, others=others)


def _policies(task: FitTask, quantize: str) -> tuple[str, ...]:
    first, *others = POLICIES
    names = task.profile_of(first, quantize).attention if task.schedules else ()
    policies = (first, *([SELF_ONLY] if "self" in names and len(names) > 1 else []), *others)
    return tuple(policy for policy in policies if task.accepts(policy, quantize))


def scheduled(task: FitTask, uniform: Sequence[Candidate]) -> list[Candidate]:
    """The best schedule for each division of these candidates, where blocks of different policies recompute less than blocks with the same policy."""
    tried: dict[Any, Candidate] = {}
    for candidate in uniform:
        key = (candidate.setting.gpus, candidate.division, candidate.setting.pipelined, candidate.setting.quantize)
        if key not in tried or candidate.seconds < tried[key].seconds:
            tried[key] = candidate
    schedules = [(candidate, fastest_schedule(task, candidate)) for candidate in tried.values()]
    return [candidate for like, candidate in schedules if candidate is not None and candidate.seconds < like.seconds]


def fastest_schedule(task: FitTask, like: Candidate, share: float = 1.0) -> Candidate | None:
    """Give each block the policy that recomputes least within the memory that a division leaves free; None if none fits.

    Args:
        like: Settings with one policy, whose division and formats are used.
        share: Largest share of each GPU's available memory to use.
    """
    setting = like.setting
    gpus = [task.gpus[i] for i in setting.gpus]
    budgets = [gpu.budget for gpu in gpus]
    work = replace(task.work, pipelined=setting.pipelined, quantize=setting.quantize)
    profile_of = cache(lambda policy: task.profile_of(str(policy), setting.quantize))
    limits = tuple(replace(budget, total=int(budget.available * share), reserve=0) for budget in budgets)
    problem = BudgetTask(
        profile_of=profile_of, division=like.division, budgets=limits, work=work, can_offload=False, gpus=tuple(gpus)
    )
    try:
        choice = choose(problem)
    except UserError:
        return None
    profile = mixed([profile_of(policy) for policy in choice.policies])
    schedule = replace(
        like,
        setting=replace(setting, policy=str(choice.schedule)),
        plan=compose(profile, like.division, budgets, work),
        seconds=step_seconds(profile, like.division, gpus, work),
        within=partial(fastest_schedule, task, like),
    )
    return schedule if task.host is None or schedule.host <= task.host else None


def candidates(task: FitTask, policy: str, quantize: str) -> Iterator[Candidate]:
    """For each choice of GPUs, with and without overlapping micro-batches, the fastest split that fits."""
    for pipelined in (False, True) if task.work.micro_batches > 1 and task.overlaps else (False,):
        search = Search(task, policy, quantize, pipelined=pipelined)
        for chosen in _choices(task.gpus):
            if (len(chosen) > 1 or not pipelined) and (candidate := search.fastest(chosen)) is not None:
                yield candidate


def least_missing(task: FitTask) -> int:
    """Bytes that the fullest GPU lacks under the smallest of all settings, or else the host; 0 if they fit."""
    missing = min(map(_smallest_search(task, SMALLEST).least_missing, _choices(task.gpus)))
    if missing or task.host is None:
        return missing
    needed = least_host(task)
    assert needed is not None, "it fits the GPUs"
    return max(0, needed - task.host)


def least_host(task: FitTask) -> int | None:
    """The fewest bytes on the host with which the smallest of all settings fit the GPUs; None if they do not."""
    # Of the two policies the first has less on the host where it fits.
    searches = [_smallest_search(task, policy) for policy in (POLICIES[0], SMALLEST)]
    needs = [search.least_host(chosen) for search in searches for chosen in _choices(task.gpus)]
    return min((needed for needed in needs if needed is not None), default=None)


def _smallest_search(task: FitTask, policy: str) -> Search:
    return Search(task, policy, task.quantizations[-1])


def shortest_seconds(task: FitTask) -> float:
    """A lower bound of a step's seconds: the fastest GPU without recompute, streaming or conversion, divided by the GPUs that can overlap."""
    profile = task.profile_of(POLICIES[0], "none")

    def without_recompute(stage: StageCost) -> StageCost:
        left = Counter(dict(stage.kernels_backward)) - Counter(dict(stage.kernels_forward))
        return replace(stage, kernels_backward=frozenset(left.items()))

    profile = replace(profile, blocks=tuple(without_recompute(block) for block in profile.blocks))
    undivided = Partition(devices=(0,) * len(profile.blocks))
    work = replace(task.work, pipelined=False, quantize="none")
    if work.is_replayed:  # where the GPU does not wait for launches, no step is shorter
        work = replace(work, cuda_graphs="on")
    fastest = min(step_seconds(profile, undivided, [gpu], work) for gpu in task.gpus)
    return fastest / (len(task.gpus) if task.work.micro_batches > 1 else 1)


def _evened_out(best: Candidate, limit: float) -> Candidate:
    """Settings that stream no more and score no worse than `limit`, with the fullest GPU as empty as possible."""
    return _emptiest(best, lambda candidate: candidate.score <= limit and candidate.host <= best.host)


def _smallest(candidates: Sequence[Candidate]) -> Candidate:
    """Settings with the fullest GPU as empty as possible, however slow, and with the most exact weights that fit."""
    policies = [
        candidate
        for candidate in candidates
        if candidate.setting.policy in (POLICIES[0], SMALLEST) and not candidate.setting.pipelined
    ]
    return _emptiest(
        min(policies, key=lambda candidate: (PRICE[candidate.setting.quantize], -len(candidate.setting.gpus))),
        lambda candidate: True,
    )


def _emptiest(best: Candidate, accepted: Callable[[Candidate], bool]) -> Candidate:
    # By bisection: how full the fullest GPU is depends on which blocks are streamed, and there are too many choices to try all.
    low = 0.0
    for _ in range(8):
        share = (low + best.fullness) / 2
        emptier = best.within(share)
        if emptier is not None and accepted(emptier):
            best = emptier
        else:
            low = share
    return best


def _least_effort(candidates: Sequence[Candidate]) -> Candidate:
    """Of about equally fast candidates the one with fewest GPUs, then least host memory. More GPUs are used if that saves a quarter of
    the host memory."""
    ordered = sorted(candidates, key=lambda candidate: (len(candidate.setting.gpus), *_effort(candidate)))
    best = ordered[0]
    for candidate in ordered:
        if candidate.host <= 0.75 * best.host and candidate.host < best.host:
            best = candidate
    return best


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    """Sort key: the fastest comes first, prices included."""
    return candidate.score, *_effort(candidate)


def _effort(candidate: Candidate) -> tuple[Any, ...]:
    """Sort key of equally fast candidates: least host memory first, then fewest GPUs, then the emptiest."""
    setting = candidate.setting
    return candidate.host, setting.pipelined, len(setting.gpus), candidate.fullness


def _choices(gpus: Sequence[GPU]) -> list[tuple[int, ...]]:
    """All choices of GPUs, in their order; of choices with equal GPUs only the first."""
    distinct: dict[tuple[GPU, ...], tuple[int, ...]] = {}
    for count in range(1, len(gpus) + 1):
        for chosen in combinations(range(len(gpus)), count):
            distinct.setdefault(tuple(gpus[i] for i in chosen), chosen)
    return list(distinct.values())
