"""S2V: speech, a reference image, poses and the frames before the clip. Source: Wan-Video/Wan2.2,
wan/modules/s2v.

The clip's tokens come first; those of the reference image and of the frames before follow, with t =
0. Speech is encoded once, and injectors add it to the tokens of each latent frame at the end of
some blocks. An injector is a part of its block: as a block of its own, a checkpoint would keep the
tokens between both.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.nn.functional import modulated_norm, plain_sum
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.remat import recompute_boundary
from ditkit_wan.model.block import WanBlock, WanCrossAttention
from ditkit_wan.model.carry import SpeechCarry, WanCarry, at_positions
from ditkit_wan.model.patches import PatchEmbedding
from ditkit_wan.model.rope import angles_at
from ditkit_wan.model.variants.frames import CausalConv, by_frame, by_sample, without_padding
from ditkit_wan.presets import SpeechArch, WanArch

MOTION_FRAMES = 73
"""Frames before the clip that the model was trained with; the audio encoder has as many copies of
its first row in front, also without them."""
MOTION_LATENTS = (MOTION_FRAMES + 3) // 4
_REFERENCE_POSITION = 30
"""Position in time of the reference image."""
_PACKS = ((1, (1, 2, 2)), (2, (2, 4, 4)), (16, (4, 8, 8)))
"""Latent frames of each pack, the newest first, and their patches: older frames have fewer
tokens."""
_EPS = 1e-5
"""Of the norm before an injector; that of its q and k is the model's."""


class _Tower(nn.Module):
    """Three causal convolutions, which make one row of four; a branch for the tokens of each frame,
    and one for its style."""

    def __init__(self, arch: WanArch, speech: SpeechArch, precision: Precision):
        super().__init__()
        dim, self.tokens, self.eps, self.dtype = arch.dim, speech.tokens, arch.eps, precision.norms
        self.conv1_local = CausalConv(speech.features, dim // 4 * speech.tokens, 1, self.dtype)
        self.conv1_global = CausalConv(speech.features, dim // 4, 1, self.dtype)
        self.conv2 = CausalConv(dim // 4, dim // 2, 2, self.dtype)
        self.conv3 = CausalConv(dim // 2, dim, 2, self.dtype)
        self.final_linear = CastLinear(dim, dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(
        self, x: Float[Tensor, "rows features"]
    ) -> tuple[Float[Tensor, "frames audio dim"], Float[Tensor, "frames dim"]]:
        local = self._narrowed(
            self.conv1_local(x[None])[0].unflatten(-1, (self.tokens, -1)).transpose(0, 1)
        )
        learned = self.padding_tokens[0].to(self.dtype).expand(local.shape[1], 1, -1)
        style = self._narrowed(self.conv1_global(x[None]))[0]
        return torch.cat([local.transpose(0, 1), learned], 1), self.final_linear(style)

    def _narrowed(
        self, x: Float[Tensor, "batch rows channels"]
    ) -> Float[Tensor, "batch frames dim"]:
        return self._activated(self.conv3(self._activated(self.conv2(self._activated(x)))))

    def _activated(self, x: Tensor) -> Tensor:
        return F.silu(F.layer_norm(x, x.shape[-1:], eps=self.eps))


class AudioEncoder(nn.Module):
    """All hidden states of wav2vec2 to one group of tokens per latent frame, computed in the norms'
    dtype as in the official code."""

    def __init__(self, arch: WanArch, speech: SpeechArch, precision: Precision):
        super().__init__()
        self.dtype = precision.norms
        self.weights = nn.Parameter(torch.full((1, speech.states, 1, 1), 0.01))
        self.encoder = _Tower(arch, speech, precision)

    def forward(
        self, audio: Float[Tensor, "states features rows"]
    ) -> tuple[Float[Tensor, "frames audio dim"], Float[Tensor, "frames dim"]]:
        """Tokens and style of every latent frame of one clip: one frame for four rows."""
        audio = torch.cat([audio[..., :1].expand(-1, -1, MOTION_FRAMES), audio], -1).to(self.dtype)
        weights = F.silu(self.weights.to(self.dtype))[0]
        mixed = ((audio * weights) / weights.sum()).sum(0)
        tokens, style = self.encoder(mixed.T)
        return tokens[MOTION_LATENTS:], style[MOTION_LATENTS:]


class FramePacker(nn.Module):
    """The frames before a clip as few tokens: those long ago in larger patches. Missing ones are
    zeros."""

    def __init__(self, arch: WanArch):
        super().__init__()
        embeddings = (PatchEmbedding(arch.dim, arch.out_channels, patch) for _, patch in _PACKS)
        self.proj, self.proj_2x, self.proj_4x = embeddings

    def forward(
        self, motion: Float[Tensor, "channels frames height width"]
    ) -> Float[Tensor, "tokens dim"]:
        """Tokens of the frames before one clip, the newest first, in the dtype of their latents."""
        frames = motion[:, -MOTION_LATENTS:]
        rows, end = [], MOTION_LATENTS
        frames = F.pad(frames, (0, 0, 0, 0, MOTION_LATENTS - frames.shape[1], 0))
        for embedding, (number, _) in zip(
            (self.proj, self.proj_2x, self.proj_4x), _PACKS, strict=True
        ):
            rows.append(embedding(embedding.patches(frames[:, end - number : end])))
            end -= number
        return torch.cat(rows)


def motion_tokens(height: int, width: int) -> int:
    """Number of tokens of the frames before a clip with latents of this size."""
    return sum(number // f * (height // h) * (width // w) for number, (f, h, w) in _PACKS)


def motion_angles(
    height: int, width: int, head_dim: int, device: torch.device
) -> Float[Tensor, "tokens pairs"]:
    """Angles of the tokens of `FramePacker`: time runs backwards from -1, and rows and columns are
    spread over the clip's.

    Args:
        height: Rows of the clip's tokens.
        width: Columns of the clip's tokens.
        head_dim: Width of an attention head.
        device: Device of the angles.
    """
    parts, first = [], 0
    for number, (f, h, w) in _PACKS:
        first -= number
        rows, columns = (
            _spread(size, 2 * size // step, device) for size, step in ((height, h), (width, w))
        )
        parts.append(
            angles_at([first + _spread(number, number // f, device), rows, columns], head_dim)
        )
    return torch.cat(parts)


def _spread(size: int, count: int, device: torch.device) -> Num[Tensor, " count"]:
    """`count` positions from 0 to size - 1, rounded down from fp64 as numpy's linspace has them."""
    if count < 2:
        return torch.zeros(count, dtype=torch.float64, device=device)
    inner = torch.arange(count - 1, dtype=torch.float64, device=device) * ((size - 1) / (count - 1))
    return torch.cat(
        [inner.floor(), torch.arange(size - 1, size, dtype=torch.float64, device=device)]
    )


def reference_angles(
    height: int, width: int, head_dim: int, device: torch.device
) -> Float[Tensor, "tokens pairs"]:
    """Angles of the tokens of the reference image; arguments as for `motion_angles`."""
    ranges = ((_REFERENCE_POSITION, _REFERENCE_POSITION + 1), (0, height), (0, width))
    return angles_at([torch.arange(start, end, device=device) for start, end in ranges], head_dim)


class SpeechEmbedding(nn.Module):
    """Everything of S2V that runs before the blocks, under its names in the official files."""

    def __init__(self, arch: WanArch, speech: SpeechArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.cond_encoder = PatchEmbedding(arch.dim, speech.pose_channels, arch.patch)
        self.casual_audio_encoder = AudioEncoder(arch, speech, precision)
        self.trainable_cond_mask = nn.Embedding(3, arch.dim)
        self.frame_packer = FramePacker(arch)

    def poses(
        self, poses: Sequence[Tensor | None] | None, latents: Sequence[Tensor]
    ) -> Float[Tensor, "batch tokens dim"]:
        """What each clip's poses add to its tokens; zeros in place of latents without any, as in
        the official code."""
        channels = self.cond_encoder.weight.shape[1]
        pairs = zip(poses or [None] * len(latents), latents, strict=True)
        maps = [
            clip.new_zeros(channels, *clip.shape[1:]) if pose is None else pose
            for pose, clip in pairs
        ]
        rows = pad_sequence(
            [self.cond_encoder.patches(latent) for latent in maps], batch_first=True
        )
        shift: Tensor = self.cond_encoder(rows.to(self.precision.matmul))
        return shift

    def marked(
        self,
        clip: Float[Tensor, "tokens dim"],
        reference: Float[Tensor, "more dim"],
        motion: Tensor | None,
    ) -> Float[Tensor, "all dim"]:
        """The tokens of a sample: its clip, the reference image and the frames before, with a
        learned row added to each of the three kinds.

        Args:
            clip: Tokens of the clip.
            reference: Tokens of the reference image.
            motion: Latents of the frames before the clip, [channels, frames, height, width]; None
                without any.
        """
        kinds = [clip, reference]
        if motion is not None:
            kinds.append(self.frame_packer(motion.to(self.precision.matmul)).to(clip.dtype))
        marks = self.trainable_cond_mask.weight
        return torch.cat(
            [rows + mark.to(rows.dtype) for mark, rows in zip(marks, kinds, strict=False)]
        )

    def audio(self, audio: Sequence[Tensor]) -> SpeechCarry:
        """Encoded speech of all samples, padded with zeros."""
        pairs = [self.casual_audio_encoder(states) for states in audio]
        rows, styles = (
            pad_sequence(list(side), batch_first=True) for side in zip(*pairs, strict=True)
        )
        return SpeechCarry(rows=rows.to(self.precision.matmul), style=styles)


class _Adain(nn.Module):
    """The linear layer that makes scale and shift of a frame's style."""

    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)


class SpeechInjector(nn.Module):
    """The term that speech adds to the tokens of every latent frame, by attention to the frame's
    audio after a norm that the frame's style modulates."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.injector = WanCrossAttention(replace(arch, image_dim=0), precision)
        self.adain = _Adain(arch.dim)

    def forward(
        self, tokens: Float[Tensor, "batch tokens dim"], carry: WanCarry
    ) -> Float[Tensor, "batch tokens dim"]:
        if carry.positions is None:
            return self._speech(tokens, carry)
        # Some tokens skip blocks. Frames then differ in their number of tokens, and attention takes
        # equally many: zeros stand for those that are not here. Tokens behind the longest clip,
        # which get no speech, share a row behind it.
        end = max(f * h * w for f, h, w in carry.grids)
        positions = carry.positions.clamp(max=end)
        all_tokens = tokens.new_zeros(len(tokens), end + 1, tokens.shape[2])
        all_tokens = all_tokens.scatter(1, positions[..., None].expand_as(tokens), tokens)
        return at_positions(self._speech(all_tokens, carry), positions)

    def _speech(
        self, tokens: Float[Tensor, "batch all_tokens dim"], carry: WanCarry
    ) -> Float[Tensor, "batch all_tokens dim"]:
        assert carry.speech is not None, "embed makes it"
        precision, grids = self.precision, carry.grids
        frames = [f for f, _, _ in grids]
        rows, style = (without_padding(side, frames) for side in carry.speech)
        modulation = self.adain.linear(F.silu(style).to(precision.matmul)).to(precision.modulation)
        shift, scale = modulation[:, None].chunk(2, -1)
        x = by_frame(tokens, grids)
        h = modulated_norm(x, scale, shift, _EPS, precision.norms, precision.matmul)
        speech = recompute_boundary(
            self.injector.o, self.injector.attended(h, rows, None, "speech")
        )
        return by_sample(speech, grids, tokens.shape[1])


class SpeechBlock(WanBlock):
    """A block followed by an injector of speech."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__(arch, precision)
        self.audio = SpeechInjector(arch, precision)

    def forward(self, carry: WanCarry) -> WanCarry:
        tokens = self.advanced(carry.tokens, carry, is_end=False)
        return carry._replace(tokens=plain_sum(self.audio(tokens, carry), tokens))


def check_speech(
    audio: Sequence[Tensor],
    references: Sequence[Tensor | None] | None,
    poses: Sequence[Tensor | None],
    latents: Sequence[Tensor],
) -> None:
    """Refuse audio, references and poses that do not fit their clip.

    Raises:
        UserError: If so; the message names both shapes.
    """
    for index, (states, clip) in enumerate(zip(audio, latents, strict=False)):
        frames = clip.shape[1]
        if not frames:
            raise UserError(
                "S2V learns the frames after the first, and a clip has only one; set data.frames "
                "to 5 or more"
            )
        if states.shape[-1] != 4 * frames:
            raise UserError(
                f"'audio' has {states.shape[-1]} rows where its clip has {frames} latent frames: "
                f"give four rows for each"
            )
        if references is None or references[index] is None:
            raise UserError(
                "this model is conditioned on 'reference', and a sample has none; encode it again"
            )
    for pose, clip in zip(poses, latents, strict=False):
        if pose is not None and pose.shape[1:] != clip.shape[1:]:
            raise UserError(
                f"'pose' has the shape {list(pose.shape)} where its clip has {list(clip.shape)}: "
                f"encode it at the size of the clip"
            )
