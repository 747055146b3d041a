"""`--fit`: choose the settings with which a run fits its devices, and print the configuration with them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.plan import DOES_NOT_FIT
from ditkit_core.config.sizes import GIB, per_device
from ditkit_core.config.toml import to_toml
from ditkit_core.engine.devices import choose_device, choose_devices
from ditkit_core.errors import UserError
from ditkit_core.io.console import doing, say, warn
from ditkit_core.io.files import write_text
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.auxiliary import AuxiliaryRow
from ditkit_core.planner.auxiliary_plan import plan_auxiliary
from ditkit_core.planner.gpus import GPU, gpus_here, keeping_reserves, parse_gpus, weakest
from ditkit_core.planner.memory import Profile
from ditkit_core.planner.partition import host_limit
from ditkit_core.planner.plan import check_formats, check_plannable, num_gpus, planned_step
from ditkit_core.planner.planned_step import work_of
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.rank_search import RankFit, fit_ranks
from ditkit_core.planner.ranks.divided import profile_of_rank
from ditkit_core.planner.ranks.layout import PlannedLaunch, RankLayout, layout_of
from ditkit_core.planner.ranks.links import parse_links
from ditkit_core.planner.report import describe_shortfall
from ditkit_core.planner.search import update_search
from ditkit_core.planner.search.autotune import (
    POLICIES,
    Fit,
    Planned,
    SuggestedChange,
    best_first,
    fit,
    least_host,
    least_missing,
    levers,
)
from ditkit_core.planner.search.partition_search import PRICE, Candidate, FitTask
from ditkit_core.planner.search.update_search import Level
from ditkit_core.planner.step_time import BUFFERS, assumptions
from ditkit_core.run.checks import check_preview_device, check_ranks
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run, with_config
from ditkit_core.training.trainer import check_swap

_FIRST = {"auto": "cuda:0", "cuda": "cuda:0"}
"""Device that a name without an index means on a machine with a GPU."""


def fit_run(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> int:
    """Choose settings for the GPUs, print the whole configuration to stdout, and its memory and the reasons to stderr.

    The search covers train.checkpointing, devices, split_points, swap_blocks and pipelined, and base.quantize. If nothing fits a full
    fine-tune otherwise, it also changes optim.fused_backward, train.clip_by, model.dtype, optim.rounding and optim.name, and prints each
    change. Everything else stays as configured.

    Returns:
        The exit status that a plan of the chosen settings has: 0; or 3 if no settings fit, or if encoding or sampling does not fit with
        them.

    Raises:
        UserError: If a GPU or the model is unknown, or the file to write exists.
    """
    out = Path(options.write) if options.write else None
    if out is not None and out.exists():
        raise UserError(f"--write {out} exists, and nothing is overwritten; give another name, or remove it")
    run = create_run(spec, config)
    launch = PlannedLaunch(nproc=options.nproc, nodes=options.nodes, link=options.link)
    ranks = layout_of(run.config, num_gpus(run, options.gpus), launch)
    check_plannable(run, here=False)  # the configured devices are not checked: the search chooses among all
    gpus, names = gpus_to_fit(run.config, options.gpus)
    host = host_limit(options.host, here=not options.gpus)
    found = _fit_process(run, gpus, names, host) if ranks is None else _fit_ranks(run, gpus, ranks, launch.link, host)
    for line in found.lines:
        warn(line)
    if found.chosen is None:
        return DOES_NOT_FIT
    fitted = found.config
    if not options.gpus:  # a GPU that train.device or train.devices names may be the one that generates previews
        check_preview_device(create_run(spec, fitted))
    # The search is about training steps; encoders and samples get the memory that it leaves, and are checked afterwards.
    per_machine = 1 if ranks is None else ranks.nproc
    auxiliary = auxiliary_of(create_run(spec, fitted), found.chosen, gpus=bool(options.gpus), per_machine=per_machine)
    lacking = [row for row in auxiliary if row.fits is False]
    for row in lacking:
        warn(describe_shortfall(row, bool(fitted.sample.every_steps and not fitted.sample.device)))
    if lacking:
        warn("training fits, but the items above do not; change them in these settings before you use the settings")
    changed = "".join(f"# changed: {each}\n" for each in found.level.changed) if found.level else ""
    text = f"# {found.title}\n# for {', '.join(gpu.name for gpu in gpus)}\n{changed}\n{to_toml(fitted)}"
    if out is None:
        say(text.rstrip("\n"))
    else:
        write_text(out, text)
        warn(f"written to {out}")
    return DOES_NOT_FIT if lacking else 0


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The result of a search; without a choice, the lines say what lacks."""

    config: RunConfig
    lines: Sequence[str]
    chosen: Candidate | None = None
    title: str = ""
    """The choice in one line."""
    level: Level | None = None
    """What else had to be changed."""


def _fit_process(run: RunContext, gpus: tuple[GPU, ...], names: tuple[str, ...], host: int | None) -> _Found:
    """The settings of a process alone."""
    spec = run.given.spec
    tasks: dict[RunConfig, FitTask] = {}

    def task_of(config: RunConfig) -> FitTask:
        if config not in tasks:
            changed = with_config(run, config)
            check_plannable(changed, here=False)
            tasks[config] = replace(task_for(changed, gpus), host=host)
        return tasks[config]

    searched = update_search.search(run.config, task_of)
    found, task, level = searched.fit, searched.task, searched.level
    changed = [f"changed: {each}" for each in level.changed]
    if found.chosen is None:
        return _Found(config=run.config, lines=[*changed, *_nothing_fits(spec, level.config, task)])
    config, lines = apply(level.config, found.chosen, names), list(explained(found, task, names))
    for later, candidate in searched.later:
        host_gib = f", {candidate.host / GIB:.1f} GiB in host memory" if candidate.host else ""
        lines.append(f"not chosen, because it changes more: {later.short}: {_chosen(candidate, names)}{host_gib}")
    title = _chosen(found.chosen, names)
    return _Found(config=config, lines=[*_levers(level, task), *lines], chosen=found.chosen, title=title, level=level)


def _levers(level: Level, task: FitTask) -> Iterator[str]:
    """What was changed in the run so that it fits, and what that costs."""
    if level.changed:
        state = update_search.state_bytes(task.profile_of(POLICIES[0], "none")) / GIB
        yield (
            "nothing fits as configured, so these settings are changed too, from what changes numbers least; weights, gradients and "
            f"optimizer state are {state:.1f} GiB with them"
        )
        yield from (f"changed: {each}" for each in level.changed)


def _fit_ranks(run: RunContext, gpus: tuple[GPU, ...], ranks: RankLayout, link: str, host: int | None) -> _Found:
    """The division over ranks, and the settings of each."""
    gpu = weakest(gpus)
    tasks = tasks_of(run, gpu, None if host is None else host // ranks.nproc)
    found = division_of(run, tasks, ranks, link)
    if isinstance(found, int):
        words = f"nothing fits: however {ranks.size} ranks divide the run, each still lacks {found / GIB:.2f} GiB"
        return _Found(config=run.config, lines=[words])
    layout, before, time = found.layout, run.config.ranks, found.plan.times[0]
    config = apply(run.config, found.chosen, ("cuda:0",))
    config = replace(
        config,
        ranks=replace(before, shard=layout.shard, context=layout.context),
        train=replace(config.train, device="auto"),  # each rank takes its own
    )
    title = f"{layout}: ranks.shard = {layout.shard}, ranks.context = {layout.context}"
    (plan,) = found.chosen.plan
    own = f"{plan.peak / GIB:.1f} GiB at the peak and {plan.budget.reserve / GIB:.1f} GiB in reserve, of {plan.budget.total / GIB:.1f} GiB"
    lines = [
        f"fits: {title} (were {before.shard} and {before.context}), {_chosen(found.chosen, ('each rank',))}",
        f"each rank ({plan.budget.name}): {own}; page-locked host memory of a machine: {found.plan.host_of_machine / GIB:.1f} GiB",
        f"about {found.seconds:.2g} s a step with exchanges, of which {time.exposed:.2g} s are not hidden; efficiency {time.efficiency or 0:.0%}",
        f"exchanges are an estimate: {time.rates}",
        *(f"the time is an estimate: {line}" for line in assumptions([gpu], work_of(run))),
    ]
    return _Found(config=config, lines=lines, chosen=found.chosen, title=title)


def tasks_of(run: RunContext, gpu: GPU, host: int | None = None) -> Callable[[int], FitTask]:
    """The search problems of a rank with the whole model, by the number of ranks that share each sample; each is made once.

    Args:
        run: The run.
        gpu: That of each rank.
        host: Page-locked memory of each rank in bytes; None for no limit.
    """

    @functools.cache
    def task_of(context: int) -> FitTask:
        return replace(task_for(_divided(run, RankLayout(nproc=context, context=context)), (gpu,)), host=host)

    return task_of


def division_of(run: RunContext, tasks: Callable[[int], FitTask], ranks: RankLayout, link: str) -> RankFit | int:
    """How ranks divide a run; or the bytes that each lacks if nothing fits.

    Args:
        run: The run.
        tasks: From `tasks_of`.
        ranks: Processes and machines.
        link: The `--link` flag.

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

    found = fit_ranks(task_of, ranks, link)
    if found is None:
        raise UserError(refused[0])
    return found


def _divided(run: RunContext, layout: RankLayout) -> RunContext:
    """The run with ranks that divide it so, and without the settings that the search chooses."""
    train = replace(run.config.train, swap_blocks=(), checkpointing=POLICIES[0])
    ranks = replace(run.config.ranks, shard=layout.shard, context=layout.context)
    return with_config(run, replace(run.config, train=train, ranks=ranks))


def auxiliary_of(run: RunContext, chosen: Candidate, *, gpus: bool, per_machine: int = 1) -> tuple[AuxiliaryRow, ...]:
    """Memory of encoding and sampling next to the chosen steps, for a run with their settings."""
    return plan_auxiliary(
        planned_step(run),
        chosen.plan,
        chosen.division.blocks,
        gpus=gpus,
        streamed=chosen.weights_on_host,
        per_machine=per_machine,
    )


def gpus_to_fit(config: RunConfig, gpus: str) -> tuple[tuple[GPU, ...], tuple[str, ...]]:
    """The GPUs to choose among, with train.reserve kept free, and the name of each in train.devices.

    Args:
        config: The run's configuration.
        gpus: The `--gpus` flag; empty for the GPUs of this machine.

    Raises:
        UserError: If one of them has no products in the 8 bits of base.compute.
    """
    if gpus:
        found = parse_gpus(gpus)
        # One name more than GPUs: the device that generates previews is skipped.
        named = [f"cuda:{i}" for i in range(len(found) + 1) if not _samples_on(config, i)]
        names = tuple(named[: len(found)])
    else:
        devices = _devices_here(config)
        found, names = gpus_here(devices), tuple(map(str, devices))
    check_formats(config.base.compute, found)
    return keeping_reserves(found, config.train.reserve), names


def task_for(run: RunContext, gpus: tuple[GPU, ...]) -> FitTask:
    """The search problem of a run on these GPUs."""
    step, config = planned_step(run), run.config
    stored = run.stored_as

    made: list[Profile] = []

    @functools.cache  # a profile takes seconds, and the search asks for the same one for every split and swap
    def profile_of(policy: str, quantize: str) -> Profile:
        doing(f"planning a training step, checkpointing {policy}, {_weights(quantize)}")
        job = replace(step.job, policy=policy, quantize=stored if quantize == "none" else quantize)
        made.append(profile(job, like=made[0] if made else None))
        return made[-1]

    # One 8-bit format is enough: both have the same size, so the configured one is tried, else int8.
    eight_bits = () if stored != "none" else ("fp8",) if config.base.quantize == "fp8" else ("int8",)
    formats = ("none",) if config.adapter.method == "full" else ("none", *eight_bits, "nf4")
    if config.base.compute != "dtype":  # products in 8 bits need that format
        formats = (config.base.quantize,)
    return FitTask(
        gpus=gpus,
        profile_of=profile_of,
        work=work_of(step.run),
        quantizations=formats,
        adapts=config.adapter.method != "full",
        streams_trained=_streams_trained(config),
        overlaps=not config.optim.fused_backward,
        schedules=config.adapter.method == "full",
    )


def _streams_trained(config: RunConfig) -> bool:
    try:
        check_swap((1,), "full", config.optim)
    except UserError:
        return False
    return True


def apply(config: RunConfig, chosen: Candidate, names: Sequence[str]) -> RunConfig:
    """The configuration with the chosen settings; everything that is not searched stays as it is."""
    setting, train = chosen.setting, config.train
    used = [names[i] for i in setting.gpus]
    if len(used) > 1:
        device, devices = "auto", tuple(used)
    else:  # with one GPU to choose from, a name like `cuda` stays as the user wrote it
        keeps = len(names) == 1 and not train.devices and _FIRST.get(train.device, train.device) == used[0]
        device, devices = train.device if keeps else used[0], ()
    reserve = per_device(train.reserve, len(names), "train.reserve") if len(train.reserve) > 1 else train.reserve
    changed: dict[str, Any] = {
        "device": device,
        "devices": devices,
        "split_points": setting.split_points,
        "checkpointing": setting.policy,
        "pipelined": setting.pipelined,
        "swap_blocks": setting.swap if any(setting.swap) else (),
        "reserve": tuple(reserve[i] for i in setting.gpus) if len(reserve) > 1 else reserve,
    }
    quantize: dict[str, Any] = {"quantize": setting.quantize}
    return replace(config, train=replace(train, **changed), base=replace(config.base, **quantize))


def explained(found: Fit, task: FitTask, names: Sequence[str]) -> Iterator[str]:
    """The lines about the choice: the memory of each GPU, alternatives that would fit too, and the assumptions."""
    chosen = found.chosen
    assert chosen is not None
    yield f"fits: {_chosen(chosen, names)}"
    for index, plan in zip(chosen.setting.gpus, chosen.plan, strict=True):
        budget = plan.budget
        yield (
            f"{names[index]} ({budget.name}): {plan.peak / GIB:.1f} GiB at the peak and {budget.reserve / GIB:.1f} GiB in reserve, of "
            f"{budget.total / GIB:.1f} GiB"
        )
    limit = "; --host sets a limit" if task.host is None else f", of {task.host / GIB:.1f} GiB that are available"
    if any(chosen.setting.swap):
        weights = chosen.weights_on_host
        what = "weights" if task.adapts else "weights and of what the optimizer keeps of them"
        yield f"{weights / GIB:.1f} GiB of {what} stay in host memory, page-locked{limit}; a GPU has buffers for {BUFFERS} blocks"
    if sent := chosen.host - chosen.weights_on_host:
        yield f"{sent / GIB:.1f} GiB of activations are offloaded to host memory until the backward, page-locked{limit}"
    for name, other in found.others.items():
        yield f"{name}: {_chosen(other, names)}"
    prices = ", ".join(f"{PRICE[kind]:g} for {kind}" for kind in task.quantizations if kind != "none")
    if prices:
        yield f"quantized weights are chosen only if exact ones would make a step slower by more than this factor: {prices}"
    used = [task.gpus[i] for i in chosen.setting.gpus]
    yield from (f"the time is an estimate: {line}" for line in assumptions(used, task.work))


def _chosen(candidate: Candidate, names: Sequence[str]) -> str:
    setting = candidate.setting
    bounds = candidate.division.bounds
    spans = [
        f"{names[gpu]} blocks {bounds[i]} to {bounds[i + 1] - 1}" + (f", {swap} of them streamed" if swap else "")
        for i, (gpu, swap) in enumerate(zip(setting.gpus, setting.swap, strict=True))
    ]
    order = ", micro-batches overlapping" if setting.pipelined else ""
    return (
        f"checkpointing {setting.policy}, {_weights(setting.quantize)}, {'; '.join(spans)}{order}: about {candidate.time.seconds:.2g} s a step, "
        f"the fullest GPU uses {candidate.fullness:.0%} of its budget"
    )


def _weights(quantize: str) -> str:
    return "exact weights" if quantize == "none" else f"{quantize} weights"


def _nothing_fits(spec: ModelSpec, config: RunConfig, task: FitTask) -> Iterator[str]:
    weights = "" if task.quantizations[-1] == "none" else f" and {task.quantizations[-1]} weights"
    smallest = f"with everything recomputed{',' if weights else ' and'} activations on the host{weights}"
    if task.host is not None and (needed := least_host(task)) is not None:
        yield (
            f"nothing fits: {smallest} the GPUs have enough memory, but the host needs {needed / GIB:.2f} GiB for weights and activations "
            f"and has {task.host / GIB:.2f} GiB"
        )
    else:
        yield f"nothing fits: {smallest}, all streamed, the fullest GPU still lacks {least_missing(task) / GIB:.2f} GiB"
    planned = changes(spec, config, task)
    for each in planned:
        state = "fits" if not each.missing else f"still lacks {each.missing / GIB:.2f} GiB"
        yield f"{each.change.words}: {state}"
    if planned and not planned[0].missing:
        best = planned[0].change
        found = fit(_after(best, spec, config, task))
        assert found.chosen is not None
        names = [f"cuda:{i}" for i in range(len(best.gpus))]
        yield f"the single change that helps most: {best.words}; then {_chosen(found.chosen, names)}"
    elif planned:
        yield f"no single change is enough; this one helps most: {planned[0].change.words}"


def changes(spec: ModelSpec, config: RunConfig, task: FitTask) -> list[Planned]:
    """Plans of single changes, the best first: of each kind the mildest that fits, or else the strongest."""
    planned = []
    for lever in levers(spec, config, task.gpus):
        for change in lever:
            result = Planned(change=change, missing=least_missing(_after(change, spec, config, task)))
            if not result.missing:  # a lever lists its changes from mild to strong: stronger ones cost more quality
                break
        if lever:
            planned.append(result)
    return best_first(planned)


def _after(change: SuggestedChange, spec: ModelSpec, config: RunConfig, task: FitTask) -> FitTask:
    """The search problem after a change."""
    if change.config is config:  # other GPUs alone: the profiles are the same
        return replace(task, gpus=change.gpus)
    return replace(task_for(create_run(spec, change.config), change.gpus), host=task.host)


def _devices_here(config: RunConfig) -> tuple[torch.device, ...]:
    if config.train.devices:
        return choose_devices(config.train.devices)
    if config.train.device == "auto":
        found = choose_devices(("all",)) if torch.cuda.is_available() else (choose_device("auto", "train.device"),)
        return (
            tuple(device for device in found if device.type == "cpu" or not _samples_on(config, device.index)) or found
        )
    return choose_devices((config.train.device,))


def _samples_on(config: RunConfig, index: int) -> bool:
    """Whether previews are generated on this GPU, which then does not train."""
    name = config.sample.device
    return name.startswith("cuda") and int(name.removeprefix("cuda").removeprefix(":") or 0) == index
