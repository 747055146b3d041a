"""The Wan VAEs: diffusers' `AutoencoderKLWan` from a diffusers folder or from the official single
file, of 2.1 or of 2.2.

Latents are the posterior's mean, normalised per channel, in fp32, as in the official code.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ditkit_core.errors import UserError
from ditkit_core.families.causal_vae import CAUSAL_NAMES, config_statistics
from ditkit_core.families.vae import DiffusersVae, VaeFamily
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import WHOLE, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.tiling import Tiles
from ditkit_wan.encoders.safe_names import SAFE_NAMES
from ditkit_wan.encoders.vae_kinds import WAN_2_1, WAN_2_2, config_of

TILES = Tiles(side=256, overlap=64)
"""The tiles of diffusers for this VAE."""
_REMEDIES = {
    16: "get wan_2.1_vae.safetensors, or set a diffusers vae folder",
    48: "get wan2.2_vae.safetensors, or set the vae folder of Wan2.2-TI2V-5B-Diffusers",
}
"""Where to get the VAE, by latent channels."""


def _config_of_file(source: SafetensorsSource) -> dict[str, Any]:
    config = config_of({name: stored.shape for name, stored in source.tensors.items()})
    if config is None:
        raise UserError(
            f"{source.path} is not a VAE of Wan 2.1 or 2.2; {' or '.join(_REMEDIES.values())}"
        )
    return config


def _check_patch(vae: Any) -> None:
    patch = 1 if vae.config.patch_size is None else vae.config.patch_size
    if patch < 1 or vae.config.in_channels != 3 * patch**2:
        raise ValueError(f"patch_size is {patch}, and in_channels {vae.config.in_channels}")


def vae_family(channels: int | None) -> VaeFamily:
    """The VAE with this number of latent channels; None means either."""
    return VaeFamily(
        kind="AutoencoderKLWan",
        is_video=True,
        published=WAN_2_2 if channels == WAN_2_2["z_dim"] else WAN_2_1,
        remedy=_REMEDIES.get(channels or 0, " or ".join(_REMEDIES.values())),
        safe_names=SAFE_NAMES,
        names=CAUSAL_NAMES,
        config_of_file=_config_of_file,
        statistics=config_statistics,
        recipe="posterior mean, normalised, {}",
        channels=lambda config: config.get("z_dim", 16),
        strides=lambda config: (
            config.get("scale_factor_temporal", 4),
            config.get("scale_factor_spatial", 8),
        ),
        finish=_check_patch,
        tiles=TILES,
    )


class VaeEncoder(DiffusersVae):
    """Pixels to normalised latents and back; an `Encoder` of the core. Clips have 1 + 4k frames."""

    def __init__(
        self,
        components: ModelPaths,
        device: torch.device,
        *,
        mode: VaeMode = WHOLE,
        channels: int | None = None,
        decodings: Sequence[VaeMode] = (),
    ):
        """As `DiffusersVae`, of the VAE with that number of channels."""
        family = vae_family(channels)
        super().__init__(family, components, device, mode, channels=channels, decodings=decodings)
