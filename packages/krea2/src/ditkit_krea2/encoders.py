"""The VAE of Krea 2, which is that of Qwen-Image, and its text encoder: twelve layers of Qwen3-VL.

Source: `Krea2Pipeline` of diffusers: its template, and what of it is dropped. It puts the padding
between caption and end of the template, which changes nothing for the tokens that count: positions
count real tokens alone, and padding is masked.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ditkit_core.families.language_models import QWEN3_VL, TextEncoding
from ditkit_core.families.vae import VaeFamily
from ditkit_krea2.presets import TEXT_LAYERS

SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
PREFIX_TOKENS, TEXT_TOKENS = 34, 512
"""Tokens before a caption, whose features are dropped; most tokens of a caption and of the end of
the template."""


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel."""
    mean, deviation = (
        torch.tensor(values, dtype=torch.float32)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, deviation


VAE = VaeFamily(
    kind="AutoencoderKLQwenImage",
    label="the VAE of Krea 2, which is that of Qwen-Image",
    remedy="name the vae folder of Krea 2 or of Qwen-Image",
    published={
        "base_dim": 96,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "temperal_downsample": [False, True, True],
    },
    is_video=True,
    statistics=_statistics,
    channels=lambda config: config["z_dim"],
    strides=lambda config: (
        2 ** sum(config["temperal_downsample"]),
        2 ** len(config["temperal_downsample"]),
    ),
    recipe="posterior mode, normalised by channel, {}",
)

READER = replace(
    QWEN3_VL,
    layers=TEXT_LAYERS,
    before=f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n",
    dropped=PREFIX_TOKENS,
)

TEXT = TextEncoding(
    models=(READER,),
    reader="Krea 2",
    remedy="set model.text_encoder to the text_encoder folder of Krea 2, or to Qwen3-VL 4B",
    num_tokens=PREFIX_TOKENS + TEXT_TOKENS,
    keeps_end=True,
)
