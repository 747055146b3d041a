"""The loss on a fixed grid of (clip, noise level, noise): the one number of a run that is comparable from step to step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditkit_core.errors import UserError
from ditkit_core.flow_matching import to_device, velocity_errors
from ditkit_core.model import Engine, ModelSpec
from ditkit_core.randomness import generator
from ditkit_core.settings import setting

_SEED = 0
"""The grid's own seed: runs that differ in `train.seed` are measured by the same noise."""


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """The `[held_out]` section."""

    clips: int = setting(0, resume="refused")
    """Clips that are kept from training and measured instead; 0 measures nothing."""
    sigmas: tuple[float, ...] = setting((0.1, 0.3, 0.5, 0.7, 0.9), resume="stated")
    """Noise levels at which each clip is measured, in [0, 1]."""
    every_steps: int = setting(0, resume="free")
    """Optimizer steps between two measurements; 0 measures at each scheduled save. Always before and after training."""

    def __post_init__(self) -> None:
        if self.clips < 0 or self.every_steps < 0:
            raise UserError("held_out.clips and held_out.every_steps must be at least 0")
        if not self.sigmas or not all(0 <= sigma <= 1 for sigma in self.sigmas):
            raise UserError(f"held_out.sigmas = {list(self.sigmas)} must be noise levels in [0, 1], at least one")

    def due(self, step: int, *, saving: bool) -> bool:
        """Whether to measure after `step` optimizer steps, given whether the run saves there."""
        return step % self.every_steps == 0 if self.every_steps else saving


class HeldOutLoss(NamedTuple):
    """Unweighted velocity error."""

    mean: float
    """Over clips and noise levels."""
    per_sigma: dict[float, float]
    """By noise level, over clips."""


def held_out_loss(
    model: Any,
    run: Engine,
    spec: ModelSpec,
    ids: Sequence[str],
    items: Sequence[Mapping[str, Tensor]],
    sigmas: Sequence[float],
    guidance: float = 1.0,
) -> HeldOutLoss:
    """Measure the model without touching anything: no gradients, no dropout, no shared random numbers.

    Args:
        model: The staged model; its train and eval modes are put back.
        run: The engine for its forward.
        spec: The model's spec.
        ids: Stable names of the clips, at least one.
        items: Their training items.
        sigmas: Noise levels, at least one.
        guidance: What a model with an embedding of guidance is told, as in training.
    """
    device = next(model.embed.parameters()).device
    errors: dict[float, list[float]] = {sigma: [] for sigma in sigmas}
    with torch.no_grad(), _evaluating(model):
        for name, item in zip(ids, items, strict=True):
            moved = [to_device(item, device)]
            for sigma, values in errors.items():
                random = generator(_SEED, "held-out", name, str(float(sigma)))
                noise = [torch.randn(item["latents"].shape, generator=random).to(device)]
                level = torch.full((1,), sigma, dtype=torch.float32, device=device)
                # one sample at a time: a clip's number does not depend on the others
                values.append(float(velocity_errors(model, run, spec.make_inputs, moved, level, noise, guidance)[0]))
    per_sigma = {sigma: sum(values) / len(values) for sigma, values in errors.items()}
    return HeldOutLoss(sum(per_sigma.values()) / len(per_sigma), per_sigma)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
