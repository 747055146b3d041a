"""Generate videos with our transformer under diffusers' scheduler and the Wan VAE."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.families.euler import classifier_free
from ditkit_core.io.files import read_json_object
from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import Denoiser, GenerationRequest, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.encoders.keyframes import media_encoder
from ditkit_wan.model.inputs import IN_FRONT, make_inputs
from ditkit_wan.presets import WanArch

_SCHEDULER: Mapping[str, Any] = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "num_train_timesteps": 1000,
}
"""The official sampler's settings, for weights without a scheduler's configuration."""
_SMALL_PIXELS = 480 * 832


def default_shift(arch: WanArch | None, height: int, width: int) -> float:
    """The authors' shift of noise levels: by variant, and for image to video and Fun also by size.

    Source: generate.py of Wan-Video/Wan2.1, wan/configs of Wan-Video/Wan2.2; examples/wan2.1_fun of
    aigc-apps/VideoX-Fun; gen_video_global.py and gen_video_local.py of Wan-Video/Wan-Dancer, whose
    shift is 5 at any size.
    """
    if arch is None:
        return 5.0
    image_to_video = arch.in_channels > arch.out_channels
    if arch.speech:
        return 3.0
    if arch.boundary:
        return 5.0 if image_to_video else 12.0
    if arch.vace_layers or arch.image_positions:
        return 16.0
    shifted_by_size = arch.image_dim and not (arch.music or arch.animate)
    return 3.0 if shifted_by_size and height * width <= _SMALL_PIXELS else 5.0


class WanSampler:
    """UniPC with classifier-free guidance; a `Sampler` of the core."""

    def __init__(
        self,
        components: ModelPaths,
        device: torch.device,
        *,
        decodings: Sequence[VaeMode] = (),
        arch: WanArch | None = None,
    ):
        """Find the VAE and the scheduler's configuration; nothing is loaded.

        Args:
            components: Where the model's files are.
            device: Device of latents and the VAE.
            decodings: The ways for the VAE to decode; the first that memory has room for is taken.
            arch: The architecture, which decides the VAE and the shift of noise levels; None means
                a text-to-video model.

        Raises:
            UserError: If the VAE is missing or belongs to another model, or the configuration is
                damaged.
        """
        self.decoder = media_encoder(components, device, arch=arch, decodings=decodings)
        self._device, self._arch = device, arch
        self._scheduler_config = _scheduler_config(components)

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        """Generate one sample.

        Timesteps are integers, as in the official sampler. Noise is sampled on the CPU. A clean
        first frame is put back after each step. Frames of VACE's and Animate's references are
        denoised with the others and removed at the end. S2V's reference, or the frames that it
        continues, are put in front at the end.

        Args:
            job: What to generate; a shift of 0 takes the scheduler configuration's shift, or else
                the authors'. Without a negative prompt, or with a guidance of 1 or less, the model
                is called once per step.

        Yields:
            The noise level of each step; the caller sends back the denoiser for it.

        Returns:
            fp32 [channels, frames, height, width] on the sampler's device.
        """
        conditions = {name: tensor.to(self._device) for name, tensor in job.conditions.items()}
        negative = {name: tensor.to(self._device) for name, tensor in (job.negative or {}).items()}
        first = conditions.get("first_frame")
        in_front = sum(conditions[name].shape[1] for name in IN_FRONT if name in conditions)
        if "audio" in conditions:
            in_front = -1  # S2V generates the frames after the first
        latents = self._noise(job, in_front)
        scheduler = self._scheduler(job)
        for t in scheduler.timesteps:
            # fp64, because 1000 * (t / 1000) is not t in fp32 for some t
            sigma = t.double().reshape(1) / 1000
            denoiser = yield float(sigma)
            guided = self._velocity(denoiser, latents, sigma, conditions)
            if denoiser.guidance > 1 and negative:
                without = self._velocity(
                    denoiser, latents, sigma, conditions | negative, negative=True
                )
                guided = classifier_free(guided, without, denoiser.guidance)
            latents = scheduler.step(guided[None], t, latents[None], return_dict=False)[0][0]
            if first is not None:
                # The scheduler moved the first frame as well; the condition is its clean latents.
                latents[:, :1] = first
        # The frames before the clip, or the image that it starts from, as the official code decodes
        # them.
        if "audio" in conditions:
            return torch.cat([conditions.get("motion", conditions["reference"]), latents], dim=1)
        return latents[:, in_front:]

    def _noise(self, job: GenerationRequest, in_front: int) -> Float[Tensor, "channels f h w"]:
        frames_per_latent, pixels_per_latent = self.decoder.strides
        assert job.frames % frames_per_latent == 1, f"{job.frames} frames"
        frames = job.frames // frames_per_latent + 1 + in_front
        size = (frames, job.height // pixels_per_latent, job.width // pixels_per_latent)
        noise = torch.randn(
            (1, self.decoder.channels, *size), generator=generator(job.seed, "sample")
        )
        return noise[0].to(self._device)

    def _velocity(
        self,
        denoiser: Denoiser,
        latents: Tensor,
        sigma: Tensor,
        conditions: Mapping[str, Tensor],
        *,
        negative: bool = False,
    ) -> Float[Tensor, "channels f h w"]:
        """The model's velocity, with inputs made as in training; `negative` also leaves out what a
        variant's guidance leaves out."""
        _, stride = self.decoder.strides
        inputs = make_inputs(
            [latents], sigma, [{**conditions, "latents": latents}], 1.0, latent_stride=stride
        )
        if negative:
            silence = (
                None
                if inputs.audio is None
                else [torch.zeros_like(states) for states in inputs.audio]
            )
            black = (
                None
                if inputs.face is None
                else [torch.full_like(face, -1.0) for face in inputs.face]
            )
            inputs = inputs._replace(skips=True, audio=silence, face=black)
        return denoiser(inputs)[0].to(self._device, torch.float32)

    def _scheduler(self, job: GenerationRequest) -> Any:
        from diffusers import UniPCMultistepScheduler

        config = self._scheduler_config
        if job.shift or "flow_shift" not in config:
            config = config | {
                "flow_shift": job.shift or default_shift(self._arch, job.height, job.width)
            }
        scheduler = UniPCMultistepScheduler.from_config(config)
        scheduler.set_timesteps(job.steps, device=self._device)
        # Otherwise the scheduler looks up each timestep's index, and a repeated timestep gets a
        # wrong one.
        scheduler.set_begin_index(0)
        return scheduler


def _scheduler_config(components: ModelPaths) -> dict[str, Any]:
    """The checkpoint's configuration, or the official settings, without `flow_shift` if the
    checkpoint has none."""
    if not components.base:
        return dict(_SCHEDULER)
    path = components.locate("scheduler") / "scheduler_config.json"
    config = read_json_object(path)
    if config.get("_class_name") == "UniPCMultistepScheduler":
        return dict(config)
    shift = config.get("flow_shift", config.get("shift"))
    return {**_SCHEDULER, **({} if shift is None else {"flow_shift": shift})}
