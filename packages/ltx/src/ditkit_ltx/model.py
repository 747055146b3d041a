"""The LTX-Video transformer as embed → blocks → head.

Names follow diffusers' `LTXVideoTransformer3DModel`; `state_dict.py` has those that differ. Queries
and keys are rotated along their whole width, before heads are made of them: each head has positions
of other frequencies. Positions along time are seconds, which items bring along.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.families.first_frame import first_frame_of
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import (
    gated_sum,
    modulated_norm,
    normalised_heads,
    per_token,
    plain_sum,
)
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import padding_mask
from ditkit_core.nn.remat import recompute_boundary
from ditkit_core.nn.rms_norms import scaled_norm
from ditkit_core.nn.rope import rotary_table, timestep_features
from ditkit_ltx.presets import LtxArch

_SECONDS, _PIXELS, _STRIDE = 20, 2048, 32
"""Ends of the axes of positions, and pixels on a side of a latent pixel. Source:
`LTXVideoRotaryPosEmbed` of diffusers, which calls the 20 frames."""
_QK_EPS = 1e-5

Grid = tuple[int, int, int]
"""Latent frames, rows and columns of a sample; each of its pixels is a token."""


class LtxInputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size."""

    latents: Sequence[Tensor]
    """[channels, frames, height, width] each."""
    sigma: Float[Tensor, " batch *two"]
    """Noise level from 0 to 1, fp32 or wider: one per sample, or two with `late`."""
    text: Sequence[Tensor]
    """[rows, text_dim] each."""
    seconds: Sequence[Float64[Tensor, " frames"]]
    """When each latent frame begins."""
    late: Bool[Tensor, "batch tokens"] | None = None
    """Tokens with the second of their sample's two noise levels; None if there is one."""


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> LtxInputs:
    """Make the model's inputs of noised latents and training items; LTX-Video has no embedding of
    guidance.

    A sample's `first_frame` replaces its first latent frame, and these tokens have noise level 0.
    """
    device = noised[0].device
    text, seconds = ([item[name].to(device) for item in items] for name in ("text", "seconds"))
    pairs = [(x, first_frame_of(item, x)) for item, x in zip(items, noised, strict=True)]
    if all(first is None for _, first in pairs):
        return LtxInputs(noised, sigma, text, seconds)
    late = torch.ones(
        len(pairs), max(x[0].numel() for x in noised), dtype=torch.bool, device=device
    )
    for row, (x, first) in zip(late, pairs, strict=True):
        row[: 0 if first is None else x[0, 0].numel()] = False
    latents = [x if first is None else torch.cat([first.to(x), x[:, 1:]], 1) for x, first in pairs]
    return LtxInputs(latents, torch.stack([torch.zeros_like(sigma), sigma], 1), text, seconds, late)


class LtxCarry(NamedTuple):
    """Everything one block hands to the next."""

    tokens: Float[Tensor, "batch tokens dim"]
    modulation: Float[Tensor, "batch times 6 dim"]
    """Shift, scale and gate of attention, then of the MLP, for each noise level; each block adds a
    table of its own."""
    time: Float[Tensor, "batch times dim"]
    rotary: Float[Tensor, "batch tokens 1 pairs 2"]
    """Cosines and sines, side by side, along the whole width. A table for each sample: samples of
    one size may have other frame rates."""
    text: Float[Tensor, "batch text dim"]
    text_mask: Bool[Tensor, "batch text"] | None
    """False on what pads a caption to the longest; None when all have one length."""
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    """The same for tokens."""
    grids: tuple[Grid, ...]
    late: Bool[Tensor, "batch tokens"] | None = None
    """As of the inputs."""


TOKEN_STREAMS = TokenStreams(
    fields=lambda carry: dict.fromkeys(
        ("tokens", "rotary", *(() if carry.late is None else ("late",))), ("tokens",)
    ),
    head=("tokens", "late"),
    inputs={"attn2.to_k": (), "attn2.to_v": ()},
    routed="tokens",
)
"""What runs along tokens: ranks can share them, and tokens can skip blocks."""


class LtxEmbed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: LtxArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.proj_in = nn.Linear(arch.in_channels, arch.dim)
        self.time_embed = nn.ModuleDict(
            {
                "linear_1": CastLinear(arch.freq_dim, arch.dim),
                "linear_2": CastLinear(arch.dim, arch.dim),
                "linear": CastLinear(arch.dim, 6 * arch.dim),
            }
        )
        self.caption_projection = nn.ModuleDict(
            {
                "linear_1": nn.Linear(arch.text_dim, arch.dim),
                "linear_2": nn.Linear(arch.dim, arch.dim),
            }
        )

    def forward(self, inputs: LtxInputs) -> LtxCarry:
        precision, device = self.precision, inputs.latents[0].device
        rows = [rearrange(x, "c f h w -> (f h w) c") for x in inputs.latents]
        grids = tuple((x.shape[1], x.shape[2], x.shape[3]) for x in inputs.latents)
        tokens = self.proj_in(pad_sequence(rows, batch_first=True).to(precision.matmul))
        text = pad_sequence(list(inputs.text), batch_first=True).to(precision.matmul)
        text = F.gelu(self.caption_projection["linear_1"](text), approximate="tanh")
        angles = [
            self._angles(grid, seconds) for grid, seconds in zip(grids, inputs.seconds, strict=True)
        ]
        table = pad_sequence(angles, batch_first=True)[:, :, None]
        sigma = inputs.sigma.to(precision.timestep)
        features = timestep_features(1000 * sigma.flatten(), self.arch.freq_dim, precision.timestep)
        hidden = self.time_embed["linear_1"](features.to(precision.time_mlp))
        time = self.time_embed["linear_2"](F.silu(hidden)).unflatten(0, (len(sigma), -1))
        modulation = self.time_embed["linear"](F.silu(time).to(precision.modulation))
        return LtxCarry(
            tokens=tokens.to(precision.entry),
            modulation=modulation.unflatten(-1, (6, -1)),
            time=time,
            rotary=rotary_table(table, precision.rotary_tables),
            text=self.caption_projection["linear_2"](text),
            text_mask=padding_mask([len(x) for x in inputs.text], device),
            padding_mask=padding_mask([len(x) for x in rows], device),
            grids=grids,
            late=inputs.late,
        )

    def _angles(self, grid: Grid, seconds: Tensor) -> Float64[Tensor, "tokens pairs"]:
        """Angles of a sample's tokens: for each frequency, those of frame, row and column. The
        first pairs, if the width is no multiple of 6, are not rotated."""
        _, height, width = grid
        device, dim = seconds.device, self.arch.dim
        sides = (
            torch.arange(size, device=device).double() * (_STRIDE / _PIXELS)
            for size in (height, width)
        )
        positions = 2 * torch.cartesian_prod(seconds.double() / _SECONDS, *sides) - 1
        exponents = torch.linspace(0, 1, dim // 6, dtype=torch.float64, device=device)
        frequencies = math.pi / 2 * self.arch.theta**exponents
        angles = (frequencies[:, None] * positions[:, None]).flatten(1)
        return F.pad(angles, (dim // 2 - angles.shape[1], 0))


class LtxAttention(nn.Module):
    """Attention of tokens to tokens, or to the text."""

    def __init__(self, arch: LtxArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.to_q, self.to_k, self.to_v = (nn.Linear(arch.dim, arch.dim) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(arch.dim, arch.dim))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.dim, eps=_QK_EPS) for _ in range(2))

    def forward(
        self,
        h: Float[Tensor, "batch tokens dim"],
        keys: Float[Tensor, "batch keys dim"],
        rotary: Tensor | None,
        mask: Tensor | None,
        name: str,
    ) -> Float[Tensor, "batch tokens dim"]:
        precision = self.precision
        # One head of the full width, so that the rotation does not repeat for each head.
        q = normalised_heads(self.to_q(h), self.norm_q, 1, precision, rotary).squeeze(2)
        k = normalised_heads(self.to_k(keys), self.norm_k, 1, precision, rotary).squeeze(2)
        v = self.to_v(keys).to(precision.attention)
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in (q, k, v))
        y = attend(q, k, v, name=name, padding_mask=mask).flatten(2)
        return self.to_out(y.to(precision.matmul))


class LtxBlock(nn.Module):
    """Self-attention, cross-attention and MLP on a residual stream."""

    def __init__(self, arch: LtxArch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.scale_shift_table = nn.Parameter(torch.zeros(6, arch.dim))
        self.attn1, self.attn2 = (LtxAttention(arch, precision) for _ in range(2))
        self.ff = nn.Sequential(
            nn.Linear(arch.dim, 4 * arch.dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * arch.dim, arch.dim),
        )

    def forward(self, carry: LtxCarry) -> LtxCarry:
        precision, x = self.precision, carry.tokens
        matmul, norms = precision.matmul, precision.norms_of(x.dtype)
        rows, late = carry.modulation + self.scale_shift_table.to(precision.modulation), carry.late
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = rows.unbind(2)
        scale, shift = per_token(1 + scale, late), per_token(shift, late)
        h = scaled_norm(x, scale, self.eps, norms, matmul, shift)
        y = self.attn1(h, h, carry.rotary, carry.padding_mask, "self")
        x = gated_sum(y, x.to(precision.residual), gate, late)
        # The stream itself reads the text: no norm, and no gate on what it reads.
        y = self.attn2(x.to(matmul), carry.text, None, carry.text_mask, "cross")
        x = plain_sum(y, x)
        scale, shift = per_token(1 + scale_mlp, late), per_token(shift_mlp, late)
        h = scaled_norm(x, scale, self.eps, precision.norms, matmul, shift)
        # A recompute of the block can stop in front of this matmul: its input and gate are all that
        # the backward needs.
        y = recompute_boundary(self.ff[2], self.ff[1](self.ff[0](h)), gate_mlp)
        return carry._replace(tokens=gated_sum(y, x, gate_mlp, late))


class LtxHead(nn.Module):
    """The last carry to one velocity per sample, from data to noise."""

    def __init__(self, arch: LtxArch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.scale_shift_table = nn.Parameter(torch.zeros(2, arch.dim))
        self.proj_out = CastLinear(arch.dim, arch.in_channels)

    def forward(self, carry: LtxCarry) -> list[Tensor]:
        dtype = self.precision.head
        # The embedded noise level itself, and not the modulation of the blocks.
        rows = carry.time[:, :, None].to(dtype) + self.scale_shift_table.to(dtype)
        shift, scale = (per_token(row, carry.late) for row in rows.unbind(2))
        h = modulated_norm(carry.tokens, scale, shift, self.eps, dtype, dtype)
        return [
            rearrange(row[: f * h * w], "(f h w) c -> c f h w", f=f, h=h, w=w)
            for row, (f, h, w) in zip(self.proj_out(h), carry.grids, strict=True)
        ]


class LtxTransformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, noise level, text and
    seconds."""

    def __init__(self, arch: LtxArch, precision: Precision):
        super().__init__()
        self.embed = LtxEmbed(arch, precision)
        self.transformer_blocks = nn.ModuleList(
            LtxBlock(arch, precision) for _ in range(arch.layers)
        )
        self.head = LtxHead(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return list(self.transformer_blocks)

    def forward(self, inputs: LtxInputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
