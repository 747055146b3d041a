"""`--fit` for several ranks: how they divide a run, and the settings of each."""

import functools
from collections.abc import Callable
from dataclasses import replace

from ditkit_core.commands.fit_task import FitResult, apply, in_words, task_for
from ditkit_core.config.sizes import GIB
from ditkit_core.errors import UserError
from ditkit_core.planner.gpus import GPU, weakest
from ditkit_core.planner.memory import Profile
from ditkit_core.planner.planned_step import with_planned_kernels
from ditkit_core.planner.ranks.divided import profile_of_rank
from ditkit_core.planner.ranks.layout import RankLayout
from ditkit_core.planner.ranks.links import parse_links
from ditkit_core.planner.search.autotune import POLICIES
from ditkit_core.planner.search.partition_search import FitTask
from ditkit_core.planner.search.rank_search import RankFit, fit_ranks
from ditkit_core.planner.step_time import assumptions
from ditkit_core.run.checks import check_ranks
from ditkit_core.run.context import RunContext, with_config
from ditkit_core.run.plans.levels import Level, levels
from ditkit_core.run.plans.plan import check_plannable
from ditkit_core.run.plans.planned_step import job_of


def fit_over_ranks(run: RunContext, gpus: tuple[GPU, ...], ranks: RankLayout, link: str, host: int | None) -> FitResult:
    """The division over ranks, and the settings of each."""
    gpu = weakest(gpus)
    level, division = _first_that_fits(run, gpu, ranks, link, None if host is None else host // ranks.nproc)
    changed = [f"changed: {change}" for change in level.changed]
    if isinstance(division, int):
        words = f"nothing fits: however {ranks.size} ranks divide the run, each still lacks {division / GIB:.2f} GiB"
        return FitResult(config=run.config, lines=[*changed, words])
    if changed:
        changed.insert(
            0, "nothing fits as configured, so these settings are changed too, from what changes numbers least"
        )
    layout, before, time = division.layout, run.config.ranks, division.plan.times[0]
    config = apply(level.config, division.chosen, ("cuda:0",))
    config = replace(
        config,
        ranks=replace(before, shard=layout.shard, context=layout.context),
        train=replace(config.train, device="auto"),  # each rank takes its own
    )
    title = f"{layout}: ranks.shard = {layout.shard}, ranks.context = {layout.context}"
    (plan,) = division.chosen.plan
    job = job_of(run, run.arch, run.config.adapter, None, "cuda")
    work = replace(job, execution=with_planned_kernels(job.execution, "cuda", (gpu,))).work
    memory = f"{plan.peak / GIB:.1f} GiB at the peak and {plan.budget.reserve / GIB:.1f} GiB in reserve, of {plan.budget.total / GIB:.1f} GiB"
    lines = [
        *changed,
        f"fits: {title} (were {before.shard} and {before.context}), {in_words(division.chosen, ('each rank',))}",
        f"each rank ({plan.budget.name}): {memory}; page-locked host memory of a machine: {division.plan.host_of_machine / GIB:.1f} GiB",
        f"about {division.seconds:.2g} s a step with exchanges, of which {time.exposed:.2g} s are not hidden; efficiency {time.efficiency or 0:.0%}",
        f"exchanges are an estimate: {time.rates}",
        *(f"the time is an estimate: {line}" for line in assumptions([gpu], work)),
    ]
    return FitResult(config=config, lines=lines, chosen=division.chosen, title=title, level=level)


def _first_that_fits(
    run: RunContext, gpu: GPU, ranks: RankLayout, link: str, host: int | None
) -> tuple[Level, RankFit | int]:
    """The first level of a full fine-tune's levers with which ranks can divide the run, or else the one that lacks least."""
    lacking: list[tuple[int, Level]] = []
    for level in levels(run.config, in_backward=False):
        changed = with_config(run, level.config)
        try:
            check_plannable(changed, here=False)
            division = division_of(changed, tasks_of(changed, gpu, host), ranks, link)
        except UserError:
            if not level.changed:
                raise
            continue  # it contradicts another setting
        if isinstance(division, RankFit):
            return level, division
        lacking.append((division, level))
    missing, level = min(lacking, key=lambda pair: pair[0])
    return level, missing


def tasks_of(run: RunContext, gpu: GPU, host: int | None = None) -> Callable[[int], FitTask]:
    """The search problems of a rank with the whole model, by the number of ranks that share each sample; each is made once.

    Args:
        run: The run.
        gpu: The GPU of a rank.
        host: Page-locked memory of each rank in bytes; None for no limit.
    """

    @functools.cache
    def task_of(context: int) -> FitTask:
        return replace(task_for(_divided(run, RankLayout(nproc=context, context=context)), (gpu,)), host=host)

    return task_of


def division_of(run: RunContext, tasks: Callable[[int], FitTask], ranks: RankLayout, link: str) -> RankFit | int:
    """How ranks divide a run; or the bytes that each lacks if nothing fits.

    Args:
        tasks: From `tasks_of`.
        ranks: Processes and machines.

    Raises:
        UserError: If the run cannot have these ranks.
    """
    parse_links(link, ranks)  # a mistake in it is reported before the search
    refused: list[str] = []

    def task_of(layout: RankLayout) -> FitTask | None:
        try:
            check_ranks(_divided(run, layout), layout.size)
        except UserError as error:
            refused.append(str(error))
            return None
        task = tasks(layout.context)

        @functools.cache
        def profile_of(policy: str, quantize: str) -> Profile:
            return profile_of_rank(task.profile_of(policy, quantize), layout, run.precision.reduction)

        return replace(task, profile_of=profile_of, streams=layout.shard == 1)

    division = fit_ranks(task_of, ranks, link)
    if division is None:
        raise UserError(refused[0])
    return division


def _divided(run: RunContext, layout: RankLayout) -> RunContext:
    """The run with ranks that divide it so, and without the settings that the search chooses."""
    train = replace(run.config.train, swap_blocks=(), checkpointing=POLICIES[0])
    ranks = replace(run.config.ranks, shard=layout.shard, context=layout.context)
    return with_config(run, replace(run.config, train=train, ranks=ranks))
