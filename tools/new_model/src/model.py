"""The Zed transformer as embed -> blocks -> head.

FILL IN 2: the published transformer in place of this one, in its authors' names for blocks and parameters, with the upstream file named here.
What stays: `embed`, `blocks` and `head`; a carry with every tensor that one block hands to the next; dtypes from `Precision` alone; `attend` of the
core; tables of positions in the carry and in no buffer; a head that returns the velocity from data to noise.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from ditkit_zed.presets import ZedArch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import gated_sum, modulated_norm, normalised_heads, plain_sum
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import padding_mask
from ditkit_core.nn.remat import recompute_boundary
from ditkit_core.nn.rope import axis_angles, rotary_table, timestep_features

PATCH = (1, 2, 2)
"""Latent frames, rows and columns of a token."""

Grid = tuple[int, int, int]
"""Frames, rows and columns of a sample's tokens."""


class ZedInputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size."""

    latents: Sequence[Tensor]
    """[channels, frames, height, width] each."""
    sigma: Float[Tensor, " batch"]
    """Noise level from 0 to 1, fp32 or wider."""
    text: Sequence[Tensor]
    """[rows, text_dim] each."""


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> ZedInputs:
    """Make the model's inputs of noised latents and training items; this model has no embedding of guidance."""
    return ZedInputs(noised, sigma, [item["text"].to(noised[0].device) for item in items])


class ZedCarry(NamedTuple):
    """Everything one block hands to the next."""

    tokens: Float[Tensor, "batch tokens dim"]
    modulation: Float[Tensor, "batch 1 6 dim"]
    time: Float[Tensor, "batch 1 dim"]
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    """Cosines and sines of positions, side by side; `tables` is 1 when all samples share a grid."""
    text: Float[Tensor, "batch text dim"]
    text_mask: Bool[Tensor, "batch text"] | None
    """False on the padding of captions shorter than the longest; None when all have one length."""
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    """The same for tokens."""
    grids: tuple[Grid, ...]


TOKEN_STREAMS = TokenStreams(
    fields=lambda carry: {"tokens": ("tokens",), "rotary": ("tokens",)},
    inputs={"cross_attn.k": (), "cross_attn.v": ()},
    routed="tokens",
)
"""What runs along tokens: ranks can share them, and tokens can skip blocks."""


class ZedEmbed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: ZedArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        frames, rows, columns = PATCH
        self.patch_in = nn.Linear(arch.in_channels * frames * rows * columns, arch.dim)
        self.text_in = nn.Linear(arch.text_dim, arch.dim)
        self.time_in = nn.Sequential(
            CastLinear(arch.freq_dim, arch.dim), nn.SiLU(), CastLinear(arch.dim, arch.dim)
        )
        self.time_modulation = nn.Sequential(nn.SiLU(), CastLinear(arch.dim, 6 * arch.dim))

    def forward(self, inputs: ZedInputs) -> ZedCarry:
        precision, device = self.precision, inputs.latents[0].device
        frames, rows, columns = PATCH
        pattern = "c (f p) (h q) (w r) -> (f h w) (c p q r)"
        patches = [rearrange(x, pattern, p=frames, q=rows, r=columns) for x in inputs.latents]
        grids = tuple(
            (x.shape[1] // frames, x.shape[2] // rows, x.shape[3] // columns)
            for x in inputs.latents
        )
        tokens = self.patch_in(pad_sequence(patches, batch_first=True).to(precision.matmul))
        text = self.text_in(pad_sequence(list(inputs.text), batch_first=True).to(precision.matmul))
        # One table serves the whole batch where all samples share a grid: it is broadcast instead of stored per sample.
        tables = grids if len(set(grids)) > 1 else grids[:1]
        angles = pad_sequence([self._angles(grid, device) for grid in tables], batch_first=True)[
            :, :, None
        ]
        sigma = inputs.sigma.to(precision.timestep)
        features = timestep_features(1000 * sigma, self.arch.freq_dim, precision.timestep)
        time = self.time_in(features.to(precision.time_mlp))
        return ZedCarry(
            tokens=tokens.to(precision.entry),
            modulation=self.time_modulation(time)
            .unflatten(-1, (1, 6, -1))
            .to(precision.modulation),
            time=time[:, None],
            rotary=rotary_table(angles, precision.rotary_tables),
            text=text,
            text_mask=padding_mask([len(x) for x in inputs.text], device),
            padding_mask=padding_mask([len(x) for x in patches], device),
            grids=grids,
        )

    def _angles(self, grid: Grid, device: torch.device) -> Float[Tensor, "tokens pairs"]:
        positions = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))
        parts = [
            axis_angles(positions[:, i], size // 2, self.arch.theta)
            for i, size in enumerate(self.arch.axes)
        ]
        return torch.cat(parts, -1)


class ZedAttention(nn.Module):
    """Attention of tokens to tokens, or to the text."""

    def __init__(self, arch: ZedArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.q, self.k, self.v, self.o = (nn.Linear(arch.dim, arch.dim) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.head_dim, eps=arch.eps) for _ in range(2))

    def forward(
        self, h: Tensor, keys: Tensor, rotary: Tensor | None, mask: Tensor | None, name: str
    ) -> Tensor:
        precision = self.precision
        q = normalised_heads(self.q(h), self.norm_q, self.heads, precision, rotary)
        k = normalised_heads(self.k(keys), self.norm_k, self.heads, precision, rotary)
        v = self.v(keys).unflatten(-1, (self.heads, -1)).to(precision.attention)
        return self.o(attend(q, k, v, name=name, padding_mask=mask).flatten(2).to(precision.matmul))


class ZedBlock(nn.Module):
    """Self-attention, cross-attention and MLP on a residual stream."""

    def __init__(self, arch: ZedArch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.modulation = nn.Parameter(torch.randn(1, 6, arch.dim) / arch.dim**0.5)
        self.self_attn, self.cross_attn = (
            ZedAttention(arch, precision),
            ZedAttention(arch, precision),
        )
        self.ffn = nn.Sequential(
            nn.Linear(arch.dim, arch.ffn_dim), nn.GELU(), nn.Linear(arch.ffn_dim, arch.dim)
        )

    def forward(self, carry: ZedCarry) -> ZedCarry:
        precision, x = self.precision, carry.tokens
        rows = self.modulation.to(precision.modulation) + carry.modulation
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = rows.unbind(2)
        h = modulated_norm(x, scale, shift, self.eps, precision.norms_of(x.dtype), precision.matmul)
        y = self.self_attn(h, h, carry.rotary, carry.padding_mask, "self")
        x = gated_sum(y, x.to(precision.residual), gate)
        x = plain_sum(
            self.cross_attn(x.to(precision.matmul), carry.text, None, carry.text_mask, "cross"), x
        )
        h = modulated_norm(x, scale_mlp, shift_mlp, self.eps, precision.norms, precision.matmul)
        # A recompute of the block can stop in front of this matmul: its input and gate are all that the backward needs.
        y = recompute_boundary(self.ffn[2], self.ffn[1](self.ffn[0](h)), gate_mlp)
        return carry._replace(tokens=gated_sum(y, x, gate_mlp))


class ZedHead(nn.Module):
    """Carry to one velocity per sample, from data to noise."""

    def __init__(self, arch: ZedArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        frames, rows, columns = PATCH
        self.modulation = nn.Parameter(torch.randn(1, 2, arch.dim) / arch.dim**0.5)
        self.linear = CastLinear(arch.dim, arch.in_channels * frames * rows * columns)

    def forward(self, carry: ZedCarry) -> list[Tensor]:
        dtype, (frames, rows, columns) = self.precision.head, PATCH
        shift, scale = (
            self.modulation[:, None].to(dtype) + carry.time[:, :, None].to(dtype)
        ).unbind(2)
        patches = self.linear(
            modulated_norm(carry.tokens, scale, shift, self.arch.eps, dtype, dtype)
        )
        pattern = "(f h w) (c p q r) -> c (f p) (h q) (w r)"
        return [
            rearrange(row[: f * h * w], pattern, f=f, h=h, w=w, p=frames, q=rows, r=columns)
            for row, (f, h, w) in zip(patches, carry.grids, strict=True)
        ]


class ZedTransformer(nn.Module):
    """embed -> blocks -> head."""

    def __init__(self, arch: ZedArch, precision: Precision):
        super().__init__()
        self.embed = ZedEmbed(arch, precision)
        self.layers = nn.ModuleList(ZedBlock(arch, precision) for _ in range(arch.layers))
        self.head = ZedHead(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, inputs: ZedInputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
