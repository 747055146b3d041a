"""`--fit`: choose the settings with which a run fits its devices, and print the configuration with
them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace

from ditkit_core.commands.options import TrainOptions
from ditkit_core.commands.plan import DOES_NOT_FIT, file_to_write, launch_from
from ditkit_core.config.sizes import GIB
from ditkit_core.config.toml import to_toml
from ditkit_core.io.console import say, warn
from ditkit_core.io.files import write_text
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.auxiliary import AuxiliaryRow
from ditkit_core.planner.fit import (
    POLICIES,
    Fit,
    RankFit,
    fit,
    least_host,
    least_missing,
)
from ditkit_core.planner.gpus import GPU, weakest
from ditkit_core.planner.memory import DevicePlan
from ditkit_core.planner.partition import weights_in_words
from ditkit_core.planner.plan import notes_on_codes
from ditkit_core.planner.planned_step import with_planned_kernels
from ditkit_core.planner.rank_layout import RankLayout
from ditkit_core.planner.report import describe_shortfall
from ditkit_core.planner.search import (
    PRICE,
    Candidate,
    FitTask,
)
from ditkit_core.planner.step_time import BUFFERS, assumptions
from ditkit_core.planner.targets import host_limit
from ditkit_core.planner.workload import Workload
from ditkit_core.run.checks import check_preview_device
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run, with_config
from ditkit_core.run.plans.auxiliary_plan import plan_auxiliary
from ditkit_core.run.plans.changes import (
    Level,
    state_bytes,
)
from ditkit_core.run.plans.fit import (
    after_change,
    apply,
    changes,
    fit_over_ranks,
    fit_process,
    gpus_to_fit,
    with_encoding,
)
from ditkit_core.run.plans.plan import check_plannable, planned_layout, planned_step
from ditkit_core.run.plans.planned_step import job_of

_CHANGED_TOO = (
    "nothing fits as configured, so these settings are changed too, from what changes numbers least"
)


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a search; without a choice, the lines say what lacks."""

    level: Level
    """The configuration, with the chosen settings, and what else had to be changed."""
    lines: Sequence[str]
    chosen: Candidate | None = None
    title: str = ""
    """The choice in one line."""
    assumed: Sequence[str] = ()
    """What its times are estimated from, in lines that `--why` prints."""


def fit_run(spec: ModelSpec, config: RunConfig, options: TrainOptions) -> int:
    """Choose settings for the GPUs, print the whole configuration to stdout, and its memory and the
    reasons to stderr.

    The search covers train.checkpointing, devices, split_points, swap_blocks, pipelined and
    cuda_graphs, and base.quantize. If nothing fits a full fine-tune otherwise, it also changes
    optim.fused_backward, train.clip_by, model.dtype, optim.rounding and optim.name; where encoders
    do not fit, encode.vae_tiling, streaming and device. It prints each change. Everything else
    stays as configured.

    Returns:
        The exit status that a plan of the chosen settings has: 0; or 3 if no settings fit, or if
        encoding or sampling does not fit with them.
    """
    out = file_to_write(options)
    with redirect_stdout(sys.stderr):  # stdout is a run file, also where the data are described
        status, text, lines = _searched(spec, config, options)
    if text and out is None:
        say(text.rstrip("\n"))  # before the lines: these hundreds would push them off a terminal
    elif text and out is not None:
        write_text(out, text)
        lines.append(f"written to {out}")
    for line in lines:
        warn(line)
    return status


def _searched(
    spec: ModelSpec, config: RunConfig, options: TrainOptions
) -> tuple[int, str, list[str]]:
    """The exit status, the run file with the choice, empty if nothing fits, and what is said of
    it."""
    run = create_run(spec, config)
    launch = launch_from(options)
    ranks = planned_layout(run.config, options.gpus, launch)
    # the configured devices are not checked: the search chooses among all
    check_plannable(run, here=False)
    gpus, names = gpus_to_fit(run.config, options.gpus)
    host = host_limit(options.host, here=not options.gpus)
    result = (
        _fit_process(run, gpus, names, host)
        if ranks is None
        else _fit_over_ranks(run, gpus, ranks, launch.link, host)
    )
    chosen = result.chosen
    if chosen is None:
        return DOES_NOT_FIT, "", list(result.lines)
    # a GPU that train.device or train.devices names may be the one that generates previews
    if not options.gpus:
        check_preview_device(with_config(run, result.level.config))

    def auxiliary(config: RunConfig) -> tuple[AuxiliaryRow, ...]:
        per_machine = 1 if ranks is None else ranks.nproc
        return plan_auxiliary(
            planned_step(with_config(run, config)),
            chosen.plan,
            chosen.division.blocks,
            gpus=bool(options.gpus),
            streamed=chosen.weights_on_host,
            per_machine=per_machine,
            host=None if host is None else host // per_machine,
        )

    # The search is about training steps; encoders and samples get the memory that it leaves, and
    # are checked afterwards.
    level, rows = with_encoding(result.level, auxiliary)
    fitted, lacking = level.config, [row for row in rows if row.fits is False]
    short = "the times are estimates; --why says from what"
    lines = [*result.lines, *(result.assumed if options.why else [short])]
    more = level.changed[len(result.level.changed) :]
    lines += [f"encoding does not fit as configured; changed: {change}" for change in more]
    previews_here = bool(fitted.sample.every_steps and not fitted.sample.device)
    lines += [describe_shortfall(row, previews_here) for row in lacking]
    if lacking:
        lines.append(
            "training fits, but the rows above do not; correct the settings for them before you "
            "train"
        )
    changed = "".join(f"# changed: {change}\n" for change in level.changed)
    text = f"# {result.title}\n# for {', '.join(gpu.name for gpu in gpus)}\n{changed}\n{to_toml(fitted)}"
    return DOES_NOT_FIT if lacking else 0, text, lines


def _fit_process(
    run: RunContext, gpus: tuple[GPU, ...], names: tuple[str, ...], host: int | None
) -> FitResult:
    """The settings of a process alone."""
    level, task, result = fit_process(run, gpus, host)
    chosen = result.chosen
    if chosen is None:
        return FitResult(
            level=level,
            lines=[*level.lines, *_nothing_fits(run.request.spec, level.config, task)],
        )
    lines: list[str] = []
    if level.changed:
        state = state_bytes(task.profile_of(POLICIES[0], "none")) / GIB
        lines += [
            f"{_CHANGED_TOO}; weights, gradients and optimizer state are {state:.1f} GiB with them",
            *level.lines,
        ]
    lines += explained(result, task, names)
    execution, used = chosen.execution, [task.gpus[i] for i in chosen.gpus]
    if run.config.base.compute != "dtype":  # what it gains with the choice
        job = planned_step(with_config(run, level.config), gpus=used).job
        job = job.with_execution(checkpointing=execution.checkpointing, quantize=execution.quantize)
        profile = task.profile_of(str(execution.checkpointing), execution.quantize)
        lines += notes_on_codes(job, profile, chosen.division, used, task.work_of(execution))
    fitted = replace(level, config=apply(level.config, chosen, names))
    work = replace(task.work, cuda_graphs="off") if chosen.drops_cuda_graphs else task.work
    return FitResult(
        level=fitted,
        lines=lines,
        chosen=chosen,
        title=in_words(chosen, names),
        assumed=_estimates(used, work),
    )


def _estimates(gpus: Sequence[GPU], work: Workload) -> list[str]:
    return [f"the time is an estimate: {line}" for line in assumptions(gpus, work)]


def _fit_over_ranks(
    run: RunContext, gpus: tuple[GPU, ...], ranks: RankLayout, link: str, host: int | None
) -> FitResult:
    """How ranks divide a run, and the settings of each, under the first level with which something
    fits."""
    gpu, host_of_rank = weakest(gpus), None if host is None else host // ranks.nproc
    level, division = fit_over_ranks(run, gpu, ranks, link, host_of_rank)
    if isinstance(division, RankFit):
        return _division_in_words(run, level, division, gpu)
    words = f"nothing fits: however {ranks.size} ranks divide the run, each still lacks {division / GIB:.2f} GiB"
    return FitResult(level=level, lines=[*level.lines, words])


def _division_in_words(run: RunContext, level: Level, division: RankFit, gpu: GPU) -> FitResult:
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
    lines = [
        *((_CHANGED_TOO, *level.lines) if level.changed else ()),
        (
            f"fits: {title} (were {before.shard} and {before.context}), "
            f"{in_words(division.chosen, ('each rank',))}"
        ),
        (
            f"each rank {_memory(plan)}; page-locked host memory of a machine: "
            f"{division.plan.host_of_machine / GIB:.1f} GiB"
        ),
        (
            f"about {division.seconds:.2g} s a step with exchanges, of which {time.exposed:.2g} s are "
            f"not hidden; efficiency {time.efficiency or 0:.0%}"
        ),
    ]
    assumed = [f"exchanges are an estimate: {time.rates}", *_estimates([gpu], work)]
    fitted = replace(level, config=config)
    return FitResult(
        level=fitted, lines=lines, chosen=division.chosen, title=title, assumed=assumed
    )


def in_words(candidate: Candidate, names: Sequence[str]) -> str:
    """Settings in one line, with their time and how full they make the fullest GPU."""
    execution, bounds = candidate.execution, candidate.division.bounds
    spans = [
        f"{names[gpu]} blocks {bounds[i]} to {bounds[i + 1] - 1}"
        + (f", {swap} of them streamed" if swap else "")
        for i, (gpu, swap) in enumerate(zip(candidate.gpus, candidate.swap_blocks, strict=True))
    ]
    order = ", micro-batches overlapping" * execution.pipelined
    order += ", micro-batches not replayed" * candidate.drops_cuda_graphs
    return (
        f"checkpointing {execution.checkpointing}, {weights_in_words(execution.quantize)}, "
        f"{'; '.join(spans)}{order}: about {candidate.seconds:.2g} s a step, the fullest GPU uses "
        f"{candidate.fullness:.0%} of its budget"
    )


def explained(result: Fit, task: FitTask, names: Sequence[str]) -> Iterator[str]:
    """The lines about the choice: the memory of each GPU, and alternatives that would fit too."""
    chosen = result.chosen
    assert chosen is not None
    yield f"fits: {in_words(chosen, names)}"
    for index, plan in zip(chosen.gpus, chosen.plan, strict=True):
        yield f"{names[index]} {_memory(plan)}"
    if chosen.drops_cuda_graphs:
        yield "train.cuda_graphs = off: replays of micro-batches would be faster, but a graph keeps its memory, and does not fit; results are bitwise the same"
    limit = (
        "; --host sets a limit"
        if task.host is None
        else f", of {task.host / GIB:.1f} GiB that are available"
    )
    if chosen.execution.swap_blocks:
        weights = chosen.weights_on_host
        streamed = "weights" if task.adapts else "weights and of what the optimizer keeps of them"
        yield f"{weights / GIB:.1f} GiB of {streamed} stay in host memory, page-locked{limit}; a GPU has buffers for {BUFFERS} blocks"
    if sent := chosen.host - chosen.weights_on_host:
        yield f"{sent / GIB:.1f} GiB of activations are offloaded to host memory until the backward, page-locked{limit}"
    for name, other in result.others.items():
        yield f"{name}: {in_words(other, names)}"
    prices = ", ".join(
        f"{PRICE[kind]:g} for {kind}" for kind in task.quantizations if kind != "none"
    )
    if prices:
        yield f"quantized weights are chosen only if exact ones would make a step slower by more than this factor: {prices}"


def _memory(plan: DevicePlan) -> str:
    """The memory of a step on a GPU, with that GPU's name."""
    budget = plan.budget
    return (
        f"({budget.name}): {plan.peak / GIB:.1f} GiB at the peak and "
        f"{budget.reserve / GIB:.1f} GiB in reserve, of {budget.total / GIB:.1f} GiB"
    )


def _nothing_fits(spec: ModelSpec, config: RunConfig, task: FitTask) -> Iterator[str]:
    weights = "" if task.quantizations[-1] == "none" else f" and {task.quantizations[-1]} weights"
    smallest = (
        f"with everything recomputed{',' if weights else ' and'} activations on the host{weights}"
    )
    if task.host is not None and (needed := least_host(task)) is not None:
        yield (
            f"nothing fits: {smallest} the GPUs have enough memory, but the host needs "
            f"{needed / GIB:.2f} GiB for weights and activations and has {task.host / GIB:.2f} GiB"
        )
    else:
        yield f"nothing fits: {smallest}, all streamed, the fullest GPU still lacks {least_missing(task) / GIB:.2f} GiB"
    planned = changes(spec, config, task)
    for change in planned:
        yield f"{change.words}: {'fits' if not change.missing else f'still lacks {change.missing / GIB:.2f} GiB'}"
    if planned and not planned[0].missing:
        best = planned[0]
        fit_after = fit(after_change(best, spec, config, task))
        assert fit_after.chosen is not None
        names = [f"cuda:{i}" for i in range(len(best.gpus))]
        yield f"the single change that helps most: {best.words}; then {in_words(fit_after.chosen, names)}"
    elif planned:
        yield f"no single change is enough; this one helps most: {planned[0].words}"
