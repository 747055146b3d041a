"""Causal VAEs of videos: their parameter names in official files and in diffusers, and the one that
models of images have too.

Sources: `WanVAE_` in Wan-Video/Wan2.1, wan/modules/vae.py; `WanVAE_` and `Wan2_2_VAE` in
Wan-Video/Wan2.2, wan/modules/vae2_2.py; `AutoencoderKLQwenImage` of diffusers, which has the names and
shapes of 2.1.
"""

import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ditkit_core.families.vae import VaeFamily
from ditkit_core.models.state_dict import StateDictNames

_IN_FOLDED_STAGE = re.compile(
    r"^(encoder\.down|decoder\.up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)$"
)
_IN_DECODER_STAGE = re.compile(r"^decoder\.upsamples\.(\d+)\.")
_RENAMES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"^(encoder|decoder)\.middle\.0\.", r"\1.mid_block.resnets.0."),
    (r"^(encoder|decoder)\.middle\.1\.", r"\1.mid_block.attentions.0."),
    (r"^(encoder|decoder)\.middle\.2\.", r"\1.mid_block.resnets.1."),
    (r"^encoder\.downsamples\.", "encoder.down_blocks."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
"""Official names to diffusers', applied in order."""


@cache  # a VAE's names are asked for three times whenever it is loaded
def causal_vae_name(name: str) -> str:
    """The diffusers name of a parameter of either architecture, given in the official form or in
    diffusers' own."""

    # of 2.2: a stage is residual blocks, then a change of resolution
    def folded(match: re.Match[str]) -> str:
        half, stage, index, rest = match.groups()
        resamples = rest.startswith(("resample.", "time_conv."))
        part = f"{half.partition('.')[2]}sampler" if resamples else f"resnets.{index}"
        return f"{half}_blocks.{stage}.{part}.{rest}"

    # of 2.1: three residual blocks and an upsampler in each stage
    def decoding(match: re.Match[str]) -> str:
        stage, index = divmod(int(match[1]), 4)
        return f"decoder.up_blocks.{stage}.{'upsamplers.0' if index == 3 else f'resnets.{index}'}."

    name = _IN_DECODER_STAGE.sub(decoding, _IN_FOLDED_STAGE.sub(folded, name))
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


CAUSAL_NAMES = StateDictNames.renaming(to_native=causal_vae_name)


def config_statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel over the VAE's own training data, from its
    configuration."""
    mean, deviation = (
        torch.tensor(values, dtype=torch.float32)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, deviation


def causal_image_vae(*, label: str, remedy: str) -> VaeFamily:
    """The VAE of images under a family's name.

    Args:
        label: As `VaeFamily.label`.
        remedy: As `VaeFamily.remedy`.
    """
    return VaeFamily(
        kind="AutoencoderKLQwenImage",
        label=label,
        remedy=remedy,
        published={
            "base_dim": 96,
            "z_dim": 16,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 2,
            "temperal_downsample": [False, True, True],
        },
        is_video=True,
        statistics=config_statistics,
        names=CAUSAL_NAMES,
        channels=lambda config: config["z_dim"],
        strides=lambda config: (
            2 ** sum(config["temperal_downsample"]),
            2 ** len(config["temperal_downsample"]),
        ),
        recipe="posterior mode, normalised by channel, {}",
    )
