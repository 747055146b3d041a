"""Draw pictures with our transformer: Euler steps along its velocity, then the VAE."""

from collections.abc import Generator
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.io.memory import release_memory
from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import Denoiser, GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.encoders.vae import VaeEncoder
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.schedule import sample_defaults, sigmas


class Flux2Sampler:
    """Euler with the guidance that the architecture knows; a `Sampler` of the core."""

    def __init__(self, components: ModelPaths, device: torch.device, *, tiled: bool = False):
        """Find the VAE; nothing is loaded.

        Raises:
            UserError: If it is missing.
        """
        self._vae = VaeEncoder(components, device, tiled=tiled)
        self._device = device

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        """Draw one picture.

        Noise levels are fp64, the picture is fp32 throughout, and noise is drawn on the CPU.

        Args:
            job: What to draw; a shift of 0 takes the authors' own for this size and number of steps. Guidance goes into the
                embedding of a model that has one; another is called with the negative too, unless it is distilled, the job has no
                negative or its guidance is 1 or less.

        Yields:
            The noise level of each step; what is sent back takes it.

        Returns:
            fp32 [channels, 1, height, width] on the sampler's device.
        """
        height, width = job.height // self._vae.stride, job.width // self._vae.stride
        assert job.frames == 1, f"{job.frames} frames"
        noise = torch.randn((self._vae.channels, 1, height, width), generator=generator(job.seed, "sample"))
        latents = noise.to(self._device)
        references = [reference.to(self._device) for reference in job.references]

        wanted = job.conditions["text"].to(self._device)
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
            guided = velocity(denoiser, wanted, sigma)
            if calls_twice and negative is not None:
                unconditional = velocity(denoiser, negative, sigma)
                guided = unconditional + denoiser.guidance * (guided - unconditional)
            latents = latents + (following - sigma).float() * guided
        return latents

    def decode(self, latents: Float[Tensor, "channels 1 h w"]) -> Float[Tensor, "3 1 height width"]:
        """Pixels in [0, 1] on the CPU; the VAE is loaded by the first call."""
        self._vae.load()
        return self._vae.decode(latents)

    def release(self) -> None:
        """Free the VAE."""
        self._vae.unload()
        release_memory()
