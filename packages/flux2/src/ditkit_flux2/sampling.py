"""Generate images with our transformer: Euler steps along its velocity, then the VAE."""

from collections.abc import Generator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import Denoiser, GenerationRequest, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.encoders.vae import VaeEncoder
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.schedule import sample_defaults, sigmas


class Flux2Sampler:
    """Euler steps with the kind of guidance that the architecture has; a `Sampler` of the core."""

    def __init__(self, components: ModelPaths, device: torch.device, *, decodings: Sequence[VaeMode] = ()):
        """Find the VAE; nothing is loaded.

        Args:
            components: Where the model's files are.
            device: Device of latents and the VAE.
            decodings: The ways for the VAE to decode; the first that memory has room for is taken.

        Raises:
            UserError: If it is missing.
        """
        self.decoder = VaeEncoder(components, device, decodings=decodings)
        self._device = device

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        """Generate one image.

        Noise levels are fp64 and latents are fp32 throughout. Noise is sampled on the CPU, so that a seed gives the same noise on any device.

        Args:
            job: What to generate; a shift of 0 takes the authors' shift for this size and number of steps. Guidance goes into the
                embedding of a model that has one. Other models are also called with the negative prompt, unless they are distilled,
                the job has no negative prompt, or its guidance is 1 or less.

        Yields:
            The noise level of each step; the caller sends back the denoiser for it.

        Returns:
            fp32 [channels, 1, height, width] on the sampler's device.
        """
        height, width = (side // self.decoder.strides[1] for side in (job.height, job.width))
        assert job.frames == 1, f"{job.frames} frames"
        noise = torch.randn((self.decoder.channels, 1, height, width), generator=generator(job.seed, "sample"))
        latents = noise.to(self._device)
        references = [reference.to(self._device) for reference in job.references]

        positive = job.conditions["text"].to(self._device)
        negative = None if job.negative is None else job.negative["text"].to(self._device)

        def velocity(denoiser: Denoiser, text: Tensor, sigma: Tensor) -> Tensor:
            guidance = torch.tensor([denoiser.guidance], device=self._device)
            inputs = Flux2Inputs([latents], sigma[None], guidance, [text], [references])
            return denoiser(inputs)[0].to(self._device, torch.float32)

        levels = sigmas(height * width, job.steps, job.shift).to(self._device)
        for sigma, following in pairwise(levels):
            denoiser = yield float(sigma)
            arch: Flux2Arch = denoiser.model.embed.arch
            calls_twice = sample_defaults(arch).guided_by == "negative" and denoiser.guidance > 1
            guided = velocity(denoiser, positive, sigma)
            if calls_twice and negative is not None:
                unconditional = velocity(denoiser, negative, sigma)
                guided = unconditional + denoiser.guidance * (guided - unconditional)
            # The difference of two levels is taken in fp64: neighbours are close, and fp32 would lose digits.
            latents = latents + (following - sigma).float() * guided
        return latents
