"""Flow matching: how samples are noised, what the model predicts, and how the loss is weighted by noise level.

The noise level `sigma` is 0 for data and 1 for noise: x = (1 - sigma) * x0 + sigma * eps, and the target is the velocity
eps - x0. Everything here is fp32 or wider: a noise level rounded to bf16 collapses a thousand timesteps to about three
hundred, the largest known numerical fault of such trainers.

A noise level is sampled by inverting the cumulative distribution function at one uniform number. A range of noise
levels then truncates the distribution; clamping the samples instead would pile them up at the ends of the range.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.io.rng import generator
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.train_model import TrainModel


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Move noise levels towards 1 (shift > 1) or 0 (shift < 1); `1 / shift` moves them back.

    Source: "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section 5.3.2.
    """
    return shift * sigma / (1 + (shift - 1) * sigma)


def _cumulative(sigma: Tensor, config: FlowConfig, shift: float) -> Tensor:
    """Probability of a level below `sigma` in the distribution without its range."""
    sigma = shift_sigma(sigma, 1 / shift).clamp(0, 1)  # rounding may leave the interval, where the logit has no value
    if config.sampling == "logit_normal":
        return torch.special.ndtr((torch.logit(sigma) - config.logit_mean) / config.logit_std)
    return sigma


def sigma_at(probability: Float[Tensor, "*shape"], config: FlowConfig, shift: float = 1.0) -> Float[Tensor, "*shape"]:
    """Noise level at a cumulative probability of the configured distribution, shifted by `FlowConfig.shift_for`.

    Args:
        probability: In [0, 1]; uniform numbers give samples, an even grid gives quantiles.

    Returns:
        float64 noise levels in [min_sigma, max_sigma], increasing with the probability.
    """
    low, high = _cumulative(torch.tensor([config.min_sigma, config.max_sigma], dtype=torch.float64), config, shift)
    u = low + (high - low) * probability.double()
    if config.sampling == "logit_normal":
        u = torch.sigmoid(config.logit_mean + config.logit_std * torch.special.ndtri(u))
    # Clamped only against rounding: the range was applied to the probability.
    return shift_sigma(u, shift).clamp(config.min_sigma, config.max_sigma)


def sample_noise(
    latents: Float[Tensor, "..."], config: FlowConfig, shift: float, *names: int | str
) -> tuple[Float[Tensor, ""], Float[Tensor, "..."]]:
    """Noise level and float32 noise of one sample, as a function of names alone (seed, purpose, step, sample)."""
    random = generator(*names)
    sigma = sigma_at(torch.rand((), dtype=torch.float64, generator=random), config, shift).float()
    return sigma, torch.randn(latents.shape, generator=random)


def loss_weight(sigma: Float[Tensor, "*shape"], config: FlowConfig, shift: float = 1.0) -> Float[Tensor, "*shape"]:
    """Factor of each sample's loss, in the dtype of `sigma`.

    Source: `bell` is the training weight of DiffSynth-Studio (diffsynth/diffusion/flow_match.py), there tabulated over a
    thousand shifted timesteps and here over a thousand quantiles of the configured distribution, which is the same when
    that is uniform with shift 5; `cosmap` and `sigma_sqrt` are of Scaling Rectified Flow Transformers, section 3.1.
    """
    if config.weighting == "bell":
        return (_bell(sigma) / _bell(sigma_at(torch.arange(1, 1001) / 1000, config, shift)).mean()).to(sigma.dtype)
    if config.weighting == "cosmap":
        return 2 / (torch.pi * (1 - 2 * sigma + 2 * sigma**2))
    return sigma**-2 if config.weighting == "sigma_sqrt" else torch.ones_like(sigma)


def _bell(sigma: Tensor) -> Tensor:
    middle = torch.exp(-2 * (sigma.double() - 0.5) ** 2)
    return middle - torch.exp(torch.tensor(-0.5, dtype=torch.float64))


class NoisedBatch(NamedTuple):
    """A micro-batch with the noise that it is trained or measured at."""

    items: Sequence[Mapping[str, Tensor]]
    """Training items, each with `latents` and what else the model needs."""
    sigma: Float[Tensor, " batch"]
    """float32 noise level of each sample."""
    noise: Sequence[Float[Tensor, "..."]]
    """float32 noise of each sample, shaped like its latents."""
    targets: Sequence[Float[Tensor, "..."]] | None = None
    """The velocities to predict, on the prediction's device; None for `velocity_target` of each sample."""
    masks: Sequence[Tensor | None] | None = None
    """The loss mask of each sample, on the prediction's device; None for `ModelSpec.training.loss_mask` of each."""


def velocity_errors(model: TrainModel, batch: NoisedBatch, guidance: float) -> Float[Tensor, " batch"]:
    """Mean squared error of the predicted velocity, sample by sample; `guidance` is `FlowConfig.guidance`.

    Returns:
        float32 errors on the prediction's device; each is a mean over its sample's elements, so samples of different
        sizes have equal weight.
    """
    items, sigma, noise, targets, masks = batch
    noised = [(1 - s) * item["latents"].float() + s * eps for s, item, eps in zip(sigma, items, noise, strict=True)]
    prediction = model.module(model.spec.training.make_inputs(noised, sigma, items, guidance), engine=model.engine)
    if targets is None:
        made = [velocity_target(item, eps) for item, eps in zip(items, noise, strict=True)]
        targets = [target.to(velocity.device) for target, velocity in zip(made, prediction, strict=True)]
    # The step passes targets and masks, sent to their device ahead of time; validation has them made here.
    if masks is None:
        masks = [model.spec.training.loss_mask(item) for item in items]
    triples = zip(prediction, targets, masks, strict=True)
    return torch.stack([learnt_mean((v.float() - t).square(), mask) for v, t, mask in triples])


def learnt_mean(squares: Float[Tensor, "..."], mask: Tensor | None) -> Float[Tensor, ""]:
    """The mean of a sample's squared errors where the mask is 1, or everywhere without a mask."""
    if mask is None:
        return squares.mean()
    mask = mask.to(squares, non_blocking=True).expand_as(squares)
    return (squares * mask).sum() / mask.sum()


def velocity_target(item: Mapping[str, Tensor], noise: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The float32 velocity of a sample, from data to noise."""
    return noise - item["latents"].float()


def to_device(item: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A training item with all its tensors on one device, dtypes unchanged."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in item.items()}
