"""A VAE of Wan 2.2's structure that is small enough for tests."""

from pathlib import Path

import torch

from ditkit_wan.encoders.vae_kinds import WAN_2_2


def narrow(folder: Path) -> Path:
    """Write a folder with a VAE of Wan 2.2's structure, a fortieth as wide."""
    from diffusers import AutoencoderKLWan

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLWan(**{**WAN_2_2, "base_dim": 4, "decoder_base_dim": 8})
    vae.save_pretrained(folder)
    return folder
