"""LTX-Video's VAE and text encoder, and the seconds at which a clip's latent frames begin.

Source: `LTXPipeline` and `LTXConditionPipeline` of diffusers. The first does not mask padding in T5,
so that features depend on the number of tokens; both mask it in the transformer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from ditkit_core.families.t5 import T5_XXL, T5Encoding
from ditkit_core.families.vae import VaeFamily
from ditkit_core.models.conditions import ClipConditioner, ClipInputs

FRAMES = 8
"""Frames of a latent frame after the first."""
FPS = 25.0
"""Frames per second at which diffusers samples."""


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel; they are among the weights."""
    return vae.latents_mean, vae.latents_std / vae.config.scaling_factor


def _strides(config: Mapping[str, Any]) -> tuple[int, int]:
    halvings = 2 ** sum(config["spatio_temporal_scaling"])
    frames, pixels = (
        config.get(f"{axis}_compression_ratio") or patch * halvings
        for axis, patch in (("temporal", config["patch_size_t"]), ("spatial", config["patch_size"]))
    )
    return frames, pixels


VAE = VaeFamily(
    kind="AutoencoderKLLTXVideo",
    label="the VAE of LTX-Video",
    remedy="name the vae folder of LTX-Video",
    published={
        "latent_channels": 128,
        "spatio_temporal_scaling": [True, True, True, False],
        "patch_size": 4,
        "patch_size_t": 1,
    },
    is_video=True,
    statistics=_statistics,
    strides=_strides,
    recipe="posterior mode, normalised by channel, {}",
    in_fp32=frozenset({"latents_mean", "latents_std"}),
    # Of the models from 0.9.1 on.
    decode_timestep=0.05,
    decode_noise_scale=0.025,
)

TEXT = T5Encoding(
    model=T5_XXL,
    remedy="set model.text_encoder to the text_encoder folder of LTX-Video, or to T5 1.1 XXL",
    num_tokens=128,
    masked=False,
)
CAUSAL_TEXT = replace(TEXT, num_tokens=256, masked=True)
"""Of the models from 0.9.5 on."""


def seconds_of(frames: int, fps: float, causal: bool) -> Float64[Tensor, " latent_frames"]:
    """When each latent frame of a clip begins; `fps` is 0 for a still image."""
    starts = FRAMES * torch.arange(1 + (frames - 1) // FRAMES, dtype=torch.float64)
    return (starts - (FRAMES - 1) * causal).clamp(min=0) / (fps or FPS)


class Seconds(ClipConditioner):
    """The seconds of a clip's latent frames, as `seconds` of its item."""

    kind = "seconds"

    def __init__(self, causal: bool):
        """`causal` as of `LtxArch`."""
        self._causal = causal
        self.identity = f"starts of latent frames of {FRAMES}, {'causal' if causal else 'even'}"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The clip itself."""
        return ("",)

    def check(self, controls: ClipInputs) -> None:
        """Reads no file."""

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        """The seconds, fp64."""
        return {"seconds": seconds_of(controls.frames, controls.fps, self._causal)}
