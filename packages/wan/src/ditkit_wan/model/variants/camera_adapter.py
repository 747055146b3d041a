"""Camera motion, added to the tokens of a clip. Source: aigc-apps/VideoX-Fun,
videox_fun/models/wan_camera_adapter.py.

The rays of a latent pixel, 8 × 8 or 16 × 16 pixels, in the four frames of a latent frame become
channels, patches of them become tokens, and a residual block convolves these within a frame.
DiffSynth supports one sample per batch only; here every sample has its own camera.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.errors import UserError
from ditkit_wan.presets import WanArch


class _Residual(nn.Module):
    """Two convolutions over a frame's tokens, and a skip connection."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(dim, dim, kernel_size=3, padding=1) for _ in range(2))

    def forward(
        self, x: Float[Tensor, "frames dim height width"]
    ) -> Float[Tensor, "frames dim height width"]:
        return x + self.conv2(F.relu(self.conv1(x)))


class CameraAdapter(nn.Module):
    """Rays to the tensor that is added to the tokens."""

    def __init__(self, arch: WanArch):
        super().__init__()
        self.stride = arch.latent_stride
        self.conv = nn.Conv2d(
            arch.camera_channels * self.stride**2,
            arch.dim,
            kernel_size=arch.patch[1:],
            stride=arch.patch[1:],
        )
        self.residual_blocks = nn.Sequential(_Residual(arch.dim))

    def forward(
        self, rays: Float[Tensor, "channels frames rows columns"]
    ) -> Float[Tensor, "tokens dim"]:
        """One row for each token of one clip, in the dtype of the rays."""
        pixels = F.pixel_unshuffle(rays.transpose(0, 1), self.stride)
        return rearrange(self.residual_blocks(self.conv(pixels)), "f c h w -> (f h w) c")


def check_cameras(
    arch: WanArch, cameras: Sequence[Tensor | None], latents: Sequence[Tensor]
) -> None:
    """Refuse rays whose shape does not fit their clip.

    Raises:
        UserError: If so; the message names both shapes.
    """
    for rays, clip in zip(cameras, latents, strict=False):
        frames, height, width = clip.shape[1:]
        size = (frames, arch.latent_stride * height, arch.latent_stride * width)
        if rays is not None and rays.shape[1:] != size:
            raise UserError(
                f"the camera's rays have the shape {list(rays.shape)} where their clip has latents "
                f"{list(clip.shape)}: give a pose for each frame of the clip"
            )
