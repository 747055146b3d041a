"""The VAE of Qwen-Image 2.1, which has a channel of opacity, and its text encoder: the last layer
of Qwen3-VL 8B, before its last norm, which sees the references.

Source: `QwenImage21Pipeline` of diffusers: its template, the words of references, the space that
stands for an empty caption, the system turn, whose features are dropped, and the size of
references.
"""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ditkit_core.families.language_models import (
    QWEN3_VL,
    QWEN3_VL_TOWER,
    TextEncoding,
    TextFamily,
)
from ditkit_core.families.references import area_size
from ditkit_core.families.vae import VaeFamily

TEXT_LAYERS = 36
"""Layers of Qwen3-VL 8B. The last one is read by its number, because -1 is behind the last norm."""
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel."""
    mean, deviation = (
        torch.tensor(values, dtype=torch.float32)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, deviation


VAE = VaeFamily(
    kind="AutoencoderKLQwenImage21",
    label="the VAE of Qwen-Image 2.1",
    remedy="name the vae folder of Qwen-Image 2.1",
    published={
        "base_dim": 96,
        "decoder_base_dim": 144,
        "z_dim": 64,
        "dim_mult": [1, 2, 4, 8, 8],
        "num_res_blocks": 2,
        "temperal_downsample": [False, True, True, True],
    },
    is_video=True,
    has_opacity=True,
    statistics=_statistics,
    channels=lambda config: config["z_dim"],
    strides=lambda config: (
        2 ** sum(config["temperal_downsample"]),
        2 ** len(config["temperal_downsample"]),
    ),
    recipe="posterior mode, opaque, normalised by channel, {}",
)


class QwenReader(TextFamily):
    """A language model that reads a space where the caption is empty."""

    def render(self, caption: str) -> str:
        """The prompt of a caption: the caption in its template."""
        return super().render(caption or " ")


_READER = replace(
    QWEN3_VL,
    layers=(TEXT_LAYERS,),
    before=f"{SYSTEM}<|im_start|>user\n",
    dropped_turn=SYSTEM,
    vision=replace(
        QWEN3_VL_TOWER,
        picture=f"<image{{number}}>{QWEN3_VL_TOWER.picture}",
        between=" ",
        divides_text=True,
    ),
)

TEXT = TextEncoding(
    models=(QwenReader(**{field.name: getattr(_READER, field.name) for field in fields(_READER)}),),
    reader="Qwen-Image 2.1",
    remedy="set model.text_encoder to the text_encoder folder of Qwen-Image 2.1, or to Qwen3-VL 8B",
    num_tokens=8192,
    window=1,
    planned_tokens=512,
)
"""A caption is not padded: padding would move the image."""

reference_size = area_size(1024 * 1024)
"""Height and width of a reference, for the VAE and for the text encoder: about a megapixel in its
shape. A slot of the text is then 2 x 2 latent pixels."""
