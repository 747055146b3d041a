"""The loss on a fixed grid of (clip, noise level, noise): the one number of a run that is
comparable from step to step.

Its confidence interval is of the change since before training, by Student's t over the files'
changes. Files are the independent units: a clip that is hard at one noise level is hard at the
next, and windows of one file are alike. Each clip is compared with itself, so differences between
clips cancel. The interval is centred on the current loss. If it does not contain the loss before
training, the choice of clips does not explain the change. Clips of one file have no interval.
Picking the best of many measurements biases it: its confidence interval is too optimistic.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.loading.model import Model
from ditkit_core.models.protocol import StagedModel
from ditkit_core.training.config import FlowConfig, HeldOutConfig
from ditkit_core.training.flow_matching import NoisedBatch, to_device, velocity_errors, with_targets
from ditkit_core.training.train_model import MicroBatch

_PLAIN = FlowConfig()
_SEED = 0
"""The grid's own seed: runs with different `train.seed` are validated with the same noise."""


def sigmas_between(sigmas: Sequence[float], low: float, high: float) -> tuple[float, ...]:
    """The noise levels to validate an expert at, which sees only those from `low` to `high`
    (excluded unless it is 1).

    They are the levels of the list inside its range, if these are at least three (or all).
    Otherwise the whole list, mapped from [0, 1] to the range, because a single level at its edge
    would say little.
    """
    levels = tuple(sigma for sigma in sigmas if low <= sigma < high or sigma == high == 1)
    if len(levels) >= min(3, len(sigmas)):
        return levels
    # Six digits are what metrics print of a level, and what resolves it in their names.
    return tuple(round(low + (high - low) * sigma, 6) for sigma in sigmas)


class ValidationResult(NamedTuple):
    """Unweighted velocity error."""

    mean: float
    """Over clips and noise levels."""
    per_sigma: dict[float, float]
    """By noise level, over clips."""
    per_clip: dict[float, list[float]]
    """By noise level, clip by clip."""

    @classmethod
    def of(cls, per_clip: Mapping[float, Sequence[float]]) -> "ValidationResult":
        """Average errors that are given by noise level, clip by clip."""
        per_sigma = {sigma: sum(values) / len(values) for sigma, values in per_clip.items()}
        mean = sum(per_sigma.values()) / len(per_sigma)
        return cls(mean, per_sigma, {sigma: list(values) for sigma, values in per_clip.items()})

    def broken(self) -> tuple[float, int] | None:
        """Noise level and index of the first clip whose error is not finite; None if all are
        finite."""
        positions = (
            (sigma, i) for sigma, values in self.per_clip.items() for i in range(len(values))
        )
        return next(
            ((sigma, i) for sigma, i in positions if not math.isfinite(self.per_clip[sigma][i])),
            None,
        )

    def half_widths(
        self, before: "ValidationResult", files: Sequence[str] = ()
    ) -> tuple[float | None, dict[float, float]]:
        """Half widths of the 95 % intervals of the changes since `before`: over all, and by noise
        levels of both.

        `files`: The file of each clip; clips of one file are not independent. Empty if each is from
        a file of its own.
        """
        shared = [sigma for sigma in self.per_clip if sigma in before.per_clip]
        changes = {
            sigma: [
                now - then
                for now, then in zip(self.per_clip[sigma], before.per_clip[sigma], strict=True)
            ]
            for sigma in shared
        }
        by_level = {
            sigma: half
            for sigma in shared
            if (half := half_width(changes[sigma], files)) is not None
        }
        # Means over different levels cannot be compared; the shared levels still can.
        if before.per_clip.keys() != self.per_clip.keys():
            return None, by_level
        by_clip = [sum(clip) / len(clip) for clip in zip(*changes.values(), strict=True)]
        return half_width(by_clip, files), by_level


class ValidationHistory:
    """Held-out losses of a run: before training, and the last. Stored in its saves."""

    def __init__(self, values: Mapping[str, Any] | None = None):
        """Start empty, or continue from the `State.values` of a save."""
        stored = values or {}
        self.before: float | None = stored.get("held_out_before")
        self.last: float | None = stored.get("held_out_last")
        self.interval: tuple[float, float] | None = (
            tuple(interval) if (interval := stored.get("held_out_interval")) else None
        )
        clips = stored.get("held_out_before_clips")
        self._first = (
            ValidationResult.of({float(sigma): errors for sigma, errors in clips.items()})
            if clips
            else None
        )

    def take(
        self, loss: ValidationResult, *, first: bool, files: Sequence[str] = ()
    ) -> dict[str, float]:
        """Add a measurement; `first` is the one before training, `files` as in
        `ValidationResult.half_widths`.

        Returns:
            Metrics by name: `held_out`, `held_out/sigma_0.3`, … and except for the first
            measurement the ends of their intervals, `held_out_low`, `held_out/sigma_0.3_high`, ….
        """
        numbers = {"held_out": loss.mean} | {
            f"held_out/sigma_{sigma:g}": x for sigma, x in loss.per_sigma.items()
        }
        self.last, self.interval = loss.mean, None
        if first:
            self.before, self._first = loss.mean, loss
        elif self._first is not None:
            half, by_sigma = loss.half_widths(self._first, files)
            if half is not None:
                self.interval = (loss.mean - half, loss.mean + half)
            halves = {"held_out": half} | {
                f"held_out/sigma_{sigma:g}": x for sigma, x in by_sigma.items()
            }
            for name, width in halves.items():
                if width is not None:
                    numbers |= {
                        f"{name}_low": numbers[name] - width,
                        f"{name}_high": numbers[name] + width,
                    }
        return numbers

    def state(self) -> dict[str, Any]:
        """For JSON: the values that `ValidationHistory(values)` continues from."""
        clips = self._first.per_clip if self._first else {}
        return {
            "held_out_before": self.before,
            "held_out_last": self.last,
            "held_out_interval": self.interval,
            # JSON keys are text, and repr keeps every bit of a float
            "held_out_before_clips": {
                repr(float(sigma)): errors for sigma, errors in clips.items()
            },
        }


def validation_loss(
    model: Model,
    ids: Sequence[str],
    items: Sequence[Mapping[str, Tensor]],
    sigmas: Sequence[float],
    flow: FlowConfig = _PLAIN,
    ranks: Ranks | None = None,
) -> ValidationResult:
    """Validate the model without side effects: no gradients, no dropout, no shared random
    generator.

    Args:
        ids: Stable names of the clips, at least one.
        items: Their training items.
        sigmas: Noise levels, at least one.
        flow: What the model is conditioned on and predicts, as in training.
        ranks: The processes that share the clips; None for this one alone.
    """
    device, ranks = next(model.module.embed.parameters()).device, ranks or Ranks()
    errors = torch.zeros(len(sigmas), len(ids), dtype=torch.float64)
    with torch.no_grad(), _evaluating(model.module):
        share = (
            [(clip, True) for clip in ranks.share(len(ids))]
            if model.shards is None
            else ranks.even_share(len(ids))
        )
        for clip, counts in share:
            name, item = ids[clip], items[clip]
            moved = [to_device(item, device)]
            for level_index, sigma in enumerate(sigmas):
                # Noise by clip and level, so that adding clips or levels does not change the noise
                # of the others.
                random = generator(_SEED, "held-out", name, str(float(sigma)))
                noise = [torch.randn(item["latents"].shape, generator=random).to(device)]
                level = torch.full((1,), sigma, dtype=torch.float32, device=device)
                # One sample at a time, so that a clip's error does not depend on the other clips of
                # a batch.
                batch = with_targets(model, NoisedBatch(moved, level, noise), flow)
                error = velocity_errors(model, batch, flow.guidance)[0]
                if counts:
                    errors[level_index, clip] = float(error)
    return ValidationResult.of(dict(zip(sigmas, ranks.sum_of_groups(errors).tolist(), strict=True)))


class Validator:
    """Validates a model on clips that are not trained on."""

    def __init__(
        self,
        config: HeldOutConfig,
        clips: MicroBatch,
        *,
        files: Sequence[str] = (),
        flow: FlowConfig = _PLAIN,
    ) -> None:
        """Store the clips, at least one, and the file of each; `files` is empty if each is from a
        file of its own."""
        self.files = files
        self._config, self._clips, self._flow = config, clips, flow

    def due(self, step: int, *, saving: bool) -> bool:
        """Whether to validate after `step` optimizer steps, given whether the run saves there."""
        return self._config.due(step, saving=saving)

    def measure(
        self, model: Model, step: int, last_save: Path | None, ranks: Ranks | None = None
    ) -> ValidationResult:
        """Measure the held-out loss of the model, of whose clips each rank takes its share."""
        clips = self._clips
        loss = validation_loss(
            model, clips.ids, clips.items, self._config.sigmas, self._flow, ranks
        )
        if (broken := loss.broken()) is not None:
            sigma, clip = broken
            raise UserError(
                _cannot_measure(step, clips.ids[clip], sigma, last_save, model.spec.name)
            )
        return loss


def _cannot_measure(step: int, clip: str, sigma: float, save: Path | None, family: str) -> str:
    """The message for a loss that is not finite."""
    where = f"is not finite at held-out clip {clip}, noise level {sigma:g}"
    if step == 0:
        return (
            f"before training, the loss {where}: the weights or that clip are damaged; replace "
            f"them, remove the clip, or check its cache entry ({family}-encode --verify-cache)"
        )
    remedy = (
        f"the last save is {save}: lower optim.lr, and resume from it"
        if save
        else "nothing is saved: lower optim.lr"
    )
    return f"the loss after step {step} {where}; {remedy}"


@contextmanager
def _evaluating(model: StagedModel) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def half_width(
    values: Sequence[float], units: Sequence[Hashable] = (), confidence: float = 0.95
) -> float | None:
    """Half the width of a mean's confidence interval, by Student's t; None for fewer than two
    independent units.

    Values of one unit may depend on each other in any way, because only the sum of a unit's
    deviations from the mean enters.

    Args:
        values: Values to average; their unit sums are assumed to be about normally distributed.
        units: The independent unit of each value; empty if each is one of its own.
        confidence: Share of such intervals that contain the true mean, in (0, 1).

    Source: the cluster-robust variance of a mean, with G / (G - 1) for few units and Student's t
        with G - 1 degrees of freedom.
    """
    mean = math.fsum(values) / max(len(values), 1)
    parts: dict[Hashable, list[float]] = defaultdict(list)
    for value, unit in zip(values, units or range(len(values)), strict=True):
        parts[unit].append(value - mean)
    count = len(parts)
    if count < 2:
        return None
    squares = math.fsum(math.fsum(part) ** 2 for part in parts.values())
    return (
        t_quantile(count - 1, confidence) * math.sqrt(squares * count / (count - 1)) / len(values)
    )


def t_quantile(degrees: int, confidence: float = 0.95) -> float:
    """The two-sided quantile of Student's t: `|t|` of so many degrees of freedom stays below it
    with this probability."""
    # By bisection, because the standard library has no inverse and scipy is not a dependency.
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """Probability that |t| <= tan(angle) * sqrt(degrees).

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4: finite
    sums for whole degrees.
    """
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(degrees // 2):
        total += term
        term *= square * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
