"""Wan2.2-Animate: poses added to the tokens, and the motion of a face, to which the tokens of each
latent frame attend after some blocks.

The first latent frame is the reference image; the clip's frames follow. Sources: Wan-Video/Wan2.2,
wan/modules/animate/model_animate.py, motion_encoder.py and face_blocks.py. The authors' motion
encoder runs under a reentrant checkpoint and so has no gradients unless the pixels need some; ours
has them always.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import normalised_heads, plain_sum
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.remat import recompute_boundary
from ditkit_wan.model.block import WanBlock
from ditkit_wan.model.carry import FaceCarry, WanCarry
from ditkit_wan.model.patches import PatchEmbedding
from ditkit_wan.model.variants.frames import CausalConv, by_frame, by_sample, without_padding
from ditkit_wan.presets import AnimateArch, WanArch

_FRAMES_AT_ONCE = 8
"""Frames that the motion encoder takes together, as in the official code; more take more memory,
and results are the same."""
_EPS = 1e-6
_OFFSET = 1e-8
"""Added to the directions before they are made orthogonal, as in the official code."""


class _EqualizedConv(nn.Module):
    """A convolution whose weights are divided by the square root of their number per output; with a
    bias, a leaky ReLU follows.

    With a stride of 2, the input is blurred before it is thinned out.
    """

    def __init__(
        self,
        channels: int,
        out_channels: int,
        size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        is_activated: bool = True,
    ):
        super().__init__()
        self.stride, self.padding = stride, padding
        self.weight = nn.Parameter(torch.randn(out_channels, channels, size, size))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if is_activated else None

    def forward(
        self, x: Float[Tensor, "frames channels height width"]
    ) -> Float[Tensor, "frames out_channels h w"]:
        if self.stride > 1:
            x = _blurred(x, (self.weight.shape[-1] + 1) // 2)
        weight = self.weight.to(x.dtype) * (1 / math.sqrt(self.weight[0].numel()))
        y = F.conv2d(x, weight, stride=self.stride, padding=self.padding)
        if self.bias is None:
            return y
        return F.leaky_relu(y + self.bias.to(x.dtype)[:, None, None], 0.2) * math.sqrt(2)


def blur_kernel(
    device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "4 4"]:
    """The kernel that images are blurred with: 1, 3, 3, 1 along both axes, with a sum of 1.
    Official files have it as a buffer."""
    # Of a range, because a list would be copied to the device in each step.
    row = 4 - (2 * torch.arange(4, device=device, dtype=dtype) - 3).abs()
    return row[:, None] * row[None, :] / 64


def _blurred(
    x: Float[Tensor, "frames channels height width"], padding: int
) -> Float[Tensor, "frames channels h w"]:
    kernel = blur_kernel(x.device, x.dtype).expand(x.shape[1], 1, 4, 4)
    return F.conv2d(x, kernel, padding=padding, groups=x.shape[1])


class _EqualizedLinear(nn.Module):
    """A linear layer whose weights are divided by the square root of its width; not an nn.Linear,
    so that adapters do not target it."""

    def __init__(self, width: int, out_width: int):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(out_width, width)),
            nn.Parameter(torch.zeros(out_width)),
        )

    def forward(self, x: Float[Tensor, "frames width"]) -> Float[Tensor, "frames out_width"]:
        return F.linear(
            x,
            self.weight.to(x.dtype) * (1 / math.sqrt(self.weight.shape[1])),
            self.bias.to(x.dtype),
        )


class _Residual(nn.Module):
    """Two convolutions, and a skip connection; the second convolution halves height and width."""

    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        self.conv1 = _EqualizedConv(channels, channels, 3, padding=1)
        self.conv2 = _EqualizedConv(channels, out_channels, 3, stride=2)
        self.conv_skip = _EqualizedConv(channels, out_channels, 1, stride=2, is_activated=False)

    def forward(
        self, x: Float[Tensor, "frames channels height width"]
    ) -> Float[Tensor, "frames out_channels h w"]:
        return (self.conv2(self.conv1(x)) + self.conv_skip(x)) * (1 / math.sqrt(2))


class MotionEncoder(nn.Module):
    """Pictures of a face to vectors of its motion: convolutions down to one pixel, and weights of
    some orthogonal directions.

    It computes in the norms' dtype, and makes directions orthogonal in fp32 or wider.
    """

    def __init__(self, arch: AnimateArch, precision: Precision):
        super().__init__()
        self.dtype = precision.norms
        channels = arch.face_channels
        self.conv_in = _EqualizedConv(3, channels[0], 1)
        self.res_blocks = nn.ModuleList(_Residual(*pair) for pair in pairwise(channels))
        self.conv_out = _EqualizedConv(channels[-1], arch.style, 4, is_activated=False)
        widths = [*[arch.style] * 5, arch.motion]
        self.motion_network = nn.Sequential(*(_EqualizedLinear(*pair) for pair in pairwise(widths)))
        self.directions = nn.Parameter(torch.randn(arch.motion_dim, arch.motion))

    def forward(
        self, pictures: Float[Tensor, "frames 3 size size"]
    ) -> Float[Tensor, "frames motion_dim"]:
        """The motion of each picture.

        Args:
            pictures: Pixels in [-1, 1].
        """
        weights = torch.cat(
            [self._weights(some.to(self.dtype)) for some in pictures.split(_FRAMES_AT_ONCE)]
        )
        wide = torch.promote_types(self.dtype, torch.float32)
        orthogonal, _ = torch.linalg.qr(self.directions.to(wide) + _OFFSET)
        return weights @ orthogonal.to(self.dtype).T

    def _weights(self, x: Float[Tensor, "frames 3 size size"]) -> Float[Tensor, "frames motion"]:
        x = self.conv_in(x)
        for block in self.res_blocks:
            x = block(x)
        weights: Tensor = self.motion_network(self.conv_out(x).flatten(1))
        return weights


class FaceEncoder(nn.Module):
    """The motion of a face to some tokens per latent frame: three causal convolutions, which make
    one row of four, and a learned token."""

    def __init__(self, arch: WanArch, animate: AnimateArch, precision: Precision):
        super().__init__()
        width, self.tokens, self.dtype = animate.width, animate.tokens, precision.norms
        self.conv1_local = CausalConv(animate.motion_dim, width * animate.tokens, 1, self.dtype)
        self.conv2 = CausalConv(width, width, 2, self.dtype)
        self.conv3 = CausalConv(width, width, 2, self.dtype)
        self.out_proj = CastLinear(width, arch.dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, arch.dim))

    def forward(
        self, motion: Float[Tensor, "frames motion_dim"]
    ) -> Float[Tensor, "latent_frames face dim"]:
        x = self.conv1_local(motion[None])[0].unflatten(-1, (self.tokens, -1)).transpose(0, 1)
        x = self.conv3(self._activated(self.conv2(self._activated(x))))
        rows = self.out_proj(self._activated(x)).transpose(0, 1)
        return torch.cat([rows, self.padding_tokens[0].to(self.dtype).expand(len(rows), 1, -1)], 1)

    def _activated(self, x: Tensor) -> Tensor:
        return F.silu(F.layer_norm(x, x.shape[-1:], eps=_EPS))


class AnimateEmbedding(nn.Module):
    """Everything of Animate that runs before the blocks, under its names in the official files."""

    def __init__(self, arch: WanArch, animate: AnimateArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.pose_patch_embedding = PatchEmbedding(arch.dim, animate.pose_channels, arch.patch)
        self.motion_encoder = MotionEncoder(animate, precision)
        self.face_encoder = FaceEncoder(arch, animate, precision)

    def poses(self, poses: Sequence[Tensor]) -> Float[Tensor, "batch tokens dim"]:
        """What poses add to the tokens of their clips: nothing to the first latent frame's, the
        reference image.

        Args:
            poses: [channels, frames - 1, height, width] of each sample.
        """
        embed, matmul = self.pose_patch_embedding, self.precision.matmul
        rows = [embed(embed.patches(pose).to(matmul)) for pose in poses]
        tokens_per_frame = [
            len(row) // pose.shape[1] for row, pose in zip(rows, poses, strict=True)
        ]
        return pad_sequence(
            [
                F.pad(row, (0, 0, front, 0))
                for row, front in zip(rows, tokens_per_frame, strict=True)
            ],
            batch_first=True,
        )

    def faces(self, faces: Sequence[Float[Tensor, "3 frames size size"]]) -> FaceCarry:
        """The motion of every sample's face, one group of rows per latent frame, normalised; the
        reference image has zeros."""
        motion = self.motion_encoder(torch.cat([face.transpose(0, 1) for face in faces]))
        rows = [
            self.face_encoder(vectors)
            for vectors in motion.split([face.shape[1] for face in faces])
        ]
        # the same in front of each adapter
        rows = [F.layer_norm(row, row.shape[-1:], eps=_EPS) for row in rows]
        rows = [F.pad(row, (0, 0, 0, 0, 1, 0)) for row in rows]  # normalised zeros are zeros
        return FaceCarry(rows=pad_sequence(rows, batch_first=True).to(self.precision.matmul))


class FaceAdapter(nn.Module):
    """Attention from the tokens of a latent frame to the motion of the face in it; q and k are
    normalised per head."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        dim, self.heads, self.precision = arch.dim, arch.heads, precision
        self.linear1_kv, self.linear1_q, self.linear2 = (
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
        )
        self.q_norm, self.k_norm = (nn.RMSNorm(arch.head_dim, eps=_EPS) for _ in range(2))

    def attended(
        self, x: Float[Tensor, "batch tokens dim"], carry: WanCarry
    ) -> Float[Tensor, "batch tokens dim"]:
        """The input of the last layer."""
        assert carry.face is not None, "embed makes it"
        precision, grids = self.precision, carry.grids
        h = F.layer_norm(x.to(precision.norms), x.shape[-1:], eps=_EPS).to(precision.matmul)
        q = by_frame(normalised_heads(self.linear1_q(h), self.q_norm, self.heads, precision), grids)
        k, v = self.linear1_kv(without_padding(carry.face.rows, [f for f, _, _ in grids])).chunk(
            2, -1
        )
        k = normalised_heads(k, self.k_norm, self.heads, precision)
        v = v.unflatten(-1, (self.heads, -1)).to(precision.attention)
        out = attend(q, k, v, name="face").flatten(2).to(precision.matmul)
        return by_sample(out, grids, x.shape[1])


class FaceBlock(WanBlock):
    """A block that ends with a face adapter."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__(arch, precision)
        self.face = FaceAdapter(arch, precision)

    def forward(self, carry: WanCarry) -> WanCarry:
        x = self.advanced(carry.tokens, carry, is_end=False)
        return carry._replace(
            tokens=plain_sum(recompute_boundary(self.face.linear2, self.face.attended(x, carry)), x)
        )


def check_animate(
    arch: WanArch,
    faces: Sequence[Tensor],
    poses: Sequence[Tensor | None] | None,
    latents: Sequence[Tensor],
) -> None:
    """Refuse faces and poses that do not fit their clip.

    Raises:
        UserError: If so; the message names both shapes.
    """
    if arch.animate is None:
        return
    size = arch.animate.face_size
    for index, (face, clip) in enumerate(zip(faces, latents, strict=False)):
        frames = clip.shape[1] - 1
        if frames < 1:
            raise UserError("a clip has no latent frame after its reference image; encode it again")
        wanted = (3, 4 * frames - 3, size, size)
        if face.shape != wanted:
            raise UserError(
                f"'face' has the shape {list(face.shape)} where its clip has {frames} latent "
                f"frames: give pixels {list(wanted)}"
            )
        pose = None if poses is None else poses[index]
        if pose is None:
            raise UserError(
                "this model is conditioned on 'pose', and a sample has none; encode it again"
            )
        if pose.shape[1:] != (frames, *clip.shape[2:]):
            raise UserError(
                f"'pose' has the shape {list(pose.shape)} where its clip has {list(clip.shape)}: "
                "encode it at the size of the clip, without the reference image"
            )
