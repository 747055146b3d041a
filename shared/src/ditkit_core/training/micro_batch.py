"""A micro-batch: its forward, its loss, and its backward, which runs eagerly or is replayed
(`replay.py`)."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.engine.generator_state import GeneratorHook
from ditkit_core.errors import UserError
from ditkit_core.io.step_clock import StepClock
from ditkit_core.loading.model import Model
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import (
    NoisedBatch,
    PreparedBatch,
    loss_weight,
    matching_base,
    sigma_at,
    velocity_errors,
    with_targets,
)


def forward_and_backward(
    model: Model, batch: PreparedBatch, divisor: Tensor, clock: StepClock, *, flow: FlowConfig
) -> Tensor:
    """Run a micro-batch, and return the weighted loss of each sample. A replay runs it without
    Python (`training/replay.py`)."""
    weighted = weighted_errors(model, batch, flow, clock)
    mean_of(weighted, divisor, clock).backward()
    return weighted.detach()


def weighted_errors(
    model: Model, batch: PreparedBatch, flow: FlowConfig, clock: StepClock
) -> Tensor:
    """Run the forward of a micro-batch, and return the weighted loss of each sample.

    The generators were seeded for this micro-batch, so that dropout does not depend on what ran
    before, for example after a resume.
    """
    clock.mark(batch.noised.sigma.device, "forward")
    noised = batch.noised
    if batch.matches_base or flow.target_guidance != 1 or flow.slider_positive:
        hooks = [
            GeneratorHook(device)
            for device in dict.fromkeys(p.device for p in model.module.parameters())
        ]
        states = [hook.snapshot() for hook in hooks]
        noised = (
            matching_base(model, noised, flow.guidance)
            if batch.matches_base
            else with_targets(model, noised, flow)
        )
        for hook, state in zip(hooks, states, strict=True):
            hook.restore(state)
    return velocity_errors(model, noised, flow.guidance) * batch.weights


def mean_of(weighted: Tensor, divisor: Tensor, clock: StepClock) -> Tensor:
    """The samples' losses over a number on their device, where the backward begins: a GPU divides
    by a number of the host by multiplying with its rounded reciprocal."""
    clock.mark(weighted.device, "backward")
    return weighted.sum() / divisor


def flow_loss(
    model: Model,
    items: Sequence[Mapping[str, Tensor]],
    flow: FlowConfig | None = None,
    *,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """The loss of a training loop of one's own: the mean of the samples' flow-matching losses at
    sampled noise levels.

    Args:
        items: Training items, such as `EncodedSample.load` returns.
        flow: Distribution, shift and weighting of noise levels; None for the model's own.
        generator: Samples noise levels and noise, on the CPU; None for torch's own.

    Raises:
        UserError: If `items` is a mapping, such as torch's default collate returns.
    """
    if isinstance(items, Mapping):
        raise UserError(
            "items is one mapping, as torch's default collate makes of a batch, and samples differ "
            "in size; write DataLoader(…, collate_fn=list), or [item] for one item"
        )
    flow, spec = flow or FlowConfig(), model.spec
    shifts = [flow.shift_for(spec.training.shift(item["latents"])) for item in items]
    uniform = torch.rand(len(items), dtype=torch.float64, generator=generator)
    levels = [sigma_at(u, flow, shift).float() for u, shift in zip(uniform, shifts, strict=True)]
    noise = [torch.randn(item["latents"].shape, generator=generator) for item in items]
    weights = [loss_weight(level, flow, shift) for level, shift in zip(levels, shifts, strict=True)]
    sigma = torch.stack(levels)
    noised = NoisedBatch.of(spec, items, sigma, noise)
    batch = PreparedBatch(sigma=sigma, noised=noised, weights=torch.stack(weights))
    first, last = (
        next(stage.parameters()).device for stage in (model.module.embed, model.module.head)
    )
    return weighted_errors(model, batch.to(first, last), flow, StepClock()).mean()
