"""The Wan VAEs: diffusers' `AutoencoderKLWan` from a diffusers folder or from the official single file, of 2.1 or of 2.2.

Latents are the posterior's mean, normalised per channel, in fp32, as in the official
code. A latent that is sampled from the posterior would add the encoder's noise to the training data.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import WHOLE, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.tiling import Tiles
from ditkit_core.weights.frozen import find_weights
from ditkit_core.weights.frozen_vae import FrozenVae
from ditkit_wan.encoders.safe_names import SAFE_NAMES
from ditkit_wan.encoders.vae_kinds import VAE_NAMES, config_of

TILES = Tiles(side=256, overlap=64)
"""The tiles of diffusers for this VAE."""
_REMEDIES = {
    16: "get wan_2.1_vae.safetensors, or set a diffusers vae folder",
    48: "get wan2.2_vae.safetensors, or set the vae folder of Wan2.2-TI2V-5B-Diffusers",
}
"""Where to get the VAE, by latent channels."""


class VaeEncoder(FrozenVae):
    """Pixels to normalised latents and back; an `Encoder` of the core. Clips have 1 + 4k frames."""

    recipe = "posterior mean, normalised, {}"

    def __init__(
        self,
        components: ModelPaths,
        device: torch.device,
        *,
        mode: VaeMode = WHOLE,
        channels: int | None = None,
        decodings: Sequence[VaeMode] = (),
    ):
        """Find the weights and read their headers; nothing is loaded.

        Args:
            components: Where the model's files are.
            device: Device of the VAE.
            mode: How it encodes. bf16 and tiles take less memory and give other results.
            channels: Latent channels that the model was trained on; None takes either VAE.
            decodings: The ways to decode; the first that memory has room for is taken. Empty: as it encodes.

        Raises:
            UserError: If there are none, a file is damaged, or they belong to another VAE.
        """
        remedy = _REMEDIES.get(channels or 0, " or ".join(_REMEDIES.values()))
        source, config = find_weights(
            components, "vae", _config_of_file, kind="AutoencoderKLWan", remedy=remedy, safe_names=SAFE_NAMES
        )
        super().__init__(
            build,
            config,
            source,
            VAE_NAMES,
            device,
            mode.dtype,
            key="model.vae",
            finish=self._finish,
            mode=mode,
            decodings=decodings,
            tiles=TILES,
            encode_clip=encode_clip,
            decode_clip=decode_clip,
        )
        if channels not in (None, self.channels):
            raise UserError(
                f"{source.path} makes {self.channels} latent channels and the model takes {channels}; "
                f"set model.vae to the model's own: {remedy}"
            )

    @property
    def channels(self) -> int:
        """Latent channels."""
        return self.config.get("z_dim", 16)

    @property
    def strides(self) -> tuple[int, int]:
        """Pixel frames per latent frame after the first, and pixels per latent pixel."""
        return self.config.get("scale_factor_temporal", 4), self.config.get("scale_factor_spatial", 8)

    def _finish(self, vae: Any) -> None:
        for statistic in _statistics(vae, self.device):
            statistic.expand(self.channels, 1, 1, 1)
        patch = 1 if vae.config.patch_size is None else vae.config.patch_size
        for size in (*self.strides, patch):
            Fraction(1, size)
        if patch < 1 or vae.config.in_channels != 3 * patch**2:
            raise ValueError(f"patch_size is {patch}, and in_channels {vae.config.in_channels}")


def build(config: Mapping[str, Any]) -> Any:
    """The VAE of a configuration, on the default device."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan.from_config(dict(config))


def encode_clip(
    vae: Any, pixels: Float[Tensor, "3 frames height width"], device: torch.device
) -> Float[Tensor, "channels f h w"]:
    """Normalised latents of one clip, in fp32, on the device of the VAE's weights and computed in their dtype."""
    mean, std = _statistics(vae, device)
    posterior = vae.encode(pixels[None].to(device, vae.dtype)).latent_dist
    return (posterior.mode()[0].float() - mean) / std


def decode_clip(
    vae: Any, latents: Float[Tensor, "channels f h w"], device: torch.device
) -> Float[Tensor, "3 frames height width"]:
    """Pixels in [0, 1] of normalised latents, in fp32, on the device of the VAE's weights and computed in their dtype."""
    mean, std = _statistics(vae, device)
    scaled = (latents.to(device, torch.float32) * std + mean).to(vae.dtype)
    pixels = vae.decode(scaled[None]).sample[0].float()
    return ((pixels + 1) / 2).clamp(0, 1)


def _statistics(vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel over the VAE's own training data."""
    config = vae.config
    mean, std = (
        torch.tensor(values, dtype=torch.float32).to(device) for values in (config.latents_mean, config.latents_std)
    )
    return mean.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)


def _config_of_file(source: SafetensorsSource) -> dict[str, Any]:
    config = config_of({name: stored.shape for name, stored in source.tensors.items()})
    if config is None:
        raise UserError(f"{source.path} is not a VAE of Wan 2.1 or 2.2; {' or '.join(_REMEDIES.values())}")
    return config
