"""Flow matching: how samples are noised, what the model predicts, and how the loss is weighted by
noise level.

The noise level `sigma` is 0 for data and 1 for noise: x = (1 - sigma) * x0 + sigma * eps, and the
target is the velocity eps - x0. Everything here is fp32 or wider: a noise level rounded to bf16
collapses a thousand timesteps to about three hundred, the largest known numerical fault of such
trainers.

A noise level is sampled by inverting the cumulative distribution function at one uniform number. A
range of noise levels then truncates the distribution; clamping the samples instead would pile them
up at the ends of the range.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from ditkit_core.encoding.encoded_sample import EMPTY_CAPTION_PREFIX, SLIDER_PREFIXES, with_caption
from ditkit_core.encoding.loss_masks import LOSS_WEIGHTS
from ditkit_core.io.rng import generator
from ditkit_core.io.runtimes import sent_to
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.lora import without_adapters
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.train_model import MicroBatch


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Move noise levels towards 1 (shift > 1) or 0 (shift < 1); `1 / shift` moves them back.

    Source: "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", section
    5.3.2.
    """
    return shift * sigma / (1 + (shift - 1) * sigma)


def _cumulative(sigma: Tensor, config: FlowConfig, shift: float) -> Tensor:
    """Probability of a level below `sigma` in the distribution without its range."""
    # rounding may leave the interval, where the logit has no value
    sigma = shift_sigma(sigma, 1 / shift).clamp(0, 1)
    if config.sampling == "logit_normal":
        return torch.special.ndtr((torch.logit(sigma) - config.logit_mean) / config.logit_std)
    return sigma


def sigma_at(
    probability: Float[Tensor, "*shape"], config: FlowConfig, shift: float = 1.0
) -> Float[Tensor, "*shape"]:
    """Noise level at a cumulative probability of the configured distribution, shifted by
    `FlowConfig.shift_for`.

    Args:
        probability: In [0, 1]; uniform numbers give samples, an even grid gives quantiles.

    Returns:
        float64 noise levels in [min_sigma, max_sigma], increasing with the probability.
    """
    low, high = _cumulative(
        torch.tensor([config.min_sigma, config.max_sigma], dtype=torch.float64), config, shift
    )
    u = low + (high - low) * probability.double()
    if config.sampling == "logit_normal":
        u = torch.sigmoid(config.logit_mean + config.logit_std * torch.special.ndtri(u))
    # Clamped only against rounding: the range was applied to the probability.
    return shift_sigma(u, shift).clamp(config.min_sigma, config.max_sigma)


class Stratum(NamedTuple):
    """One of several equally likely parts of a distribution of noise levels."""

    number: int = 0
    """Counted from 0, at the lowest levels."""
    total: int = 1


def strata_of(
    flow: FlowConfig, micro_batches: Sequence[MicroBatch], micro: int, *, seed: int, step: int
) -> Sequence[Stratum]:
    """The part of the distribution in which each sample of a micro-batch has its noise level: all
    of it without `flow.stratified`.

    Class images, which do not count, have strata of their own, so that neither kind of sample lacks
    levels that the other has.
    """
    batch = micro_batches[micro]
    if not flow.stratified:
        return [Stratum()] * len(batch.ids)
    sizes = [
        len(other.ids) if (other.counted == 0) == (batch.counted == 0) else 0
        for other in micro_batches
    ]
    order = torch.randperm(
        sum(sizes), generator=generator(seed, "strata", step, int(batch.counted == 0))
    ).tolist()
    start = sum(sizes[:micro])
    return [Stratum(number, len(order)) for number in order[start : start + sizes[micro]]]


def sample_noise(
    latents: Float[Tensor, "..."],
    config: FlowConfig,
    shift: float,
    *names: int | str,
    stratum: Stratum = Stratum(),  # noqa: B008, a NamedTuple
) -> tuple[Float[Tensor, ""], Float[Tensor, "..."]]:
    """Noise level and float32 noise of one sample, as a function of names (seed, purpose, step,
    sample) and the level's stratum."""
    random = generator(*names)
    probability = (
        stratum.number + torch.rand((), dtype=torch.float64, generator=random)
    ) / stratum.total
    return sigma_at(probability, config, shift).float(), torch.randn(
        latents.shape, generator=random
    )


def loss_weight(
    sigma: Float[Tensor, "*shape"], config: FlowConfig, shift: float = 1.0
) -> Float[Tensor, "*shape"]:
    """Factor of each sample's loss, in the dtype of `sigma`.

    Source: `bell` is the training weight of DiffSynth-Studio (diffsynth/diffusion/flow_match.py),
    there tabulated over a thousand shifted timesteps and here over a thousand quantiles of the
    configured distribution, which is the same when that is uniform with shift 5; `cosmap` and
    `sigma_sqrt` are of Scaling Rectified Flow Transformers, section 3.1.
    """
    if config.weighting == "bell":
        return (
            _bell(sigma) / _bell(sigma_at(torch.arange(1, 1001) / 1000, config, shift)).mean()
        ).to(sigma.dtype)
    if config.weighting == "cosmap":
        return 2 / (torch.pi * (1 - 2 * sigma + 2 * sigma**2))
    return sigma**-2 if config.weighting == "sigma_sqrt" else torch.ones_like(sigma)


def _bell(sigma: Tensor) -> Tensor:
    middle = torch.exp(-2 * (sigma.double() - 0.5) ** 2)
    return middle - torch.exp(torch.tensor(-0.5, dtype=torch.float64))


class LossMask(NamedTuple):
    """Where a sample's velocity is learnt; both are broadcast to its latents."""

    learnt: Tensor | None
    """`TrainingSpec.loss_mask`: the mean is over the places where it is 1. None for everywhere."""
    weights: Tensor | None
    """Weights of the squared errors from the sample's mask; they do not change what the mean
    divides by. None for 1 everywhere."""

    @classmethod
    def of(cls, spec: ModelSpec, item: Mapping[str, Tensor]) -> Self:
        """The mask of a training item, on its device."""
        return cls(spec.training.loss_mask(item), item.get(LOSS_WEIGHTS))

    def to(self, device: torch.device) -> Self:
        """The mask on another device."""
        return type(self)(
            *(tensor if tensor is None else sent_to(tensor, device) for tensor in self)
        )

    def mean(self, squares: Float[Tensor, "..."]) -> Float[Tensor, ""]:
        """The mean of a sample's squared errors where they are learnt, each with its weight."""
        if self.weights is not None:
            squares = squares * sent_to(self.weights, squares.device).to(squares.dtype)
        if self.learnt is None:
            return squares.mean()
        mask = sent_to(self.learnt, squares.device).to(squares.dtype).expand_as(squares)
        return (squares * mask).sum() / mask.sum()


class NoisedBatch(NamedTuple):
    """A micro-batch with the noise that it is trained or measured at."""

    items: Sequence[Mapping[str, Tensor]]
    """Training items, each with `latents` and what else the model needs."""
    sigma: Float[Tensor, " batch"]
    """float32 noise level of each sample."""
    noise: Sequence[Float[Tensor, "..."]]
    """float32 noise of each sample, shaped like its latents."""
    targets: Sequence[Float[Tensor, "..."]] | None = None
    """The velocities to predict, on the prediction's device; None for `velocity_target` of each
    sample."""
    masks: Sequence[LossMask] | None = None
    """The loss mask of each sample, on the prediction's device; None for `LossMask.of` each."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        items: Sequence[Mapping[str, Tensor]],
        sigma: Tensor,
        noise: Sequence[Tensor],
    ) -> Self:
        """The batch with its targets and masks."""
        targets = [velocity_target(item, eps) for item, eps in zip(items, noise, strict=True)]
        masks = [LossMask.of(spec, item) for item in items]
        return cls(items=items, sigma=sigma, noise=noise, targets=targets, masks=masks)

    def to(self, first: torch.device, last: torch.device) -> Self:
        """A batch made by `of` with its inputs on the first device of a model, and targets and
        masks on the last."""
        assert self.targets is not None and self.masks is not None
        return type(self)(
            items=[to_device(item, first) for item in self.items],
            sigma=sent_to(self.sigma, first),
            noise=[sent_to(eps, first) for eps in self.noise],
            targets=[sent_to(target, last) for target in self.targets],
            masks=[mask.to(last) for mask in self.masks],
        )

    def velocities(self) -> Sequence[Tensor]:
        """The targets; where there are none yet, `velocity_target` of each sample, on the items'
        device."""
        if self.targets is not None:
            return self.targets
        return [
            velocity_target(item, eps) for item, eps in zip(self.items, self.noise, strict=True)
        ]

    def inputs(self, spec: ModelSpec, guidance: float) -> Any:
        """The model's inputs: the samples with their noise, and `guidance` as
        `FlowConfig.guidance`."""
        triples = zip(self.sigma, self.items, self.noise, strict=True)
        noised = [(1 - s) * item["latents"].float() + s * eps for s, item, eps in triples]
        return spec.training.make_inputs(noised, self.sigma, self.items, guidance)


class PreparedBatch(NamedTuple):
    """A micro-batch of a training step with everything that its forward needs but the model."""

    sigma: Float[Tensor, " batch"]
    """Noise levels, always on the host."""
    noised: NoisedBatch
    weights: Float[Tensor, " batch"]
    """Weights of the samples' losses."""
    matches_base: bool = False
    """Whether `matching_base` makes the targets instead."""

    def to(self, first: torch.device, last: torch.device) -> Self:
        """The batch with its inputs on the first device of a model, and targets, masks and weights
        on the last, which makes the predictions."""
        return self._replace(
            noised=self.noised.to(first, last), weights=sent_to(self.weights, last)
        )

    def pinned(self) -> Self:
        """The batch in page-locked memory, from which copies to a GPU do not hold up the host;
        unchanged if the system refuses to lock it.

        torch frees such memory only after the copies from it are done.
        """
        try:
            return tree_map(
                lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, self
            )
        except torch.AcceleratorError:
            return self


def prepare(
    spec: ModelSpec,
    flow: FlowConfig,
    micro_batches: Sequence[MicroBatch],
    micro: int,
    *,
    seed: int,
    step: int,
) -> PreparedBatch:
    """Read one of a step's micro-batches, and sample its noise, all on the host.

    Noise level and noise of a sample are a function of the run's seed, the step (counted from 0),
    the sample's place in the step and its id.
    """
    batch = micro_batches[micro]
    first_index = sum(len(before.ids) for before in micro_batches[:micro])
    shifts = [flow.shift_for(spec.training.shift(item["latents"])) for item in batch.items]
    names = [(seed, "noise", step, first_index + i, name) for i, name in enumerate(batch.ids)]
    strata = strata_of(flow, micro_batches, micro, seed=seed, step=step)
    sampled = [
        sample_noise(item["latents"], flow, shift, *name, stratum=stratum)
        for item, shift, name, stratum in zip(batch.items, shifts, names, strata, strict=True)
    ]
    levels, noise = [level for level, _ in sampled], [eps for _, eps in sampled]
    factors = batch.weights or [1.0] * len(levels)
    weights = [
        factor * loss_weight(level, flow, shift)
        for factor, level, shift in zip(factors, levels, shifts, strict=True)
    ]
    sigma = torch.stack(levels)
    # a list, which `pinned` looks into
    noised = NoisedBatch.of(spec, list(batch.items), sigma, noise)
    return PreparedBatch(
        sigma=sigma, noised=noised, weights=torch.stack(weights), matches_base=batch.matches_base
    )


def velocity_errors(model: Model, batch: NoisedBatch, guidance: float) -> Float[Tensor, " batch"]:
    """Mean squared error of the predicted velocity, sample by sample; `guidance` is
    `FlowConfig.guidance`.

    Returns:
        float32 errors on the prediction's device; each is a mean over its sample's elements, so
        samples of different sizes have equal weight.
    """
    prediction = _predicted(model, batch, guidance)
    # The step passes targets and masks, sent to their device ahead of time; validation has them
    # made here.
    targets = [
        target.to(velocity.device)
        for target, velocity in zip(batch.velocities(), prediction, strict=True)
    ]
    masks = (
        [LossMask.of(model.spec, item) for item in batch.items]
        if batch.masks is None
        else batch.masks
    )
    triples = zip(prediction, targets, masks, strict=True)
    return torch.stack([mask.mean((v.float() - t).square()) for v, t, mask in triples])


def matching_base(model: Model, batch: NoisedBatch, guidance: float) -> NoisedBatch:
    """The batch with the model's own prediction without its adapter as target, everywhere in the
    samples, whatever their masks weigh.

    Source: "differential output preservation" of ai-toolkit, there with a class word in the
    caption, and "prior prediction" of OneTrainer.
    """
    with torch.no_grad(), without_adapters(model.module):
        targets = _predicted(model, batch, guidance)
    masks = None if batch.masks is None else [mask._replace(weights=None) for mask in batch.masks]
    return batch._replace(targets=[target.float() for target in targets], masks=masks)


def guiding(model: Model, batch: NoisedBatch, flow: FlowConfig) -> NoisedBatch:
    """The batch with the guided velocity as target: a base distilled with guidance predicts it, and
    the plain velocity would undo that.

    Source: "contrastive guidance loss" of ai-toolkit, there with the same two schedules.
    """
    with torch.no_grad():
        without_caption = batch._replace(
            items=[with_caption(item, EMPTY_CAPTION_PREFIX) for item in batch.items]
        )
        unconditional = [
            velocity.float() for velocity in _predicted(model, without_caption, flow.guidance)
        ]
    targeted = []
    for sigma, target, base in zip(batch.sigma, batch.velocities(), unconditional, strict=True):
        share = sent_to(sigma, base.device) if flow.target_schedule == "sigma" else 1.0
        targeted.append(
            base + (1 + (flow.target_guidance - 1) * share) * (sent_to(target, base.device) - base)
        )
    return batch._replace(targets=targeted)


def sliding(model: Model, batch: NoisedBatch, flow: FlowConfig) -> NoisedBatch:
    """The batch with the target of a slider, from the model's own predictions without its adapter
    for the samples' captions and its two prompts."""
    with torch.no_grad(), without_adapters(model.module):
        neutral, positive, negative = (
            [
                velocity.float()
                for velocity in _predicted(model, batch._replace(items=items), flow.guidance)
            ]
            for items in (
                batch.items,
                *(
                    [with_caption(item, prefix) for item in batch.items]
                    for prefix in SLIDER_PREFIXES
                ),
            )
        )
    predicted = zip(neutral, positive, negative, strict=True)
    return batch._replace(
        targets=[slider_target(*velocities, flow.slider_guidance) for velocities in predicted]
    )


def slider_target(neutral: Tensor, positive: Tensor, negative: Tensor, guidance: float) -> Tensor:
    """The velocity of a slider at strength 1, with mean and standard deviation of the neutral one:
    a large guidance does not make it larger.

    Source: the concept slider of ai-toolkit, whose targets "enhance positive" and "erase negative"
    are both this one. It also trains the opposite target with the adapter's sign reversed.
    """
    guided = neutral + guidance * (positive - negative)
    return (guided - guided.mean()) / (guided.std() + 1e-8) * neutral.std() + neutral.mean()


def with_targets(model: Model, batch: NoisedBatch, flow: FlowConfig) -> NoisedBatch:
    """The batch with the targets that the model itself makes, where the settings say so."""
    if flow.slider_positive:
        return sliding(model, batch, flow)
    return batch if flow.target_guidance == 1 else guiding(model, batch, flow)


def _predicted(model: Model, batch: NoisedBatch, guidance: float) -> Sequence[Tensor]:
    """The velocities that the model predicts, sample by sample."""
    predicted: Sequence[Tensor] = model.module(
        batch.inputs(model.spec, guidance), engine=model.engine
    )
    return predicted


def velocity_target(
    item: Mapping[str, Tensor], noise: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """The float32 velocity of a sample, from data to noise."""
    return noise - item["latents"].float()


def to_device(item: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A training item with all its tensors on one device, dtypes unchanged."""
    return {name: sent_to(tensor, device) for name, tensor in item.items()}
