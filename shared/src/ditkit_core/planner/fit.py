"""The settings that let a step fit its GPUs and slow it down least: the search of `--fit`.

`candidates` are the choices of checkpointing policy, format of the frozen weights, GPUs, split
points, streamed blocks, and overlapping or replayed micro-batches, each with its plan. `fit` picks
one of those that fit. `fit_ranks` also chooses how ranks divide the step. `fitted` is the same
search for a step that needs no run:

    step = plan(spec, arch, Execution(), batch, "2x16GiB")
    execution = step.job.execution if step.fits else fitted(step)

Only quantization changes the training result, so it has a price: 8-bit weights are chosen only if
the fastest exact setting takes more than `PRICE` times as long, and 4 bits by the same rule against
8 bits.

If no settings fit, `run/plans/changes.py` lists changes of the run itself, or of the GPUs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from typing import Any

from ditkit_core.config.sizes import gib
from ditkit_core.errors import UserError
from ditkit_core.execution import Execution
from ditkit_core.planner.ac_budget import BudgetTask, choose
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.memory import Partition, StageCost, compose, mixed
from ditkit_core.planner.plan import StepPlan
from ditkit_core.planner.rank_layout import RankLayout, parse_links
from ditkit_core.planner.rank_step import RanksPlan, RankStep, work_of_rank
from ditkit_core.planner.search import PRICE, Candidate, FitTask, Search, task_of
from ditkit_core.planner.step_time import step_seconds

POLICIES = ("full", "attn_only", "none")
"""From the smallest to the fastest: if one does not fit, the later ones need even more memory."""
SMALLEST = "full+offload"
"""Tried only if none of them fits, because it uses host memory and may wait for copies."""
SELF_ONLY = "attn_only(self)"
"""Between the first two, for blocks with more than one attention: tried where blocks may have
different policies."""
HARDLY_LONGER = 0.03
"""Share of the fastest step's time that may be given up for GPUs with room to spare, less host
memory for streamed weights, fewer GPUs, and emptier GPUs. The estimate of time is no more accurate
than that."""
ROOM = 0.05
"""Share of a GPU's available memory that stays free if that costs no time: the error that a plan
may have."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The result of a search."""

    chosen: Candidate | None = None
    """None if nothing fits."""
    others: dict[str, Candidate]
    """Other settings that fit, by their advantage."""


def fit(task: FitTask) -> Fit:
    """Find the settings that fit and slow the run down least, prices of quantization included."""
    fitting: list[Candidate] = []
    for quantize in task.quantizations:
        # No quantized setting is faster than its arithmetic alone. If that loses with its price,
        # skip its profiles, which take seconds each.
        if (
            fitting
            and min(candidate.score for candidate in fitting)
            <= shortest_seconds(task) * PRICE[quantize]
        ):
            continue
        for policy in _policies(task, quantize):
            # Sorted by memory, so if this policy does not fit, no later one does.
            if not (of_policy := list(candidates(task, policy, quantize))):
                break
            fitting += of_policy
    if not task.adapts:
        fitting += scheduled(task, fitting)
    if not fitting:
        # Now everything is tried, whatever its price.
        # Sorted from exact to coarse, so the first quantization that fits is the most exact.
        smallest = ([*candidates(task, SMALLEST, quantize)] for quantize in task.quantizations)
        fitting = next(filter(None, smallest), [])
    if not fitting:
        return Fit(others={})
    fastest = min(fitting, key=_rank)
    chosen = _pick(fitting, fastest.score * (1 + HARDLY_LONGER))
    exact = [candidate for candidate in fitting if candidate.execution.quantize == "none"]
    others = {
        **({"fastest with exact weights": min(exact, key=_rank)} if exact else {}),
        "least memory": _smallest(fitting),
        "fastest": min(fitting, key=lambda candidate: (candidate.seconds, *_rank(candidate))),
    }
    # Others are printed for comparison: one that differs only in its split points is no choice.
    shown, distinct = {_shown(chosen)}, dict[str, Candidate]()
    for name, candidate in others.items():
        if _shown(candidate) not in shown and candidate != fastest:
            distinct[name] = candidate
        shown.add(_shown(candidate))
    return Fit(chosen=chosen, others=distinct)


def candidates(task: FitTask, policy: str, quantize: str) -> Iterator[Candidate]:
    """For each choice of GPUs, with and without overlapping micro-batches, the fastest split that
    fits; and without replays, where those are what does not fit one GPU."""
    for pipelined in (False, True) if task.work.micro_batches > 1 and task.overlaps else (False,):
        search = Search(task, task.varied(policy, quantize, pipelined=pipelined))
        for chosen in _choices(task.gpus):
            if pipelined and len(chosen) == 1:
                continue
            if (candidate := search.fastest(chosen)) is not None:
                yield candidate
            if (
                len(chosen) == 1
                and task.work.has_cuda_graphs
                and (candidate is None or candidate.execution.swap_blocks)
            ):
                without = Search(task, task.varied(policy, quantize, cuda_graphs="off")).fastest(
                    chosen
                )
                if without is not None and not without.execution.swap_blocks:
                    yield without


def scheduled(task: FitTask, uniform: Sequence[Candidate]) -> list[Candidate]:
    """The best schedule for each division of these candidates, where blocks of different policies
    recompute less than blocks with the same policy."""
    tried: dict[Any, Candidate] = {}
    for candidate in uniform:
        execution = candidate.execution
        key = (
            candidate.gpus,
            candidate.division,
            execution.pipelined,
            execution.quantize,
            execution.cuda_graphs,
        )
        if key not in tried or candidate.seconds < tried[key].seconds:
            tried[key] = candidate
    schedules = [(candidate, fastest_schedule(task, candidate)) for candidate in tried.values()]
    return [
        candidate
        for like, candidate in schedules
        if candidate is not None and candidate.seconds < like.seconds
    ]


def fastest_schedule(task: FitTask, like: Candidate, share: float = 1.0) -> Candidate | None:
    """Give each block the policy that recomputes least within the memory that a division leaves
    free, or a share of it; None if none fits. The division and the formats are the ones that `like`
    has, settings with one policy."""
    execution, gpus = like.execution, tuple(task.gpus[i] for i in like.gpus)
    budgets = [gpu.budget for gpu in gpus]
    work = task.work_of(execution)
    profile_of = cache(lambda policy: task.profile_of(str(policy), execution.quantize))
    limits = tuple(
        replace(budget, total=int(budget.available * share), reserve=0) for budget in budgets
    )
    try:
        choice = choose(
            BudgetTask(
                profile_of=profile_of,
                division=like.division,
                budgets=limits,
                work=work,
                can_offload=False,
                gpus=gpus,
            )
        )
    except UserError:
        return None
    profile = mixed([profile_of(policy) for policy in choice.policies])
    schedule = replace(
        like,
        execution=replace(execution, checkpointing=str(choice.schedule)),
        plan=compose(profile, like.division, budgets, work),
        seconds=step_seconds(profile, like.division, gpus, work),
        within=partial(fastest_schedule, task, like),
    )
    return schedule if task.host is None or schedule.host <= task.host else None


def least_missing(task: FitTask) -> int:
    """Bytes that the fullest GPU lacks under the smallest of all settings, or else the host; 0 if
    they fit."""
    search = Search(task, task.varied(SMALLEST, task.quantizations[-1]))
    missing = min(map(search.least_missing, _choices(task.gpus)))
    if missing or task.host is None:
        return missing
    needed = least_host(task)
    assert needed is not None, "it fits the GPUs"
    return max(0, needed - task.host)


def least_host(task: FitTask) -> int | None:
    """The fewest bytes on the host with which the smallest of all settings fit the GPUs; None if
    they do not."""
    # Of the two policies the first has less on the host where it fits.
    searches = [
        Search(task, task.varied(policy, task.quantizations[-1]))
        for policy in (POLICIES[0], SMALLEST)
    ]
    needs = [search.least_host(chosen) for search in searches for chosen in _choices(task.gpus)]
    return min((needed for needed in needs if needed is not None), default=None)


def shortest_seconds(task: FitTask) -> float:
    """A lower bound of a step's seconds: the fastest GPU without recompute, streaming or
    conversion, divided by the GPUs that can overlap."""
    profile = task.profile_of(POLICIES[0], "none")

    def without_recompute(stage: StageCost) -> StageCost:
        left = Counter(dict(stage.kernels_backward)) - Counter(dict(stage.kernels_forward))
        return replace(stage, kernels_backward=frozenset(left.items()))

    profile = replace(profile, blocks=tuple(without_recompute(block) for block in profile.blocks))
    undivided = Partition(devices=(0,) * len(profile.blocks))
    work = task.work_of(task.varied(POLICIES[0], "none"))
    if work.has_cuda_graphs:  # where the GPU does not wait for launches, no step is shorter
        work = replace(work, cuda_graphs="on")
    fastest = min(step_seconds(profile, undivided, [gpu], work) for gpu in task.gpus)
    return fastest / (len(task.gpus) if task.work.micro_batches > 1 else 1)


@dataclass(frozen=True, kw_only=True)
class RankFit:
    """A way to divide a step over ranks, with the settings of a rank."""

    layout: RankLayout
    chosen: Candidate
    plan: RanksPlan

    @property
    def seconds(self) -> float:
        """Of a step with its exchanges, over the first of the links."""
        return self.plan.times[0].step or 0.0

    @property
    def score(self) -> float:
        """Seconds, times the price of the weights' format."""
        return self.seconds * PRICE[self.chosen.execution.quantize]


def fit_ranks(
    task_of: Callable[[RankLayout], FitTask | None], ranks: RankLayout, link: str
) -> RankFit | int | None:
    """The fastest way to divide a step over ranks that fits; or the bytes that a GPU lacks, if none
    does; None if it cannot be divided at all.

    For each way `fit` chooses the settings of a rank, and the time of its exchanges is added. Ranks
    share samples only where nothing fits without that: the exchanges of tokens cost time, and fewer
    samples are trained at once. `task_of` is the search problem of a rank, with the work of the
    whole step; None if the run cannot be divided so.
    """
    missing: list[int] = []
    for context in _divisors(ranks.nproc):
        shards = [
            shard for shard in _divisors(ranks.size) if shard % context == 0 or context % shard == 0
        ]
        fits: list[RankFit] = []
        for layout in (replace(ranks, shard=shard, context=context) for shard in shards):
            if (task := task_of(layout)) is None:
                continue
            of_rank = replace(task, work=work_of_rank(task.work, layout, adapts=task.adapts))
            chosen = fit(of_rank).chosen
            if chosen is None:
                missing.append(least_missing(of_rank))
                continue
            execution = chosen.execution
            step = RankStep(
                layout=layout,
                profile=task.profile_of(str(execution.checkpointing), execution.quantize),
                division=chosen.division,
                work=task.work_of(execution),
                gpu=task.gpus[0],
            )
            plan = step.plan(parse_links(link, layout), chosen.host)
            fits.append(RankFit(layout=layout, chosen=chosen, plan=plan))
        if fits:
            # Of about equally fast ways the one that divides least: replicas change no bit, and
            # need no gathers.
            limit = min(way.score for way in fits) * (1 + HARDLY_LONGER)
            return min(
                (way for way in fits if way.score <= limit),
                key=lambda way: (way.layout.shard, way.score),
            )
    return min(missing, default=None)


def fitted(step: StepPlan) -> Execution:
    """Choose the policy, the format of the frozen weights, the GPUs to use, split points, streamed
    blocks and replays, for a step planned on GPUs.

    Only the format of the weights changes results: a coarser one is chosen if the finer one makes a
    step slower by more than `PRICE` says, or does not fit.
    """
    job, targets = step.job, step.targets
    if not targets.gpus:
        raise UserError(
            "a step is fitted to GPUs, and this plan is for a CPU; name GPUs, such as gpus='24GiB'"
        )
    task = task_of(job, targets.gpus, targets.host)
    chosen = fit(task).chosen
    if chosen is None:
        raise UserError(
            f"nothing fits: the fullest GPU, or the host, still lacks {gib(least_missing(task))} "
            f"GiB; use a smaller batch, or larger GPUs"
        )
    names = tuple(str(targets.devices[index]) for index in chosen.gpus)
    return replace(chosen.execution, device="auto", devices=names)


def _policies(task: FitTask, quantize: str) -> tuple[str, ...]:
    first, *others = POLICIES
    names = () if task.adapts else task.profile_of(first, quantize).attention
    return (first, *([SELF_ONLY] if "self" in names and len(names) > 1 else []), *others)


def _choices(gpus: Sequence[GPU]) -> list[tuple[int, ...]]:
    """All choices of GPUs, in their order; of choices with equal GPUs only the first."""
    distinct: dict[tuple[GPU, ...], tuple[int, ...]] = {}
    for count in range(1, len(gpus) + 1):
        for chosen in combinations(range(len(gpus)), count):
            distinct.setdefault(tuple(gpus[i] for i in chosen), chosen)
    return list(distinct.values())


def _pick(fitting: Sequence[Candidate], limit: float) -> Candidate:
    """Of settings that score at most `limit` those of least effort, the fullest GPU as empty as
    possible."""
    about_as_fast = [candidate for candidate in fitting if candidate.score <= limit]
    # A plan may be off by a few percent, so settings with room to spare win over equally fast full
    # ones.
    with_room = [
        candidate
        for full in about_as_fast
        if (candidate := full.within(1 - ROOM)) is not None and candidate.score <= limit
    ]
    # Fewest GPUs first, then least host memory. More GPUs are used if that saves a quarter of the
    # host memory.
    first, *others = sorted(
        with_room or about_as_fast, key=lambda candidate: (len(candidate.gpus), *_effort(candidate))
    )
    best = first
    for candidate in others:
        if candidate.host <= 0.75 * best.host and candidate.host < best.host:
            best = candidate
    most_on_host = best.host
    return _emptiest(
        best, lambda candidate: candidate.score <= limit and candidate.host <= most_on_host
    )


def _smallest(fitting: Sequence[Candidate]) -> Candidate:
    """Settings with the fullest GPU as empty as possible, however slow, and with the most exact
    weights that fit."""
    small = [
        candidate
        for candidate in fitting
        if candidate.execution.checkpointing in (POLICIES[0], SMALLEST)
        and not candidate.execution.pipelined
    ]
    best = min(
        small, key=lambda candidate: (PRICE[candidate.execution.quantize], -len(candidate.gpus))
    )
    return _emptiest(best, lambda candidate: True)


def _emptiest(best: Candidate, accepted: Callable[[Candidate], bool]) -> Candidate:
    # By bisection: how full the fullest GPU is depends on which blocks are streamed, and there are
    # too many choices to try all.
    low = 0.0
    for _ in range(8):
        share = (low + best.fullness) / 2
        emptier = best.within(share)
        if emptier is not None and accepted(emptier):
            best = emptier
        else:
            low = share
    return best


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    """Sort key: the fastest comes first, prices included."""
    return candidate.score, *_effort(candidate)


def _effort(candidate: Candidate) -> tuple[Any, ...]:
    """Sort key of equally fast candidates: least host memory first, then fewest GPUs, then the
    emptiest."""
    return candidate.host, candidate.execution.pipelined, len(candidate.gpus), candidate.fullness


def _shown(candidate: Candidate) -> tuple[Any, ...]:
    execution = candidate.execution
    return execution.checkpointing, execution.quantize, candidate.swap_blocks, execution.cuda_graphs


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
