"""What a run may change so that it fits: how a full fine-tune stores and updates its weights, in the order of what changes numbers least; then,
for any run, the dtype of the residual stream.

`autotune.fit` searches what changes no number. Only if that finds nothing for the run as it is configured, one lever after the other is
added here, each to those before it, until something fits. Among the settings of one such level the fastest are chosen. The next level
that would be faster, or need less host memory, is printed too, and so are `precision.preset = fast` and, for weights in 8 bits, `base.compute`, because
their price is the user's to judge.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ditkit_core.errors import UserError
from ditkit_core.models.precision import PrecisionConfig
from ditkit_core.planner.memory import Profile
from ditkit_core.planner.search.autotune import POLICIES, Fit, candidates, fit, shortest_seconds
from ditkit_core.planner.search.partition_search import Candidate, FitTask
from ditkit_core.run.config import RunConfig

_FASTER, _LESS_HOST = 0.9, 0.75
"""Shares of the choice's seconds and host memory from which on a later level is worth a line."""
_QUICK = "full"
"""The policy with which later levels are planned: each of them takes seconds."""

COSTS = {
    "optim.fused_backward": "each weight is updated as soon as its gradient exists, and can be streamed with its optimizer state; no number changes",
    "train.clip_by": "gradients are clipped by the norm of the step before, and those of the first step not at all",
    "model.dtype": "activations and matmuls of the blocks are bf16, where they were fp32",
    "optim.rounding = split": "nothing more: 2 more bytes per weight keep what bf16 drops, so updates are those of fp32 weights",
    "optim.rounding = stochastic": "weights are bf16, and each update is rounded up or down at random: right on average, with noise",
    "optim.name = adamw8bit": "both averages of AdamW are rounded to 8 bits",
    "optim.name = adafactor": "another optimizer, with averages of rows and columns: choose optim.lr anew",
    "precision.preset": "residual stream, norms and modulation are rounded to model.dtype: over models with random weights the prediction is off by "
    "1.1 to 1.2 % instead of 0.4 to 0.5, the gradient by 0.5 to 1.8 % instead of 0.3 to 0.9; --audit-precision measures this run",
    "base.compute": "inputs and gradients of frozen matrices are rounded to 8 bits too: on the Wan demo the gradient is off by 4.9 % instead of 4.4 in "
    "int8, by 15 % instead of 14 in fp8; --audit-precision measures this run",
    "encode.vae_tiling": "latents differ a little, and seams of tiles may show",
    "encode.streaming": "the text encoder is read layer by layer, which is slower",
    "encode.device": "encoding is much slower; its results stay in the cache",
}
"""What each lever costs besides the time of a step, which the plan has."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A key that has another value than the run file's."""

    key: str
    value: str
    before: str

    @property
    def cost(self) -> str:
        """What it costs besides time."""
        return COSTS.get(f"{self.key} = {self.value}") or COSTS[self.key]

    def __str__(self) -> str:
        return f"{self.key} = {self.value} (was {self.before}): {self.cost}"


@dataclass(frozen=True, kw_only=True)
class Level:
    """A run with some levers more than configured."""

    config: RunConfig
    changed: tuple[Changed, ...] = ()

    @property
    def short(self) -> str:
        """The changed values alone."""
        return ", ".join(f"{change.key} = {change.value}" for change in self.changed)

    def then(self, section: str, **values: Any) -> "Level":
        """The next level: these values of a section too. A key that was changed before counts once."""
        old: Any = getattr(self.config, section)
        sections: dict[str, Any] = {section: replace(old, **values)}
        first = {change.key: change.before for change in self.changed}
        kept = [change for change in self.changed if change.key not in {f"{section}.{name}" for name in values}]
        more = [
            Changed(
                key=(key := f"{section}.{name}"), value=_text(value), before=first.get(key, _text(getattr(old, name)))
            )
            for name, value in values.items()
        ]
        return Level(config=replace(self.config, **sections), changed=(*kept, *more))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class UpdateFit:
    """The level that was chosen, or the last one if nothing fits."""

    level: Level
    task: FitTask
    fit: Fit
    later: tuple[tuple[Level, Candidate], ...] = ()
    """The next level that changes more and is faster, or needs less host memory, and the same of the chosen level with
    `precision.preset = fast`, and with `base.compute`; without those that are not."""


def levels(config: RunConfig, *, in_backward: bool = True) -> Iterator[Level]:
    """The run as it is, then with one lever more each time.

    Args:
        in_backward: Whether the optimizer can step in the backward: with several ranks it cannot.
    """
    level = Level(config=config)
    yield level
    if config.adapter.method == "full" and not config.optim.kind.estimates_rate:
        for following in _of_updates(level, in_backward=in_backward):
            level = following
            yield level
    yield from _with_narrow_residual(level)


def _with_narrow_residual(level: Level) -> Iterator[Level]:
    """The level with the preset `fast`; nothing where that changes no dtype, or other dtypes are configured."""
    config = level.config
    if config.model.dtype != "fp32" and config.precision == PrecisionConfig():
        yield level.then("precision", preset="fast")


def _with_codes(level: Level, quantize: str) -> Iterator[Level]:
    """The level with products in the 8 bits in which its weights are stored; nothing where they are not."""
    config = level.config
    if config.base.compute == "dtype" and quantize in ("int8", "fp8"):
        stored: dict[str, Any] = {"quantize": quantize}
        yield replace(level, config=replace(config, base=replace(config.base, **stored))).then("base", compute=quantize)


def _of_updates(level: Level, *, in_backward: bool) -> Iterator[Level]:
    """The levels that change how a full fine-tune updates its weights."""
    config, optim = level.config, level.config.optim
    if in_backward and not optim.fused_backward:
        # Searched anyway, and refused with it: `FitTask.overlaps`.
        level = replace(level, config=replace(config, train=replace(config.train, pipelined=False)))
        level = level.then("optim", fused_backward=True)
        if config.train.clip_norm and config.train.clip_by == "step":
            level = level.then("train", clip_by="last_step")
        yield level
    if not optim.kind.one_by_one:
        return
    if config.model.dtype == "fp32":
        level = level.then("model", dtype="bf16").then("optim", rounding="split")
        yield level
    if level.config.optim.rounding == "split":
        level = level.then("optim", rounding="stochastic")
        yield level
    smaller = {"adamw": ("adamw8bit", "adafactor"), "adamw8bit": ("adafactor",), "muon": ("adafactor",)}
    for name in smaller.get(optim.name, ()):
        yield (level := level.then("optim", name=name))


def search(config: RunConfig, task_of: Callable[[RunConfig], FitTask], *, later: bool = True) -> UpdateFit:
    """The first level with which something fits.

    Args:
        task_of: The search problem of a run with another configuration; cached.
        later: Whether levels behind the chosen one are planned too.
    """
    following = levels(config)
    level = next(following)  # what the run itself refuses is raised
    tried = [UpdateFit(level=level, task=(task := task_of(level.config)), fit=_fit(task))]
    accepted = _accepted(following, task_of)
    # The next one is only planned if it is needed.
    while tried[-1].fit.chosen is None and (pair := next(accepted, None)) is not None:
        level, task = pair
        tried.append(UpdateFit(level=level, task=task, fit=_fit(task)))
    best = tried[-1]
    if best.fit.chosen is None or not later:
        return best
    chosen, passed = best.fit.chosen, {attempt.level for attempt in tried}
    updates = (level for level in levels(config) if level not in passed and level.config.precision == config.precision)
    offered = [*_better(chosen, _accepted(updates, task_of), [_QUICK])]
    if policies := _with_less_memory(chosen, best.task):
        offered += _better(chosen, _accepted(_with_narrow_residual(best.level), task_of), policies)
    policy = chosen.setting.policy if chosen.setting.policy in POLICIES else _QUICK
    offered += _better(chosen, _accepted(_with_codes(best.level, chosen.setting.quantize), task_of), [policy])
    return replace(best, later=tuple(offered))


def _accepted(every: Iterator[Level], task_of: Callable[[RunConfig], FitTask]) -> Iterator[tuple[Level, FitTask]]:
    """The levels that do not contradict other settings of the run, with their search problems."""
    for level in every:
        with suppress(UserError):
            yield level, task_of(level.config)


def _fit(task: FitTask) -> Fit:
    return Fit(chosen=None, others={}) if _cannot_fit(task) else fit(task)


def _better(
    best: Candidate, others: Iterator[tuple[Level, FitTask]], policies: Sequence[str]
) -> Iterator[tuple[Level, Candidate]]:
    """The first of other levels that is faster or needs less host memory under one of these policies: those behind it are not planned."""
    for level, task in others:
        formats = [quantize for quantize in task.quantizations if quantize in ("none", best.setting.quantize)]
        every = (
            candidate for policy in policies for quantize in formats for candidate in candidates(task, policy, quantize)
        )
        one = min(every, key=lambda candidate: candidate.score, default=None)
        if one is not None and (one.score <= _FASTER * best.score or one.host < _LESS_HOST * best.host):
            yield level, one
            return


def _with_less_memory(best: Candidate, task: FitTask) -> Sequence[str]:
    """The policies with which blocks that keep less could be better: the present one if something is streamed or quantized, and the next
    faster one. None if no step of this run can be that much faster."""
    setting = best.setting
    index = POLICIES.index(setting.policy) if setting.policy in POLICIES else 0
    if best.host or setting.quantize != "none":
        return POLICIES[index : index + 2]
    return POLICIES[index + 1 : index + 2] if shortest_seconds(task) <= _FASTER * best.score else ()


def _cannot_fit(task: FitTask) -> bool:
    """Whether the weights, gradients and optimizer state alone are more than all GPUs have, and none of it can be streamed."""
    if task.adapts or task.streams_trained:  # frozen weights can be streamed too
        return False
    return state_bytes(task.profile_of("full", "none")) > sum(gpu.budget.available for gpu in task.gpus)


def state_bytes(profile: Profile) -> int:
    """Bytes of what a full fine-tune keeps of its weights: values, gradients, optimizer state and average."""
    return sum(
        stage.weights + stage.adapters + stage.gradients + stage.optimizer + stage.average for stage in profile.stages
    )
