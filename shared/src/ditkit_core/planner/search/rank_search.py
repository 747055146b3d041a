"""How ranks divide a run so that it fits their GPUs and is fastest.

For each way to divide it, `autotune.fit` chooses the settings of a rank, and the time of its exchanges is added. Ranks share samples only where
nothing fits without that: the exchanges of tokens cost time, and fewer samples are trained at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ditkit_core.planner.ranks.divided import work_of_rank
from ditkit_core.planner.ranks.layout import RankLayout
from ditkit_core.planner.ranks.links import parse_links
from ditkit_core.planner.ranks.traffic import RanksPlan, RankStep
from ditkit_core.planner.search.autotune import HARDLY_LONGER, fit, least_missing
from ditkit_core.planner.search.partition_search import PRICE, Candidate, FitTask


@dataclass(frozen=True, kw_only=True)
class RankFit:
    """A way to divide a run, with the settings of a rank."""

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
        return self.seconds * PRICE[self.chosen.setting.quantize]


def layouts(ranks: RankLayout) -> Iterator[list[RankLayout]]:
    """All ways of so many ranks to divide weights, by the number that share each sample, which are on one machine."""
    for context in _divisors(ranks.nproc):
        shards = [shard for shard in _divisors(ranks.size) if shard % context == 0 or context % shard == 0]
        yield [replace(ranks, shard=shard, context=context) for shard in shards]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def fit_ranks(task_of: Callable[[RankLayout], FitTask | None], ranks: RankLayout, link: str) -> RankFit | int | None:
    """The fastest way that fits; or the bytes that a GPU lacks, if none does; None if the run cannot be divided at all.

    Args:
        task_of: The search problem of a rank, with the work of the whole step; None if the run cannot be divided so.
        ranks: Processes and machines.
        link: As for `parse_links`.
    """
    missing = []
    for group in layouts(ranks):
        tasks = [(layout, task) for layout in group if (task := task_of(layout)) is not None]
        fits = [candidate for layout, task in tasks if (candidate := _fitted(layout, task, link)) is not None]
        if fits:
            # Of about equally fast ways the one that divides least: replicas change no bit, and need no gathers.
            limit = min(candidate.score for candidate in fits) * (1 + HARDLY_LONGER)
            return min(
                (candidate for candidate in fits if candidate.score <= limit),
                key=lambda candidate: (candidate.layout.shard, candidate.score),
            )
        missing += [least_missing(_of_rank(layout, task)) for layout, task in tasks]
    return min(missing, default=None)


def _of_rank(layout: RankLayout, task: FitTask) -> FitTask:
    return replace(task, work=work_of_rank(task.work, layout, adapts=task.adapts))


def _fitted(layout: RankLayout, task: FitTask, link: str) -> RankFit | None:
    chosen = fit(_of_rank(layout, task)).chosen
    if chosen is None:
        return None
    setting = chosen.setting
    step = RankStep(
        layout=layout,
        profile=task.profile_of(setting.policy, setting.quantize),
        division=chosen.division,
        work=replace(task.work, quantize=setting.quantize),
        gpu=task.gpus[0],
    )
    return RankFit(layout=layout, chosen=chosen, plan=step.plan(parse_links(link, layout), chosen.host))
