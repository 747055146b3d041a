"""The music of WanToDance: encoded once per clip and spread over its tokens.

Sources: Wan-Video/Wan-Dancer, diffsynth/models/wan_video_dit.py and
diffsynth/pipelines/wan_video_new.py; modelscope/DiffSynth-Studio, diffsynth/models/wantodance.py.
Their encoder has a dropout of 0.1 in training; this one has none.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import affine_norm
from ditkit_core.nn.rope import axis_angles, rotate
from ditkit_wan.model.rope import THETA
from ditkit_wan.presets import MusicArch, WanArch

GROUPS = 8
"""Groups of consecutive tokens per latent frame: each group has one row of music."""
_FRAMES, _WIDTH = 149, 4800
"""Size that encoded music is resized to before it is resized to the clip; the authors' clips have
149 frames."""


class _Attention(nn.Module):
    """torch's MultiheadAttention for one sample; its input is rotated before the projections to
    queries and keys."""

    def __init__(self, music: MusicArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = music.heads, precision
        self.in_proj_weight = nn.Parameter(torch.empty(3 * music.width, music.width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * music.width))
        nn.init.xavier_uniform_(self.in_proj_weight.data)
        self.out_proj = nn.Linear(music.width, music.width)

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        precision, width = self.precision, x.shape[-1]
        angles = axis_angles(torch.arange(len(x), device=x.device), width // 2, THETA)
        cos, sin = (
            table.to(precision.rotary_tables)[None, :, None]
            for table in (angles.cos(), angles.sin())
        )
        cos, sin = cos.to(precision.rotary), sin.to(precision.rotary)
        rotated = rotate(x.to(precision.rotary)[None, :, None], cos, sin)[0, :, 0].to(
            precision.matmul
        )
        weight, bias = self.in_proj_weight, self.in_proj_bias
        q, k = F.linear(rotated, weight[: 2 * width], bias[: 2 * width]).chunk(2, -1)
        v = F.linear(x.to(precision.matmul), weight[2 * width :], bias[2 * width :])
        heads = [
            projection.unflatten(-1, (self.heads, -1))[None].to(precision.attention)
            for projection in (q, k, v)
        ]
        return self.out_proj(attend(*heads, name="music")[0].flatten(1).to(precision.matmul))


class _EncoderLayer(nn.Module):
    """Attention along the music, then a feed-forward layer, each after a norm."""

    def __init__(self, music: MusicArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.self_attn = _Attention(music, precision)
        self.norm1, self.norm2 = (nn.LayerNorm(music.width) for _ in range(2))
        self.linear1, self.linear2 = (
            nn.Linear(music.width, music.ffn_dim),
            nn.Linear(music.ffn_dim, music.width),
        )

    def forward(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        norms, matmul = self.precision.norms, self.precision.matmul
        x = x + self.self_attn(affine_norm(self.norm1, x, norms, norms)).to(norms)
        h = affine_norm(self.norm2, x, norms, matmul)
        return x + self.linear2(F.gelu(self.linear1(h))).to(norms)


class MusicEmbedding(nn.Module):
    """Features of music to rows as wide as the tokens, `GROUPS` for each latent frame."""

    def __init__(self, arch: WanArch, music: MusicArch, precision: Precision):
        super().__init__()
        self.dim, self.precision = arch.dim, precision
        self.projection = nn.Linear(music.features, music.width)
        self.encoder = nn.Sequential(*(_EncoderLayer(music, precision) for _ in range(2)))

    def forward(
        self, music: Sequence[Tensor], frames: Sequence[int]
    ) -> Float[Tensor, "batch music dim"]:
        """The music of every sample, in the matmuls' dtype, padded with zeros.

        Args:
            music: [rows, features] of each sample.
            frames: Latent frames of each sample.
        """
        rows = [
            self._stretched(features, GROUPS * num)
            for features, num in zip(music, frames, strict=True)
        ]
        return pad_sequence(rows, batch_first=True).to(self.precision.matmul)

    def _stretched(
        self, features: Float[Tensor, "rows features"], num: int
    ) -> Float[Tensor, "groups dim"]:
        x = self.encoder(
            self.projection(features.to(self.precision.matmul)).to(self.precision.norms)
        )
        x = F.interpolate(x[None, None], size=(_FRAMES, _WIDTH), mode="bilinear")
        return F.interpolate(x, size=(num, self.dim), mode="bilinear")[0, 0]


def frame_steps(music: Sequence[Tensor], latents: Sequence[Tensor]) -> tuple[int, ...]:
    """Rows of music, 30 per second, that each frame of every clip lasts.

    This integer tells the model a clip's frame rate: 1 for a clip of 30 frames per second, which is
    generated between keyframes (`local`); more for keyframes of a piece of music (`global`), which
    have a separate patch embedding and head.

    Args:
        music: [rows, features] of each sample.
        latents: [channels, frames, height, width] of each sample.
    """
    clips = [1 + 4 * (clip.shape[1] - 1) for clip in latents]
    return tuple(
        max(1, int(len(rows) / frames + 0.5)) for rows, frames in zip(music, clips, strict=True)
    )


def check_music(music: Sequence[Tensor], latents: Sequence[Tensor]) -> None:
    """Refuse music without rows, and clips whose frames cannot be split into groups.

    Raises:
        UserError: If so; the message names the size.
    """
    for rows, clip in zip(music, latents, strict=False):
        height, width = clip.shape[2:]
        if not len(rows):
            raise UserError("'music' has no row: give features for at least one frame of the clip")
        if height * width // 4 % GROUPS:
            raise UserError(
                f"WanToDance splits each frame into {GROUPS} parts for music, and {8 * width} × "
                f"{8 * height} pixels are {height * width // 4} tokens; make width and height "
                "multiples of 64, or one of them of 128"
            )
