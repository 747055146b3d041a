"""What a run may change, or which other GPUs it may have, so that it fits.

`fit` searches settings that change no number, and the format of the frozen weights. Only if that
finds nothing for the run as it is configured, its `levels` are tried: one lever after the other is
added to those before it, in the order of what changes numbers least, until something fits. They are
how a full fine-tune stores and updates its weights; then, for any run, the dtype of the residual
stream. Among the settings of one such level the fastest are chosen.

If no level fits, there are `levers`: fewer or smaller samples, a lower rank, larger GPUs. Each is
planned, none is guessed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ditkit_core.config.sizes import GIB
from ditkit_core.errors import UserError
from ditkit_core.models.precision import PrecisionConfig
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.fit import Fit, fit
from ditkit_core.planner.gpus import GPU, as_sold
from ditkit_core.planner.memory import Profile
from ditkit_core.planner.search import FitTask
from ditkit_core.run.config import RunConfig

T = TypeVar("T")

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
    def lines(self) -> list[str]:
        """A line about each change."""
        return [f"changed: {change}" for change in self.changed]

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


def levels(config: RunConfig, *, in_backward: bool = True) -> Iterator[Level]:
    """The run as it is, then with one lever more each time. With several ranks the optimizer cannot
    step in the backward."""
    level = Level(config=config)
    yield level
    if config.adapter.method == "full" and not config.optim.kind.estimates_rate:
        for following in _of_updates(level, in_backward=in_backward):
            level = following
            yield level
    # Where that changes a dtype, and no other dtypes are configured.
    if level.config.model.dtype != "fp32" and config.precision == PrecisionConfig():
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
    config: RunConfig, task_of: Callable[[RunConfig], FitTask]
) -> tuple[Level, FitTask, Fit]:
    """The first level with which something fits, with its search; the last level if nothing fits.
    `task_of` is the search problem of a run with another configuration."""
    for level, task in accepted(levels(config), task_of):
        state = 0
        # what is frozen can be streamed, so it need not fit
        if not task.adapts and not task.streams_trained:
            state = state_bytes(task.profile_of("full", "none"))
        cannot_fit = state > sum(gpu.budget.available for gpu in task.gpus)
        result = Fit(others={}) if cannot_fit else fit(task)
        if result.chosen is not None:
            break
    return level, task, result


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
