"""How the camera moves, added to the tokens of a clip. Source: aigc-apps/VideoX-Fun, videox_fun/models/wan_camera_adapter.py.

The rays of 8 × 8 pixels, four frames of a latent one each, become channels, patches of them tokens, and a residual block looks at the
neighbours within a frame. DiffSynth adds this to the first sample of a batch and goes on with that sample alone; here every sample has its own.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.errors import UserError
from ditkit_wan.presets import WanArch

_PIXELS = 8
"""Of rays to a row or column of latents."""


class _Residual(nn.Module):
    """Two convolutions over a frame's tokens, and the way around them."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(dim, dim, kernel_size=3, padding=1) for _ in range(2))

    def forward(self, x: Float[Tensor, "frames dim height width"]) -> Float[Tensor, "frames dim height width"]:
        return x + self.conv2(F.relu(self.conv1(x)))


class CameraAdapter(nn.Module):
    """Rays to what is added to the tokens."""

    def __init__(self, arch: WanArch):
        super().__init__()
        self.conv = nn.Conv2d(
            arch.camera_channels * _PIXELS**2, arch.dim, kernel_size=arch.patch[1:], stride=arch.patch[1:]
        )
        self.residual_blocks = nn.Sequential(_Residual(arch.dim))

    def forward(self, rays: Float[Tensor, "channels frames rows columns"]) -> Float[Tensor, "tokens dim"]:
        """For each token of one clip, in the dtype of the rays."""
        pixels = F.pixel_unshuffle(rays.transpose(0, 1), _PIXELS)
        return rearrange(self.residual_blocks(self.conv(pixels)), "f c h w -> (f h w) c")


def check_cameras(cameras: Sequence[Tensor | None], latents: Sequence[Tensor]) -> None:
    """Refuse rays, if there are any, that are not those of their clip's pixels.

    Raises:
        UserError: Naming both sizes.
    """
    for rays, clip in zip(cameras, latents, strict=False):
        frames, height, width = clip.shape[1:]
        if rays is not None and rays.shape[1:] != (frames, _PIXELS * height, _PIXELS * width):
            raise UserError(
                f"the camera's rays have the shape {list(rays.shape)} where their clip has latents {list(clip.shape)}: "
                "give a pose for each frame of the clip"
            )
