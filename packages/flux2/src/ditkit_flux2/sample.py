"""Draw pictures with our transformer: Euler steps along its velocity, then the VAE."""

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.components import Components
from ditkit_core.memory import release_memory
from ditkit_core.model import Engine, SampleJob, StagedModel
from ditkit_core.randomness import generator
from ditkit_flux2.model import Flux2Inputs
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.schedule import sample_defaults, sigmas
from ditkit_flux2.vae import VaeEncoder


class Flux2Sampler:
    """Euler with the guidance that the architecture knows; a `Sampler` of the core."""

    def __init__(self, components: Components, device: torch.device, *, tiled: bool = False):
        """Find the VAE; nothing is loaded.

        Raises:
            UserError: If it is missing.
        """
        self._vae = VaeEncoder(components, device, tiled=tiled)
        self._device = device

    @torch.no_grad()
    def denoise(self, model: StagedModel, run: Engine, job: SampleJob, on_step: Callable[[], None]) -> Tensor:
        """Latents of one picture.

        Noise levels are fp64, the picture is fp32 throughout, and noise is drawn on the CPU.

        Args:
            model: The transformer.
            run: The engine that runs it.
            job: What to draw; a shift of 0 takes the authors' own for this size and number of steps. Guidance goes into the
                embedding of a model that has one; another is called with the negative too, unless it is distilled, the job has no
                negative or its guidance is 1 or less.
            on_step: Called after each step.

        Returns:
            fp32 [channels, 1, height, width] on the sampler's device.
        """
        arch: Flux2Arch = model.embed.arch
        height, width = job.height // self._vae.stride, job.width // self._vae.stride
        assert job.frames == 1, f"{job.frames} frames"
        noise = torch.randn((self._vae.channels, 1, height, width), generator=generator(job.seed, "sample"))
        latents = noise.to(self._device)
        references = [reference.to(self._device) for reference in job.references]
        guidance = torch.tensor([job.guidance], device=self._device)

        wanted = job.conditions["text"].to(self._device)
        negative = None if job.negative is None else job.negative["text"].to(self._device)

        def velocity(text: Tensor, sigma: Tensor) -> Tensor:
            inputs = Flux2Inputs([latents], sigma[None], guidance, [text], [references])
            return run(model, inputs)[0].to(self._device, torch.float32)

        calls_twice = sample_defaults(arch).guided_by == "negative" and job.guidance > 1
        levels = sigmas(height * width, job.steps, job.shift).to(self._device)
        for sigma, following in pairwise(levels):
            guided = velocity(wanted, sigma)
            if calls_twice and negative is not None:
                unconditional = velocity(negative, sigma)
                guided = unconditional + job.guidance * (guided - unconditional)
            latents = latents + (following - sigma).float() * guided
            on_step()
        return latents

    def decode(self, latents: Float[Tensor, "channels 1 h w"]) -> Float[Tensor, "3 1 height width"]:
        """Pixels in [0, 1] on the CPU; the VAE is loaded by the first call."""
        self._vae.load()
        return self._vae.decode(latents)

    def release(self) -> None:
        """Free the VAE."""
        self._vae.unload()
        release_memory()
