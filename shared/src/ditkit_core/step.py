"""One optimizer step: gradients accumulated over micro-batches, clipped once, applied once, or not at all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ditkit_core.flow_matching import FlowConfig, draw_noise, loss_weight, to_device, velocity_errors
from ditkit_core.model import Engine, ModelSpec
from ditkit_core.optim import NamedOptimizer
from ditkit_core.precision import autocast_disabled
from ditkit_core.randomness import seed_of


@runtime_checkable
class MicroBatch(Protocol):
    """Samples that go through the model together."""

    @property
    def ids(self) -> Sequence[str]:
        """Stable names of the samples."""
        ...

    @property
    def items(self) -> Sequence[Mapping[str, Tensor]]:
        """Their tensors: `latents` [channels, frames, height, width] and the model's own."""
        ...

    @property
    def weights(self) -> Sequence[float]:
        """Factor of each sample's loss; empty: 1 each."""
        ...

    @property
    def counted(self) -> float | None:
        """How many samples it counts for in the step's mean: None for as many as it has, 0 for what is added to the mean."""
        ...


class StepResult(NamedTuple):
    """What one optimizer step reports."""

    loss: float
    """Sum of the samples' weighted losses, by the number of samples that are counted: the weighted mean, plus prior.weight times
    that of the prior's samples where there are some."""
    grad_norm: float
    """Norm of all gradients, before clipping."""


@dataclass(frozen=True)
class Losses:
    """The micro-batches of a step as they went through: what a failure is explained by."""

    ids: list[Sequence[str]]
    sigmas: list[Tensor]
    weighted: list[Tensor]
    """Loss of each sample, float32 [batch] per micro-batch."""


class NonFiniteLoss(Exception):
    """A loss or gradient that is infinite or not a number; the weights and the optimizer are as before the step.

    Attributes:
        evidence: What is known about it, for JSON.
    """

    def __init__(self, evidence: dict[str, Any]):
        super().__init__(f"the loss or gradient of step {evidence['step']} is not finite")
        self.evidence = evidence


def training_step(
    model: Any,
    run: Engine,
    spec: ModelSpec,
    micro_batches: Sequence[MicroBatch],
    optimizer: NamedOptimizer,
    *,
    step: int,
    lr: float,
    seed: int,
    flow: FlowConfig,
    clip_norm: float,
) -> StepResult:
    """Update the trained parameters once.

    Args:
        model: The staged model.
        run: The engine for its forward.
        spec: The model's spec.
        micro_batches: The step's samples; how they are cut into micro-batches changes nothing but the order of summation
            (and the masks of dropout).
        optimizer: Holds the parameters that are trained.
        step: Optimizer steps done before this one.
        lr: Learning rate of this step.
        seed: The run's seed.
        flow: Noise levels and weights.
        clip_norm: Longest gradient that is applied as it is; 0 applies any.

    Raises:
        NonFiniteLoss: If a loss or gradient is not finite; nothing is updated.
    """
    optimizer.zero_grad()
    losses = accumulate_gradients(model, run, spec, micro_batches, step=step, seed=seed, flow=flow)
    gradients = {name: p.grad for name, p in optimizer.parameters.items() if p.grad is not None}
    norm = total_norm(list(gradients.values()))
    # one transfer from the accelerator a step: reading every micro-batch's loss at once would wait for each
    num_samples = sum(len(batch.ids) for batch in micro_batches if batch.counted != 0)
    result = StepResult(float(torch.cat(losses.weighted).double().sum() / num_samples), float(norm))
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        evidence = _evidence(step, losses, gradients, result)
        optimizer.zero_grad()
        raise NonFiniteLoss(evidence)
    if clip_norm:
        torch.nn.utils.clip_grads_with_norm_(optimizer.parameters.values(), clip_norm, norm)
    optimizer.step(lr)
    return result


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, on the device of the first.

    Summed in the order given, wherever each lies: torch's own groups them by device, and would give a divided model other last bits.
    """
    places: dict[torch.device, list[int]] = {}
    for place, gradient in enumerate(gradients):
        places.setdefault(gradient.device, []).append(place)
    first = gradients[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    norms = torch.zeros(len(gradients), device=first.device, dtype=dtype)
    for chosen in places.values():
        found = torch.stack(torch._foreach_norm([gradients[place] for place in chosen]))
        norms[torch.tensor(chosen, device="cpu").to(norms.device)] = found.to(norms)
    return torch.linalg.vector_norm(norms)


def accumulate_gradients(
    model: Any,
    run: Engine,
    spec: ModelSpec,
    micro_batches: Sequence[MicroBatch],
    *,
    step: int,
    seed: int,
    flow: FlowConfig,
) -> Losses:
    """Add the gradient of the step's loss to the parameters: the sum of the samples' weighted losses, by what they count for.

    That is the weighted mean where every micro-batch counts for the samples it has. Where all count for their mean size, a
    sample weighs the same in a small micro-batch as in a large one.

    Noise level and noise of a sample are a function of (seed, step, place in the step, id), whatever micro-batch it is in;
    its place counts, because a small dataset can have one sample several times in a step.
    """
    counted = sum(len(batch.ids) if batch.counted is None else batch.counted for batch in micro_batches)
    device = next(model.embed.parameters()).device
    losses = Losses(ids=[batch.ids for batch in micro_batches], sigmas=[], weighted=[])
    place = 0
    for micro, batch in enumerate(micro_batches):
        shifts = [flow.shift_for(spec.training_shift(item["latents"])) for item in batch.items]
        drawn = [
            draw_noise(item["latents"], flow, shift, seed, "noise", step, place + i, name)
            for i, (name, item, shift) in enumerate(zip(batch.ids, batch.items, shifts, strict=True))
        ]
        place += len(drawn)
        sigma = torch.stack([level for level, _ in drawn])
        items = [to_device(item, device) for item in batch.items]
        noise = [eps.to(device, non_blocking=True) for _, eps in drawn]
        torch.manual_seed(seed_of(seed, "dropout", step, micro))  # all devices' generators
        levels = sigma.to(device, non_blocking=True)
        errors = velocity_errors(model, run, spec.make_inputs, items, levels, noise, flow.guidance)
        factors = batch.weights or [1.0] * len(drawn)
        weights = [
            factor * loss_weight(level, flow, shift)
            for factor, (level, _), shift in zip(factors, drawn, shifts, strict=True)
        ]
        weighted = errors * torch.stack(weights).to(errors.device, non_blocking=True)
        with autocast_disabled(device.type):
            (weighted.sum() / counted).backward()
        losses.sigmas.append(sigma)
        losses.weighted.append(weighted.detach())
    return losses


def _evidence(step: int, losses: Losses, gradients: Mapping[str, Tensor], result: StepResult) -> dict[str, Any]:
    """What went wrong where; numbers that JSON does not know are written as text."""
    samples = [
        {"micro_batch": micro, "id": name, "sigma": float(level), "loss": _number(float(loss))}
        for micro, (ids, sigma, weighted) in enumerate(zip(losses.ids, losses.sigmas, losses.weighted, strict=True))
        for name, level, loss in zip(ids, sigma, weighted, strict=True)
    ]
    broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    return {
        "step": step,
        "loss": _number(result.loss),
        "grad_norm": _number(result.grad_norm),
        "samples": samples,
        "num_parameters_with_non_finite_gradients": len(broken),
        "first_parameters_with_non_finite_gradients": broken[:10],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
