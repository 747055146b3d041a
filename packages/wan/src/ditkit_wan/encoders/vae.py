"""The Wan VAEs: diffusers' `AutoencoderKLWan` from a diffusers folder or from the official single file, of 2.1 or of 2.2.

Latents are the posterior's mean, normalised per channel, in fp32, as in the official
code. A latent that is sampled from the posterior would add the encoder's noise to the training data.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import WHOLE, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import dtype_name
from ditkit_core.models.tiling import Tiles
from ditkit_core.weights.frozen import FrozenModule, find_weights, fingerprint
from ditkit_wan.encoders.safe_names import SAFE_NAMES
from ditkit_wan.encoders.vae_kinds import VAE_NAMES, config_of

TILES = Tiles(side=256, overlap=64)
"""The tiles of diffusers for this VAE."""
_REMEDIES = {
    16: "get wan_2.1_vae.safetensors, or set a diffusers vae folder",
    48: "get wan2.2_vae.safetensors, or set the vae folder of Wan2.2-TI2V-5B-Diffusers",
}
"""Where to get the VAE, by latent channels."""


class VaeEncoder:
    """Pixels to normalised latents and back; an `Encoder` of the core."""

    items_at_once = 1

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
        self._source, self.config = find_weights(
            components, "vae", _config_of_file, kind="AutoencoderKLWan", remedy=remedy, safe_names=SAFE_NAMES
        )
        if channels not in (None, self.channels):
            raise UserError(
                f"{self._source.path} makes {self.channels} latent channels and the model takes {channels}; "
                f"set model.vae to the model's own: {remedy}"
            )
        self._device, self._mode, self._decodings = device, mode, decodings or (mode,)
        self._vae = FrozenModule(
            build,
            self.config,
            self._source,
            VAE_NAMES,
            device,
            mode.dtype,
            key="model.vae",
            finish=self._finish,
        )
        self.load, self.unload = self._vae.load, self._vae.unload

    @cached_property
    def identity(self) -> str:
        """Digest of the weights and of how latents are made from them."""
        return fingerprint(self._source.path, f"posterior mean, normalised, {self._settings[0]}", *self._settings[1:])

    @property
    def _settings(self) -> tuple[str, ...]:
        """What of its mode changes latents; of tiles nothing where there are none, so that caches from before tiles stay valid."""
        return dtype_name(self._mode.dtype), *((str(TILES),) if self._mode.tiled else ())

    @property
    def channels(self) -> int:
        """Latent channels."""
        return self.config.get("z_dim", 16)

    @property
    def strides(self) -> tuple[int, int]:
        """Pixel frames per latent frame after the first, and pixels per latent pixel."""
        return self.config.get("scale_factor_temporal", 4), self.config.get("scale_factor_spatial", 8)

    def _finish(self, vae: Any) -> None:
        for statistic in _statistics(vae, self._device):
            statistic.expand(self.channels, 1, 1, 1)
        patch = 1 if vae.config.patch_size is None else vae.config.patch_size
        for size in (*self.strides, patch):
            Fraction(1, size)
        if patch < 1 or vae.config.in_channels != 3 * patch**2:
            raise ValueError(f"patch_size is {patch}, and in_channels {vae.config.in_channels}")

    @torch.no_grad()
    def encode(
        self,
        items: Sequence[Float[Tensor, "3 frames height width"]],
        advance: Callable[[float], None] = NullProgress.advance,
    ) -> list[dict[str, Tensor]]:
        """Latents of one clip.

        Args:
            items: One clip: pixels in [-1, 1]; 1 + 4k frames, because the VAE silently drops further frames.
            advance: Called with 1 when the clip is done.

        Returns:
            `latents` [channels, 1 + k, height / stride, width / stride], fp32, on the CPU; about unit variance.
        """
        (item,) = items
        frames_per_latent, _ = self.strides
        assert item.shape[1] % frames_per_latent == 1, f"{item.shape[1]} frames"
        latents = self._vae.run(
            encode_clip, item, TILES if self._mode.tiled else None, pixels=1, scale=Fraction(1, self.strides[1])
        )
        advance(1.0)
        return [{"latents": latents}]

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "channels f h w"]) -> Float[Tensor, "3 frames height width"]:
        """Pixels in [0, 1], fp32, on the CPU; the weights are loaded if they are not."""
        return self._vae.decode(decode_clip, latents, self._decodings, TILES, pixels=self.strides[1])

    @property
    def decoded(self) -> str:
        """How the last latents were decoded, in words."""
        return self._vae.decoded


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
