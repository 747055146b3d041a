"""`--fit`: choose the settings with which a run fits its devices, and print the configuration with them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ditkit_core.commands.fit_ranks import fit_over_ranks
from ditkit_core.commands.fit_task import FitResult, apply, gpus_to_fit, in_words, task_for
from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.plan import DOES_NOT_FIT
from ditkit_core.config.sizes import GIB
from ditkit_core.config.toml import to_toml
from ditkit_core.errors import UserError
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import local_path, write_text
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.auxiliary import AuxiliaryRow
from ditkit_core.planner.gpus import GPU
from ditkit_core.planner.partition import host_limit
from ditkit_core.planner.plan import notes_on_codes
from ditkit_core.planner.ranks.layout import PlannedLaunch, layout_of
from ditkit_core.planner.report import describe_shortfall
from ditkit_core.planner.search.autotune import POLICIES, Fit, fit, least_host, least_missing
from ditkit_core.planner.search.partition_search import PRICE, Candidate, FitTask
from ditkit_core.planner.step_time import BUFFERS, assumptions
from ditkit_core.run.checks import check_preview_device
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run, with_config
from ditkit_core.run.plans.auxiliary_plan import plan_auxiliary
from ditkit_core.run.plans.changes import Planned, SuggestedChange, best_first, levers
from ditkit_core.run.plans.levels import Level, search, state_bytes
from ditkit_core.run.plans.plan import check_plannable, num_gpus, planned_step


def fit_run(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> int:
    """Choose settings for the GPUs, print the whole configuration to stdout, and its memory and the reasons to stderr.

    The search covers train.checkpointing, devices, split_points, swap_blocks and pipelined, and base.quantize. If nothing fits a full
    fine-tune otherwise, it also changes optim.fused_backward, train.clip_by, model.dtype, optim.rounding and optim.name; where encoders do
    not fit, encode.vae_tiling, streaming and device. It prints each change. Everything else stays as configured.

    Returns:
        The exit status that a plan of the chosen settings has: 0; or 3 if no settings fit, or if encoding or sampling does not fit with
        them.

    Raises:
        UserError: If a GPU or the model is unknown, or the file to write exists.
    """
    out = local_path(options.write) if options.write else None
    if out is not None and out.exists():
        raise UserError(f"--write {out} exists, and nothing is overwritten; give another name, or remove it")
    run = create_run(spec, config)
    launch = PlannedLaunch(nproc=options.nproc, nodes=options.nodes, link=options.link)
    ranks = layout_of(run.config.ranks, num_gpus(run, options.gpus), launch, devices=run.config.train.devices)
    check_plannable(run, here=False)  # the configured devices are not checked: the search chooses among all
    gpus, names = gpus_to_fit(run.config, options.gpus)
    host = host_limit(options.host, here=not options.gpus)
    result = (
        _fit_process(run, gpus, names, host) if ranks is None else fit_over_ranks(run, gpus, ranks, launch.link, host)
    )
    if result.chosen is None:
        _warn(result.lines)
        return DOES_NOT_FIT
    if not options.gpus:  # a GPU that train.device or train.devices names may be the one that generates previews
        check_preview_device(create_run(spec, result.config))

    def planned(config: RunConfig) -> tuple[AuxiliaryRow, ...]:
        assert result.chosen is not None
        per_machine = 1 if ranks is None else ranks.nproc
        host_of_rank, on_gpus = None if host is None else host // per_machine, bool(options.gpus)
        return auxiliary_of(
            create_run(spec, config), result.chosen, gpus=on_gpus, per_machine=per_machine, host=host_of_rank
        )

    # The search is about training steps; encoders and samples get the memory that it leaves, and are checked afterwards.
    changes_so_far = result.level.changed if result.level else ()
    level, auxiliary = _with_encoding(Level(config=result.config, changed=changes_so_far), planned)
    lines = [*result.lines]
    lines += [
        f"encoding does not fit as configured; changed: {change}" for change in level.changed[len(changes_so_far) :]
    ]
    fitted, lacking = level.config, [row for row in auxiliary if row.fits is False]
    previews_here = bool(fitted.sample.every_steps and not fitted.sample.device)
    lines += [describe_shortfall(row, previews_here) for row in lacking]
    if lacking:
        lines.append("training fits, but the rows above do not; correct the settings for them before you train")
    changed = "".join(f"# changed: {change}\n" for change in level.changed)
    text = f"# {result.title}\n# for {', '.join(gpu.name for gpu in gpus)}\n{changed}\n{to_toml(fitted)}"
    if out is None:
        say(text.rstrip("\n"))  # before the lines: these hundreds would push them off a terminal
    else:
        write_text(out, text)
        lines.append(f"written to {out}")
    _warn(lines)
    return DOES_NOT_FIT if lacking else 0


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        warn(line)


def _fit_process(run: RunContext, gpus: tuple[GPU, ...], names: tuple[str, ...], host: int | None) -> FitResult:
    """The settings of a process alone."""
    spec = run.request.spec
    tasks: dict[RunConfig, FitTask] = {}

    def task_of(config: RunConfig) -> FitTask:
        if config not in tasks:
            changed = with_config(run, config)
            check_plannable(changed, here=False)
            tasks[config] = replace(task_for(changed, gpus), host=host)
        return tasks[config]

    searched = search(run.config, task_of)
    fit_of_level, task, level = searched.fit, searched.task, searched.level
    changed = [f"changed: {change}" for change in level.changed]
    if fit_of_level.chosen is None:
        return FitResult(config=run.config, lines=[*changed, *_nothing_fits(spec, level.config, task)])
    config, lines = apply(level.config, fit_of_level.chosen, names), list(explained(fit_of_level, task, names))
    for later, candidate in searched.later:
        host_gib = f", {candidate.host / GIB:.1f} GiB in host memory" if candidate.host else ""
        cost = "; ".join(change.cost for change in later.changed if change not in level.changed)
        lines.append(
            f"not chosen, because it changes more: {later.short}: {in_words(candidate, names)}{host_gib}; price: {cost}"
        )
    lines += _on_codes(with_config(run, level.config), task, fit_of_level.chosen)
    title = in_words(fit_of_level.chosen, names)
    return FitResult(
        config=config, lines=[*_levers(level, task), *lines], chosen=fit_of_level.chosen, title=title, level=level
    )


def _on_codes(run: RunContext, task: FitTask, chosen: Candidate) -> Iterator[str]:
    """What `base.compute` gains with the choice."""
    setting, gpus = chosen.setting, [task.gpus[i] for i in chosen.setting.gpus]
    if run.config.base.compute != "dtype":
        job = planned_step(run, gpus=gpus).job.with_execution(checkpointing=setting.policy, quantize=setting.quantize)
        work = replace(task.work, pipelined=setting.pipelined, quantize=setting.quantize)
        yield from notes_on_codes(job, task.profile_of(setting.policy, setting.quantize), chosen.division, gpus, work)


def _with_encoding(
    level: Level, planned: Callable[[RunConfig], tuple[AuxiliaryRow, ...]]
) -> tuple[Level, tuple[AuxiliaryRow, ...]]:
    """Change how a run encodes, one setting after the other, until encoders fit. With the plan of its encoders and samples."""
    rows = planned(level.config)
    changes: tuple[dict[str, Any], ...] = ({"vae_tiling": True}, {"streaming": "always"}, {"device": "cpu"})
    for values in changes:
        if not (lacking := _lacking_encoders(rows)):
            break
        attempt = level.then("encode", **values)
        rows_of_attempt = planned(attempt.config)
        if _lacking_encoders(rows_of_attempt) < lacking:
            level, rows = attempt, rows_of_attempt
    return level, rows


def _lacking_encoders(rows: Iterable[AuxiliaryRow]) -> int:
    return sum(row.fits is False for row in rows if row.stage == "encode")


def _levers(level: Level, task: FitTask) -> Iterator[str]:
    """What was changed in the run so that it fits, and what that costs."""
    if level.changed:
        state = state_bytes(task.profile_of(POLICIES[0], "none")) / GIB
        yield (
            "nothing fits as configured, so these settings are changed too, from what changes numbers least; weights, gradients and "
            f"optimizer state are {state:.1f} GiB with them"
        )
        yield from (f"changed: {change}" for change in level.changed)


def auxiliary_of(
    run: RunContext, chosen: Candidate, *, gpus: bool, per_machine: int = 1, host: int | None = None
) -> tuple[AuxiliaryRow, ...]:
    """Memory of encoding and sampling next to the chosen steps, for a run with their settings."""
    return plan_auxiliary(
        planned_step(run),
        chosen.plan,
        chosen.division.blocks,
        gpus=gpus,
        streamed=chosen.weights_on_host,
        per_machine=per_machine,
        host=host,
    )


def explained(result: Fit, task: FitTask, names: Sequence[str]) -> Iterator[str]:
    """The lines about the choice: the memory of each GPU, alternatives that would fit too, and the assumptions."""
    chosen = result.chosen
    assert chosen is not None
    yield f"fits: {in_words(chosen, names)}"
    for index, plan in zip(chosen.setting.gpus, chosen.plan, strict=True):
        budget = plan.budget
        yield (
            f"{names[index]} ({budget.name}): {plan.peak / GIB:.1f} GiB at the peak and {budget.reserve / GIB:.1f} GiB in reserve, of "
            f"{budget.total / GIB:.1f} GiB"
        )
    limit = "; --host sets a limit" if task.host is None else f", of {task.host / GIB:.1f} GiB that are available"
    if any(chosen.setting.swap):
        weights = chosen.weights_on_host
        streamed = "weights" if task.adapts else "weights and of what the optimizer keeps of them"
        yield f"{weights / GIB:.1f} GiB of {streamed} stay in host memory, page-locked{limit}; a GPU has buffers for {BUFFERS} blocks"
    if sent := chosen.host - chosen.weights_on_host:
        yield f"{sent / GIB:.1f} GiB of activations are offloaded to host memory until the backward, page-locked{limit}"
    for name, other in result.others.items():
        yield f"{name}: {in_words(other, names)}"
    prices = ", ".join(f"{PRICE[kind]:g} for {kind}" for kind in task.quantizations if kind != "none")
    if prices:
        yield f"quantized weights are chosen only if exact ones would make a step slower by more than this factor: {prices}"
    used = [task.gpus[i] for i in chosen.setting.gpus]
    yield from (f"the time is an estimate: {line}" for line in assumptions(used, task.work))


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
    for plan in planned:
        state = "fits" if not plan.missing else f"still lacks {plan.missing / GIB:.2f} GiB"
        yield f"{plan.change.words}: {state}"
    if planned and not planned[0].missing:
        best = planned[0].change
        fit_after = fit(_after(best, spec, config, task))
        assert fit_after.chosen is not None
        names = [f"cuda:{i}" for i in range(len(best.gpus))]
        yield f"the single change that helps most: {best.words}; then {in_words(fit_after.chosen, names)}"
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
