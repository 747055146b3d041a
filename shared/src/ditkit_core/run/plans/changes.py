"""Changes of a run, or of its GPUs, with which it could fit: fewer or smaller samples, a lower rank, larger GPUs. Each is planned, none is guessed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ditkit_core.config.sizes import GIB
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import GPU, as_sold
from ditkit_core.run.config import RunConfig

GPU_SIZES = (12, 16, 24, 32, 48, 80, 96, 141)
"""GiB of GPUs on the market."""


@dataclass(frozen=True, kw_only=True)
class SuggestedChange:
    """One changed setting, or other GPUs."""

    words: str
    """The new value, and the present one."""
    lost_share: float
    """Share of the configured run that is lost, in [0, 1]; above 1 it costs money."""
    config: RunConfig
    gpus: tuple[GPU, ...]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A change with its plan."""

    change: SuggestedChange
    missing: int
    """Bytes that the fullest GPU still lacks under the smallest settings, or else the host; 0 if they fit."""


def levers(spec: ModelSpec, config: RunConfig, gpus: tuple[GPU, ...]) -> Iterator[list[SuggestedChange]]:
    """Possible changes; each list is about one setting, the mildest change first.

    Args:
        spec: The model's family, whose sizes have steps.
        config: Completed with the model's own sizes.
        gpus: The present GPUs; empty leaves out changes of GPUs.
    """
    for changes in (_batches(config), _frames(spec, config), _sizes(spec, config), _ranks(config)):
        yield [
            SuggestedChange(words=words, lost_share=lost, config=_with(config, section, **values), gpus=gpus)
            for words, lost, section, values in changes
        ]
    if gpus:
        yield _larger_gpus(config, gpus)
        yield [_one_more(config, gpus)]


def best_first(planned: Sequence[Planned]) -> list[Planned]:
    """Sort changes: first those with which the run fits, the least costly first; then the others, by missing bytes."""
    return sorted(planned, key=lambda plan: (plan.missing, plan.change.lost_share))


_Changed = tuple[str, float, str, dict[str, Any]]
"""Words, lost share, section of the configuration, and its new values."""


def _with(config: RunConfig, section: str, **values: Any) -> RunConfig:
    changed: dict[str, Any] = {section: replace(getattr(config, section), **values)}
    return replace(config, **changed)


def _batches(config: RunConfig) -> Iterator[_Changed]:
    now = config.train.batch_size
    if now > 1:
        # Accumulation keeps the number of samples in a step, so training stays the same and only slows down.
        fewer = {"batch_size": 1, "accumulation": config.train.accumulation * now}
        words = f"train.batch_size = 1 (now {now}) with train.accumulation = {fewer['accumulation']}: as many samples in a step"
        yield words, 0.0, "train", fewer


def _frames(spec: ModelSpec, config: RunConfig) -> Iterator[_Changed]:
    now, step, buckets = config.data.frames, spec.data.frame_step, sorted(config.data.frame_buckets)
    for count in range(len(buckets) - 1, 0, -1):
        kept = tuple(buckets[:count])
        words = f"data.frame_buckets = {list(kept)} (now {buckets})"
        yield words, 1 - kept[-1] / now, "data", {"frames": kept[-1], "frame_buckets": kept}
    if step and now > 1 and not buckets:
        for frames in dict.fromkeys(1 + int((now - 1) * share) // step * step for share in (0.8, 0.65, 0.5, 0.3)):
            if 1 < frames < now:
                yield f"data.frames = {frames} (now {now})", 1 - frames / now, "data", {"frames": frames}


def _sizes(spec: ModelSpec, config: RunConfig) -> Iterator[_Changed]:
    data, step = config.data, spec.data.size_step
    now, sides = data.height * data.width, sorted(data.resolutions)
    for count in range(len(sides) - 1, 0, -1):
        kept, side = tuple(sides[:count]), sides[count - 1]
        words = f"data.resolutions = {list(kept)} (now {sides})"
        yield words, 1 - side * side / now, "data", {"resolutions": kept, "height": side, "width": side}
    for share in () if sides else (0.85, 0.7, 0.5):
        height, width = (max(step, int(side * share) // step * step) for side in (data.height, data.width))
        if height * width < now:
            words = f"data.height = {height} and width = {width} (now {data.height} and {data.width})"
            yield words, 1 - height * width / now, "data", {"height": height, "width": width}


def _ranks(config: RunConfig) -> Iterator[_Changed]:
    adapter = config.adapter
    if adapter.method in ("lora", "loha") and not adapter.init:
        for rank in dict.fromkeys((adapter.rank // 2, adapter.rank // 4)):
            if rank >= 1:
                yield f"adapter.rank = {rank} (now {adapter.rank})", 1 - rank / adapter.rank, "adapter", {"rank": rank}


def _larger_gpus(config: RunConfig, gpus: tuple[GPU, ...]) -> list[SuggestedChange]:
    """Larger GPUs instead of the smallest ones, or of all if they are equal."""
    smallest = min(gpu.total for gpu in gpus)
    replaced = [gpu.name for gpu in gpus if gpu.total == smallest]
    count, names = len(replaced), " and ".join(dict.fromkeys(replaced))
    changes = []
    for size in GPU_SIZES:
        if size * GIB > smallest * 1.1:
            # Published sizes instead of the next byte: the suggestion has to be a GPU that can be bought.
            larger = tuple(as_sold(size) if gpu.total == smallest else gpu for gpu in gpus)
            words = f"{'a GPU' if count == 1 else f'{count} GPUs'} of {size} GiB in place of {names}"
            changes.append(SuggestedChange(words=words, lost_share=1.0 + size / 1000, config=config, gpus=larger))
    return changes


def _one_more(config: RunConfig, gpus: tuple[GPU, ...]) -> SuggestedChange:
    largest = max(gpus, key=lambda gpu: gpu.total)
    words = f"one more GPU ({largest.name})"
    return SuggestedChange(
        words=words, lost_share=1.0 + largest.total / GIB / 1000, config=config, gpus=(*gpus, largest)
    )
