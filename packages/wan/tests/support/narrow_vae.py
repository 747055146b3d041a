"""VAEs of Wan's structures that are small enough for tests, and what their tests share."""

from pathlib import Path
from typing import Any

import torch

from ditkit_wan.encoders.vae_kinds import WAN_2_2

NARROW_2_2 = {**WAN_2_2, "base_dim": 4, "decoder_base_dim": 8}
"""Wan 2.2's structure, a fortieth as wide."""

_RESIDUAL = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
}


def narrow(folder: Path, **structure: Any) -> Path:
    """Write a folder with a VAE of this structure and seeded weights."""
    from diffusers import AutoencoderKLWan

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLWan(**structure)
    vae.save_pretrained(folder)
    return folder


def clip(frames: int = 5, size: int = 32) -> torch.Tensor:
    """A clip of noise in [-1, 1]."""
    return torch.rand(3, frames, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def official_within_blocks(name: str) -> str:
    """The official name of a parameter of either VAE, from diffusers' name in which the blocks are
    numbered as the official ones.

    Written the other way round than the code under test.
    """
    name = name.replace("mid_block.attentions.0", "middle.1").replace("conv_shortcut", "shortcut")
    name = name.replace("mid_block.resnets.0", "middle.0").replace(
        "mid_block.resnets.1", "middle.2"
    )
    for half in ("encoder", "decoder"):
        for theirs, ours in (("conv_in", "conv1"), ("norm_out", "head.0"), ("conv_out", "head.2")):
            name = name.replace(f"{half}.{theirs}.", f"{half}.{ours}.")
    if name.startswith(("quant_conv", "post_quant_conv")):
        return name.replace("post_quant_conv", "conv2").replace("quant_conv", "conv1")
    parts = name.split(".")
    in_block = any(part in ("downsamples", "upsamples", "middle") for part in parts)
    return ".".join(_RESIDUAL.get(part, part) if in_block else part for part in parts)
