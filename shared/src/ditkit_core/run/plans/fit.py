"""What `--fit` searches for a run, and what it changes in it: GPUs, settings of the steps, encoders.

`task_for` is the search problem of a run, which `planner/fit.py` solves. Start reading at
`fit_process`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ditkit_core.config.sizes import per_device
from ditkit_core.engine.devices import choose_device, choose_devices
from ditkit_core.errors import UserError
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.auxiliary import AuxiliaryRow
from ditkit_core.planner.fit import POLICIES, Fit, RankFit, fit_ranks, least_missing
from ditkit_core.planner.gpus import GPU, gpus_here, keeping_reserves, parse_gpus
from ditkit_core.planner.memory import Profile
from ditkit_core.planner.rank_layout import RankLayout, parse_links
from ditkit_core.planner.rank_step import profile_of_rank
from ditkit_core.planner.search import Candidate, FitTask, task_of
from ditkit_core.planner.targets import check_formats
from ditkit_core.run.checks import check_ranks
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run, with_config
from ditkit_core.run.plans.changes import (
    Level,
    SuggestedChange,
    accepted,
    fit_levels,
    levels,
    levers,
)
from ditkit_core.run.plans.plan import check_plannable, planned_step

_FIRST = {"auto": "cuda:0", "cuda": "cuda:0"}
"""Device that a name without an index means on a machine with a GPU."""


def gpus_to_fit(config: RunConfig, gpus: str) -> tuple[tuple[GPU, ...], tuple[str, ...]]:
    """The GPUs to choose among, of the `--gpus` flag or of this machine, with train.reserve kept
    free, and the name of each in train.devices."""
    if gpus:
        candidates = parse_gpus(gpus)
        # One name more than GPUs: the device that generates previews is skipped.
        free = [f"cuda:{i}" for i in range(len(candidates) + 1) if not _samples_on(config, i)]
        names = tuple(free[: len(candidates)])
    else:
        devices = _devices_here(config)
        candidates, names = gpus_here(devices), tuple(map(str, devices))
    return keeping_reserves(candidates, config.train.reserve), names


def _devices_here(config: RunConfig) -> tuple[torch.device, ...]:
    if config.train.devices:
        return choose_devices(config.train.devices)
    if config.train.device == "auto":
        devices = (
            choose_devices(("all",))
            if torch.cuda.is_available()
            else (choose_device("auto", "train.device"),)
        )
        training = [
            device
            for device in devices
            if device.type == "cpu" or not _samples_on(config, device.index)
        ]
        return tuple(training) or devices
    return choose_devices((config.train.device,))


def _samples_on(config: RunConfig, index: int) -> bool:
    """Whether previews are generated on this GPU, which then does not train."""
    name = config.sample.device
    if not name.startswith("cuda"):
        return False
    number = name.removeprefix("cuda").removeprefix(":")
    return int(number or 0) == index


def task_for(run: RunContext, gpus: tuple[GPU, ...], host: int | None = None) -> FitTask:
    """The search problem of a run on these GPUs; `host` is the page-locked memory in bytes, None
    for no limit."""
    check_formats(run.config.base.compute, gpus)
    task = task_of(planned_step(run, gpus=gpus).job, gpus, host)
    # The run's, in which train.kernels is what the configuration has, and not yet resolved as in a
    # plan.
    return replace(task, execution=run.execution)


def fit_process(
    run: RunContext, gpus: tuple[GPU, ...], host: int | None = None
) -> tuple[Level, FitTask, Fit]:
    """The settings of a process alone: the first level of changes with which something fits, with
    its search; the last one if nothing does."""

    def task_with(config: RunConfig) -> FitTask:
        changed = with_config(run, config)
        check_plannable(changed, here=False)
        return task_for(changed, gpus, host)

    return fit_levels(run.config, task_with)


def fit_over_ranks(
    run: RunContext, gpu: GPU, ranks: RankLayout, link: str, host: int | None = None
) -> tuple[Level, RankFit | int]:
    """How ranks divide a run, under the first level of changes with which something fits; or the
    level with which each rank lacks least, and how many bytes. `host` is of each rank."""

    def divide(config: RunConfig) -> RankFit | int:
        changed = with_config(run, config)
        check_plannable(changed, here=False)
        return division_of(changed, tasks_of(changed, gpu, host), ranks, link)

    lacking: list[tuple[int, Level]] = []
    for level, division in accepted(levels(run.config, in_backward=False), divide):
        if isinstance(division, RankFit):
            return level, division
        lacking.append((division, level))
    missing, level = min(lacking, key=lambda pair: pair[0])
    return level, missing


def tasks_of(run: RunContext, gpu: GPU, host: int | None = None) -> Callable[[int], FitTask]:
    """The search problems of a rank with the whole model, by the number of ranks that share each
    sample; each is made once. `host` is the page-locked memory of each rank in bytes; None for no
    limit."""
    return cache(
        lambda context: task_for(
            _divided(run, RankLayout(nproc=context, context=context)), (gpu,), host
        )
    )


def division_of(
    run: RunContext, tasks: Callable[[int], FitTask], ranks: RankLayout, link: str
) -> RankFit | int:
    """How ranks divide a run, by problems from `tasks_of`; or the bytes that each lacks if nothing
    fits."""
    parse_links(link, ranks)  # a mistake in it is reported before the search
    refused: list[str] = []

    def task_of_rank(layout: RankLayout) -> FitTask | None:
        try:
            check_ranks(_divided(run, layout), layout.size)
        except UserError as error:
            refused.append(str(error))
            return None
        task = tasks(layout.context)

        @cache
        def profile_of(policy: str, quantize: str) -> Profile:
            return profile_of_rank(
                task.profile_of(policy, quantize), layout, run.precision.reduction
            )

        return replace(task, profile_of=profile_of, streams=layout.shard == 1)

    division = fit_ranks(task_of_rank, ranks, link)
    if division is None:
        raise UserError(refused[0])
    return division


def _divided(run: RunContext, layout: RankLayout) -> RunContext:
    """The run with ranks that divide it so, and without the settings that the search chooses."""
    train = replace(run.config.train, swap_blocks=(), checkpointing=POLICIES[0])
    ranks = replace(run.config.ranks, shard=layout.shard, context=layout.context)
    return with_config(run, replace(run.config, train=train, ranks=ranks))


def with_encoding(
    level: Level, auxiliary: Callable[[RunConfig], tuple[AuxiliaryRow, ...]]
) -> tuple[Level, tuple[AuxiliaryRow, ...]]:
    """Change how a run encodes, one setting after the other, until encoders fit. With the plan of
    its encoders and samples."""

    def num_lacking(rows: Sequence[AuxiliaryRow]) -> int:
        return sum(row.fits is False for row in rows if row.stage == "encode")

    rows = auxiliary(level.config)
    changes: tuple[dict[str, Any], ...] = (
        {"vae_tiling": True},
        {"streaming": "always"},
        {"device": "cpu"},
    )
    for values in changes:
        if not num_lacking(rows):
            break
        attempt = level.then("encode", **values)
        rows_of_attempt = auxiliary(attempt.config)
        if num_lacking(rows_of_attempt) < num_lacking(rows):
            level, rows = attempt, rows_of_attempt
    return level, rows


def apply(config: RunConfig, chosen: Candidate, names: Sequence[str]) -> RunConfig:
    """The configuration with the chosen settings; everything that is not searched stays as it
    is."""
    execution, used = chosen.execution, [names[i] for i in chosen.gpus]
    if len(used) > 1:
        device, devices = "auto", tuple(used)
    else:  # with one GPU to choose from, a name like `cuda` stays as the user wrote it
        before = execution.device
        keeps = len(names) == 1 and not execution.devices and _FIRST.get(before, before) == used[0]
        device, devices = before if keeps else used[0], ()
    reserve = execution.reserve
    if len(reserve) > 1:
        reserve = tuple(per_device(reserve, len(names), "train.reserve")[i] for i in chosen.gpus)
    return config.with_execution(
        replace(execution, device=device, devices=devices, reserve=reserve)
    )


def changes(spec: ModelSpec, config: RunConfig, task: FitTask) -> list[SuggestedChange]:
    """Plans of single changes, the best first: of each kind the mildest that fits, or else the
    strongest."""
    planned = []
    for lever in levers(spec, config, task.gpus):
        for change in lever:
            result = replace(
                change, missing=least_missing(after_change(change, spec, config, task))
            )
            # a lever lists its changes from mild to strong: stronger ones cost more quality
            if not result.missing:
                break
        if lever:
            planned.append(result)
    # First those with which the run fits, the least costly first; then the others, by missing
    # bytes.
    return sorted(planned, key=lambda change: (change.missing, change.lost_share))


def after_change(
    change: SuggestedChange, spec: ModelSpec, config: RunConfig, task: FitTask
) -> FitTask:
    """The search problem after a change."""
    if change.config is config:  # other GPUs alone: the profiles are the same
        return replace(task, gpus=change.gpus)
    return task_for(create_run(spec, change.config), change.gpus, task.host)
