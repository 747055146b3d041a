"""Generates samples by Euler steps along the model's velocity, with classifier-free guidance, an
embedded guidance or none."""

import math
from collections.abc import Callable, Generator, Mapping
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from ditkit_core.families.vae import DiffusersVae
from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import Denoiser, GenerationRequest
from ditkit_core.models.spec import SampleDefaults


def shifted_levels(steps: int, shift: float, terminal: float = 0.0) -> Float64[Tensor, " levels"]:
    """Noise levels in equal steps from 1 to 0, moved towards noise: level s becomes shift * s / (1
    + (shift - 1) * s). fp64, one more than steps. With `terminal` they are then stretched so that
    the last one above 0 is that.

    As diffusers' `FlowMatchEulerDiscreteScheduler` has them (with `shift_terminal`), if it is given
    the levels 1, 1 - 1/steps, …, 1/steps.
    """
    levels = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    levels = shift * levels / (1 + (shift - 1) * levels)
    if terminal and steps > 1:  # one step begins and ends at 1
        above = 1 - levels[:-1]
        levels = torch.cat([1 - above / above[-1] * (1 - terminal), levels[-1:]])
    return levels


def linear_shift(tokens: int, few: tuple[int, float], many: tuple[int, float]) -> float:
    """Shift of the noise levels for a sample of some tokens: e to the power of mu, which lies on
    the line through two (tokens, mu), extended beyond them.

    Source: `calculate_shift` of diffusers' pipelines.
    """
    return math.exp(few[1] + (many[1] - few[1]) / (many[0] - few[0]) * (tokens - few[0]))


def classifier_free(conditional: Tensor, unconditional: Tensor, strength: float) -> Tensor:
    """The guided velocity; a strength of 1 gives the conditional one."""
    return unconditional + strength * (conditional - unconditional)


NEXT_SIGMA = "next_sigma"
"""Field of the item in a sampler's step: the noise level that the step goes to, for models that are
told it."""


class EulerSampler:
    """A `Sampler` of the core for models whose inputs are made as in training."""

    def __init__(
        self,
        decoder: DiffusersVae,
        device: torch.device,
        *,
        make_inputs: Callable[..., Any],
        sample_defaults: Callable[[Any], SampleDefaults],
        levels: Callable[[int, int, float], Tensor],
        guide: Callable[[Tensor, Tensor, float], Tensor] = classifier_free,
    ):
        """Prepare; nothing is loaded.

        Args:
            device: Device of latents.
            make_inputs: As `TrainingSpec.make_inputs`.
            sample_defaults: As `AuxiliarySpec.sample_defaults`: says how guidance works.
            levels: From (latent pixels of the sample, steps, shift or 0 for the authors') to noise
                levels from 1 to 0.
            guide: From the velocities with the prompt and with the negative prompt, and the
                strength, to the guided velocity.
        """
        self.decoder, self._device = decoder, device
        self._make_inputs, self._sample_defaults = make_inputs, sample_defaults
        self._levels, self._guide = levels, guide

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        """Generate one sample, fp32 [channels, frames, height, width] on the sampler's device; as
        of the protocol.

        Noise levels are fp64 and latents are fp32 throughout. Noise is sampled on the CPU, so that
        a seed gives the same noise on any device. A shift of 0 takes the authors'. The guidance is
        passed to every model; one that is guided by a negative prompt runs a second time with it,
        if the request has one and the guidance is above 1.
        """
        frames_per_latent, pixels = self.decoder.strides
        assert (job.frames - 1) % frames_per_latent == 0, f"{job.frames} frames"
        size = (
            1 + (job.frames - 1) // frames_per_latent,
            job.height // pixels,
            job.width // pixels,
        )
        noise = torch.randn((self.decoder.channels, *size), generator=generator(job.seed, "sample"))
        latents = noise.to(self._device)
        references = {f"reference.{index}": latent for index, latent in enumerate(job.references)}
        conditions = self._moved({**job.conditions, **references})
        negative = None if job.negative is None else conditions | self._moved(job.negative)

        random = generator(job.seed, "conditions")

        def velocity(denoiser: Denoiser, item: Mapping[str, Tensor], sigma: Tensor) -> Tensor:
            step = {**item, "latents": latents, NEXT_SIGMA: following}
            inputs = self._make_inputs([latents], sigma[None], [step], denoiser.guidance)
            return denoiser(inputs)[0].to(self._device, torch.float32)

        levels = self._levels(size[0] * size[1] * size[2], job.steps, job.shift).to(self._device)
        for sigma, following in pairwise(levels):
            denoiser = yield float(sigma)
            changes = self.changes(conditions, sigma, random)
            arch = denoiser.model.embed.arch
            calls_twice = (
                self._sample_defaults(arch).guided_by == "negative" and denoiser.guidance > 1
            )
            guided = velocity(denoiser, {**conditions, **changes}, sigma)
            if calls_twice and negative is not None:
                unguided = velocity(denoiser, {**negative, **changes}, sigma)
                guided = self._guide(guided, unguided, denoiser.guidance)
            # The difference of two levels is taken in fp64: neighbours are close, and fp32 would
            # lose digits.
            latents = latents + (following - sigma).float() * guided
        return latents

    def changes(
        self, conditions: Mapping[str, Tensor], sigma: Tensor, random: torch.Generator
    ) -> dict[str, Tensor]:
        """Conditions that are others at this noise level; none here. `random` is of the sample's
        seed, on the CPU."""
        return {}

    def _moved(self, conditions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in conditions.items()}
