"""Keyframes of a piece of music, which WanToDance generates first: every fourth frame of a clip,
encoded as an image.

Source: `framewise_decoding` in modelscope/DiffSynth-Studio, diffsynth/pipelines/wan_video.py.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.io.console import NullProgress
from ditkit_core.models.encoders import WHOLE, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.encoders.vae import VaeEncoder
from ditkit_wan.presets import WanArch


class KeyframeVae(VaeEncoder):
    """The VAE with each latent frame encoded and decoded as an image of its own."""

    @property
    def recipe(self) -> str:  # type: ignore[override]  # a constant of other classes
        """How latents are made, for the identity of caches."""
        return f"{self.family.recipe}, every fourth frame alone"

    def encode(
        self,
        items: Sequence[Float[Tensor, "3 frames height width"]],
        advance: Callable[[float], None] = NullProgress.advance,
    ) -> list[dict[str, Tensor]]:
        """Latents of one clip's keyframes: as many latent frames as the clip has as a video.

        Args:
            items: One clip: pixels in [-1, 1], 1 + 4k frames.
            advance: Called with 1 when the clip is done.
        """
        (item,) = items
        frames_per_latent, _ = self.strides
        assert item.shape[1] % frames_per_latent == 1, f"{item.shape[1]} frames"
        stills = item[:, ::frames_per_latent].split(1, dim=1)
        latents = [super(KeyframeVae, self).encode([still])[0]["latents"] for still in stills]
        advance(1.0)
        return [{"latents": torch.cat(latents, 1)}]

    def decode(
        self, latents: Float[Tensor, "channels f h w"], seed: int = 0
    ) -> Float[Tensor, "3 f height width"]:
        """Pixels in [0, 1], fp32, on the CPU: one frame for each latent frame."""
        return torch.cat(
            [super(KeyframeVae, self).decode(frame, seed) for frame in latents.split(1, dim=1)], 1
        )


def media_encoder(
    components: ModelPaths,
    device: torch.device,
    mode: VaeMode = WHOLE,
    *,
    arch: WanArch | None = None,
    decodings: Sequence[VaeMode] = (),
) -> VaeEncoder:
    """The VAE of an architecture; None takes either VAE. Other arguments and errors as of
    `VaeEncoder`."""
    kind = (
        KeyframeVae
        if arch is not None and arch.music is not None and arch.music.keyframes
        else VaeEncoder
    )
    channels = arch.out_channels if arch else None
    return kind(components, device, mode=mode, channels=channels, decodings=decodings)
