"""Draw samples with our transformer under diffusers' scheduler and the Wan VAE."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.components import Components
from ditkit_core.errors import UserError
from ditkit_core.memory import release_memory
from ditkit_core.model import Engine, SampleJob, StagedModel
from ditkit_core.randomness import generator
from ditkit_wan.model import WanInputs
from ditkit_wan.vae import VaeEncoder

_SCHEDULER = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "num_train_timesteps": 1000,
    "flow_shift": 5.0,
}
"""The official sampler's settings, for weights that come without a scheduler's configuration."""


class WanSampler:
    """UniPC with classifier-free guidance; a `Sampler` of the core."""

    def __init__(self, components: Components, device: torch.device, *, tiled: bool = False):
        """Find the VAE and the scheduler's configuration; nothing is loaded.

        Raises:
            UserError: If the VAE is missing or the configuration is damaged.
        """
        self._vae = VaeEncoder(components, device, tiled=tiled)
        self._device = device
        self._scheduler_config = _scheduler_config(components)

    @torch.no_grad()
    def denoise(self, model: StagedModel, run: Engine, job: SampleJob, on_step: Callable[[], None]) -> Tensor:
        """Latents of one sample.

        Timesteps are whole numbers, as in the official sampler, and reach the model in fp32. Noise is drawn on the CPU.

        Args:
            model: The transformer.
            run: The engine that runs it.
            job: What to draw; a shift of 0 takes that of the scheduler's configuration. Without a negative, or at a
                guidance of 1 or less, the model is called once a step.
            on_step: Called after each step.

        Returns:
            fp32 [channels, frames, height, width] on the sampler's device.
        """
        frames_per_latent, pixels_per_latent = self._vae.strides
        assert job.frames % frames_per_latent == 1, f"{job.frames} frames"
        size = (job.frames // frames_per_latent + 1, job.height // pixels_per_latent, job.width // pixels_per_latent)
        noise = torch.randn((1, self._vae.channels, *size), generator=generator(job.seed, "sample"))
        latents = noise.to(self._device)

        def velocity(conditions: Mapping[str, Tensor], t: Tensor) -> Tensor:
            inputs = WanInputs([latents[0]], t.float()[None], [conditions["text"].to(self._device)])
            return run(model, inputs)[0][None].to(self._device, torch.float32)

        scheduler = self._scheduler(job)
        for t in scheduler.timesteps:
            guided = velocity(job.conditions, t)
            if job.guidance > 1 and job.negative is not None:
                unconditional = velocity(job.negative, t)
                guided = unconditional + job.guidance * (guided - unconditional)
            latents = scheduler.step(guided, t, latents, return_dict=False)[0]
            on_step()
        return latents[0]

    def decode(self, latents: Float[Tensor, "channels f h w"]) -> Float[Tensor, "3 frames height width"]:
        """Pixels in [0, 1] on the CPU; the VAE is loaded by the first call."""
        self._vae.load()
        return self._vae.decode(latents)

    def release(self) -> None:
        """Free the VAE."""
        self._vae.unload()
        release_memory()

    def _scheduler(self, job: SampleJob) -> Any:
        from diffusers import UniPCMultistepScheduler

        config = self._scheduler_config | ({"flow_shift": job.shift} if job.shift else {})
        scheduler = UniPCMultistepScheduler.from_config(config)
        scheduler.set_timesteps(job.steps, device=self._device)
        scheduler.set_begin_index(0)  # otherwise the scheduler looks each timestep up, and a repeated one twice
        return scheduler


def _scheduler_config(components: Components) -> dict[str, Any]:
    if not components.base:
        return _SCHEDULER
    path = components.locate("scheduler") / "scheduler_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is missing or no readable JSON; fetch it again") from error
    if config.get("_class_name") == "UniPCMultistepScheduler":
        return config
    return _SCHEDULER | {"flow_shift": config.get("flow_shift", config.get("shift", _SCHEDULER["flow_shift"]))}
