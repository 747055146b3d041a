"""The VAE and the text encoder of Zed.

FILL IN 4: the class of the VAE in diffusers with its published configuration, and the language model with its chat template and the layers that are read.
"""

from typing import Any

import torch
from torch import Tensor

from ditkit_core.families.language_models import QWEN3, TextEncoding
from ditkit_core.families.vae import VaeFamily


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel over the VAE's own training data."""
    mean, deviation = (
        torch.tensor(values) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, deviation


VAE = VaeFamily(
    kind="AutoencoderKLWan",
    label="the VAE of Zed",
    published={"base_dim": 96, "z_dim": 16},
    is_video=True,
    statistics=_statistics,
    channels=lambda config: config["z_dim"],
    strides=lambda config: (
        config.get("scale_factor_temporal", 4),
        config.get("scale_factor_spatial", 8),
    ),
    recipe="posterior mode, normalised, {}",
)


TEXT = TextEncoding(
    models=(QWEN3,),
    reader="Zed",
    remedy="set model.text_encoder to the text_encoder folder of Zed",
    num_tokens=128,
)
