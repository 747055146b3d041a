"""What a run may change, or which other GPUs it may have, so that it fits.

`fit` searches settings that change no number, and the format of the frozen weights. Only if that
finds nothing for the run as it is configured, its `levels` are tried: one lever after the other is
added to those before it, in the order of what changes numbers least, until something fits. They are
how a full fine-tune stores and updates its weights; then, for any run, the dtype of the residual
stream. Among the settings of one such level the fastest are chosen. The next level that would be
faster, or need less host memory, is printed too, and so are `precision.preset = fast` and, for
weights in 8 bits, `base.compute`, because their price is the user's to judge.

If no level fits, there are `levers`: fewer or smaller samples, a lower rank, larger GPUs. Each is
planned, none is guessed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ditkit_core.config.sizes import GIB
from ditkit_core.errors import UserError
from ditkit_core.models.precision import PrecisionConfig
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU, as_sold
from ditkit_core.planner.memory import Profile
from ditkit_core.planner.search.fit import POLICIES, Fit, candidates, fit, shortest_seconds
from ditkit_core.planner.search.task import Candidate, FitTask
from ditkit_core.run.config import RunConfig

T = TypeVar("T")

_FASTER, _LESS_HOST = 0.9, 0.75
"""Shares of the choice's seconds and host memory from which on a later level is worth a line."""
_QUICK = "full"
"""The policy with which later levels are planned: each of them takes seconds."""
GPU_SIZES = (12, 16, 24, 32, 48, 80, 96, 141)
"""GiB of GPUs on the market."""

COSTS = {
    "optim.fused_backward": "each weight is updated as soon as its gradient exists, and can be streamed with its optimizer state; no number changes",
    "train.clip_by": "gradients are clipped by the norm of the step before, and those of the first step not at all",
    "model.dtype": "activations and matmuls of the blocks are bf16, where they were fp32",
    "optim.rounding = split": "nothing more: 2 more bytes per weight keep what bf16 drops, so updates are those of fp32 weights",
    "optim.rounding = stochastic": "weights are bf16, and each update is rounded up or down at random: right on average, with noise",
    "optim.name = adamw8bit": "both averages of AdamW are rounded to 8 bits",
    "optim.name = adafactor": "another optimizer, with averages of rows and columns: choose optim.lr anew",
    "precision.preset": "residual stream, norms and modulation are rounded to model.dtype: over models with random weights the prediction is off by "
    "1.1 to 1.2 % instead of 0.4 to 0.5, the gradient by 0.5 to 1.8 % instead of 0.3 to 0.9; "
    "--audit-precision measures this run",
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
        """The next level: these values of a section too. A key that was changed before counts
        once."""
        old: Any = getattr(self.config, section)
        first = {change.key: change.before for change in self.changed}
        kept = [
            change
            for change in self.changed
            if change.key not in {f"{section}.{name}" for name in values}
        ]
        more = [
            Changed(
                key=(key := f"{section}.{name}"),
                value=_text(value),
                before=first.get(key, _text(getattr(old, name))),
            )
            for name, value in values.items()
        ]
        return Level(config=_with(self.config, section, **values), changed=(*kept, *more))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class LevelFit:
    """The level that was chosen, or the last one if nothing fits."""

    level: Level
    task: FitTask
    fit: Fit
    later: tuple[tuple[Level, Candidate], ...] = ()
    """The next level that changes more and is faster, or needs less host memory, and the same of
    the chosen level with `precision.preset = fast`, and with `base.compute`; without those that are
    not."""


def levels(config: RunConfig, *, in_backward: bool = True) -> Iterator[Level]:
    """The run as it is, then with one lever more each time. With several ranks the optimizer cannot
    step in the backward."""
    level = Level(config=config)
    yield level
    if config.adapter.method == "full" and not config.optim.kind.estimates_rate:
        for following in _of_updates(level, in_backward=in_backward):
            level = following
            yield level
    yield from _with_narrow_residual(level)


def _with_narrow_residual(level: Level) -> Iterator[Level]:
    """The level with the preset `fast`; nothing where that changes no dtype, or other dtypes are
    configured."""
    config = level.config
    if config.model.dtype != "fp32" and config.precision == PrecisionConfig():
        yield level.then("precision", preset="fast")


def _of_updates(level: Level, *, in_backward: bool) -> Iterator[Level]:
    """The levels that change how a full fine-tune updates its weights."""
    config, optim = level.config, level.config.optim
    if in_backward and not optim.fused_backward:
        # Searched anyway, and refused with it: `FitTask.overlaps`.
        level = replace(level, config=_with(config, "train", pipelined=False))
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
    smaller = {
        "adamw": ("adamw8bit", "adafactor"),
        "adamw8bit": ("adafactor",),
        "muon": ("adafactor",),
    }
    for name in smaller.get(optim.name, ()):
        yield (level := level.then("optim", name=name))


def accepted(
    tried: Iterator[Level], attempt: Callable[[RunConfig], T]
) -> Iterator[tuple[Level, T]]:
    """Levels with the result of an attempt; those that contradict another setting of the run are
    passed over."""
    for level in tried:
        try:
            result = attempt(level.config)
        except UserError:
            if not level.changed:
                raise
            continue
        yield level, result


def fit_levels(
    config: RunConfig, task_of: Callable[[RunConfig], FitTask], *, later: bool = True
) -> LevelFit:
    """The first level with which something fits; `later` plans levels behind it too. `task_of` is
    the search problem of a run with another configuration; cached."""
    tried: list[LevelFit] = []
    for level, task in accepted(levels(config), task_of):
        state = 0
        if (
            not task.adapts and not task.streams_trained
        ):  # what is frozen can be streamed, so it need not fit
            state = state_bytes(task.profile_of("full", "none"))
        cannot_fit = state > sum(gpu.budget.available for gpu in task.gpus)
        tried.append(
            LevelFit(level=level, task=task, fit=Fit(others={}) if cannot_fit else fit(task))
        )
        if tried[-1].fit.chosen is not None:
            break
    best = tried[-1]
    if best.fit.chosen is None or not later:
        return best
    chosen, passed = best.fit.chosen, {attempt.level for attempt in tried}
    updates = (
        level
        for level in levels(config)
        if level not in passed and level.config.precision == config.precision
    )
    offered = [*_better(chosen, accepted(updates, task_of), [_QUICK])]
    # Blocks that keep less could be better with the present policy if something is streamed or
    # quantized, and with the next faster one; not if no step of this run can be that much faster.
    policy, quantize = str(chosen.execution.checkpointing), chosen.execution.quantize
    index = POLICIES.index(policy) if policy in POLICIES else 0
    policies = POLICIES[index : index + 2]
    if not chosen.host and quantize == "none":
        policies = policies[1:] if shortest_seconds(best.task) <= _FASTER * chosen.score else ()
    if policies:
        offered += _better(chosen, accepted(_with_narrow_residual(best.level), task_of), policies)
    if best.level.config.base.compute == "dtype" and quantize in ("int8", "fp8"):
        # Products in the 8 bits in which the weights are stored.
        level = replace(best.level, config=_with(best.level.config, "base", quantize=quantize))
        codes = iter([level.then("base", compute=quantize)])
        offered += _better(
            chosen, accepted(codes, task_of), [policy if policy in POLICIES else _QUICK]
        )
    return replace(best, later=tuple(offered))


def _better(
    best: Candidate, others: Iterator[tuple[Level, FitTask]], policies: Sequence[str]
) -> Iterator[tuple[Level, Candidate]]:
    """The first of other levels that is faster or needs less host memory under one of these
    policies: those behind it are not planned."""
    for level, task in others:
        formats = [
            quantize
            for quantize in task.quantizations
            if quantize in ("none", best.execution.quantize)
        ]
        every = (
            candidate
            for policy in policies
            for quantize in formats
            for candidate in candidates(task, policy, quantize)
        )
        one = min(every, key=lambda candidate: candidate.score, default=None)
        if one is not None and (
            one.score <= _FASTER * best.score or one.host < _LESS_HOST * best.host
        ):
            yield level, one
            return


def state_bytes(profile: Profile) -> int:
    """Bytes of what a full fine-tune keeps of its weights: values, gradients, optimizer state and
    average."""
    return sum(
        stage.weights + stage.adapters + stage.gradients + stage.optimizer + stage.average
        for stage in profile.stages
    )


@dataclass(frozen=True, kw_only=True)
class SuggestedChange:
    """One changed setting, or other GPUs."""

    words: str
    """The new value, and the present one."""
    lost_share: float
    """Share of the configured run that is lost, in [0, 1]; above 1 it costs money."""
    config: RunConfig
    gpus: tuple[GPU, ...]
    missing: int = 0
    """Once it is planned: bytes that the fullest GPU still lacks under the smallest settings, or
    else the host; 0 if they fit."""


def levers(
    spec: ModelSpec, config: RunConfig, gpus: tuple[GPU, ...]
) -> Iterator[list[SuggestedChange]]:
    """Possible changes of a configuration that is completed with the model's own sizes; each list
    is about one setting, the mildest change first. Without GPUs, changes of GPUs are left out."""
    for changes in (_batches(config), _frames(spec, config), _sizes(spec, config), _ranks(config)):
        yield [
            SuggestedChange(
                words=words, lost_share=lost, config=_with(config, section, **values), gpus=gpus
            )
            for words, lost, section, values in changes
        ]
    if gpus:
        yield _larger_gpus(config, gpus)
        largest = max(gpus, key=lambda gpu: gpu.total)
        words, lost = f"one more GPU ({largest.name})", 1.0 + largest.total / GIB / 1000
        yield [SuggestedChange(words=words, lost_share=lost, config=config, gpus=(*gpus, largest))]


_NewValues = tuple[str, float, str, dict[str, Any]]
"""Words, lost share, section of the configuration, and its new values."""


def _with(config: RunConfig, section: str, **values: Any) -> RunConfig:
    changed: dict[str, Any] = {section: replace(getattr(config, section), **values)}
    return replace(config, **changed)


def _batches(config: RunConfig) -> Iterator[_NewValues]:
    now = config.train.batch_size
    if now > 1:
        # Accumulation keeps the number of samples in a step, so training stays the same and only
        # slows down.
        fewer = {"batch_size": 1, "accumulation": config.train.accumulation * now}
        words = f"train.batch_size = 1 (now {now}) with train.accumulation = {fewer['accumulation']}: as many samples in a step"
        yield words, 0.0, "train", fewer


def _frames(spec: ModelSpec, config: RunConfig) -> Iterator[_NewValues]:
    now, step, buckets = config.data.frames, spec.data.frame_step, sorted(config.data.frame_buckets)
    for count in range(len(buckets) - 1, 0, -1):
        kept = tuple(buckets[:count])
        words = f"data.frame_buckets = {list(kept)} (now {buckets})"
        yield words, 1 - kept[-1] / now, "data", {"frames": kept[-1], "frame_buckets": kept}
    if step and now > 1 and not buckets:
        for frames in dict.fromkeys(
            1 + int((now - 1) * share) // step * step for share in (0.8, 0.65, 0.5, 0.3)
        ):
            if 1 < frames < now:
                yield (
                    f"data.frames = {frames} (now {now})",
                    1 - frames / now,
                    "data",
                    {"frames": frames},
                )


def _sizes(spec: ModelSpec, config: RunConfig) -> Iterator[_NewValues]:
    data, step = config.data, spec.data.size_step
    now, sides = data.height * data.width, sorted(data.resolutions)
    for count in range(len(sides) - 1, 0, -1):
        kept, side = tuple(sides[:count]), sides[count - 1]
        words = f"data.resolutions = {list(kept)} (now {sides})"
        yield (
            words,
            1 - side * side / now,
            "data",
            {"resolutions": kept, "height": side, "width": side},
        )
    for share in () if sides else (0.85, 0.7, 0.5):
        height, width = (
            max(step, int(side * share) // step * step) for side in (data.height, data.width)
        )
        if height * width < now:
            words = (
                f"data.height = {height} and width = {width} (now {data.height} and {data.width})"
            )
            yield words, 1 - height * width / now, "data", {"height": height, "width": width}


def _ranks(config: RunConfig) -> Iterator[_NewValues]:
    adapter = config.adapter
    if adapter.method in ("lora", "loha") and not adapter.init:
        for rank in dict.fromkeys((adapter.rank // 2, adapter.rank // 4)):
            if rank >= 1:
                yield (
                    f"adapter.rank = {rank} (now {adapter.rank})",
                    1 - rank / adapter.rank,
                    "adapter",
                    {"rank": rank},
                )


def _larger_gpus(config: RunConfig, gpus: tuple[GPU, ...]) -> list[SuggestedChange]:
    """Larger GPUs instead of the smallest ones, or of all if they are equal."""
    smallest = min(gpu.total for gpu in gpus)
    replaced = [gpu.name for gpu in gpus if gpu.total == smallest]
    count, names = len(replaced), " and ".join(dict.fromkeys(replaced))
    changes = []
    for size in GPU_SIZES:
        if size * GIB > smallest * 1.1:
            # Published sizes instead of the next byte: the suggestion has to be a GPU that can be
            # bought.
            larger = tuple(as_sold(size) if gpu.total == smallest else gpu for gpu in gpus)
            words = (
                f"{'a GPU' if count == 1 else f'{count} GPUs'} of {size} GiB in place of {names}"
            )
            changes.append(
                SuggestedChange(
                    words=words, lost_share=1.0 + size / 1000, config=config, gpus=larger
                )
            )
    return changes
