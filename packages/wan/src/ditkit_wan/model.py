"""The Wan 2.x transformer as embed → blocks → head.

Names follow Wan-Video/Wan2.1, wan/modules/model.py; `state_dict.py` has the few that differ. Single-device code: no device, no
autocast, no checkpointing in here. Every place of `Precision` (timestep, modulation, norms, rotation, residual stream, head, …) is cast to
explicitly, and nothing takes its dtype from a neighbour.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.attention import attend
from ditkit_core.cast_linear import CastLinear
from ditkit_core.elementwise import gated_sum, modulated_norm, normalised_heads, plain_sum
from ditkit_core.last_step import last_step
from ditkit_core.model import Engine, run_plain
from ditkit_core.precision import Precision
from ditkit_core.ragged import key_mask
from ditkit_core.rotary import timestep_features
from ditkit_wan.presets import WanArch
from ditkit_wan.rope import rotary_angles


class WanInputs(NamedTuple):
    """What `embed` takes: one entry per sample, which may differ in size."""

    latents: Sequence[Tensor]
    """[channels, frames, height, width] each."""
    timestep: Float[Tensor, "batch *tokens"]
    """1000 · σ, fp32 or wider; one per sample, or one per token where tokens differ."""
    text: Sequence[Tensor]
    """[rows, text_dim] each, at most `text_tokens` rows."""


class WanCarry(NamedTuple):
    """Everything one block hands to the next."""

    tokens: Float[Tensor, "batch tokens dim"]
    modulation: Float[Tensor, "batch times 6 dim"]
    """`times` is 1, or the number of tokens when timesteps differ per token."""
    time: Float[Tensor, "batch times dim"]
    cos: Float[Tensor, "tables tokens 1 pairs"]
    sin: Float[Tensor, "tables tokens 1 pairs"]
    text: Float[Tensor, "batch text dim"]
    key_mask: Bool[Tensor, "batch tokens"] | None
    """False on the padding of samples shorter than the longest; None when all are of one size."""
    grids: tuple[tuple[int, int, int], ...]
    """Tokens of each sample along frames, height, width."""


class WanPatchEmbedding(nn.Module):
    """The official Conv3d whose stride is its kernel, computed as the matmul that it is."""

    def __init__(self, arch: WanArch):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(arch.dim, arch.in_channels, *arch.patch))
        self.bias = nn.Parameter(torch.zeros(arch.dim))
        nn.init.xavier_uniform_(self.weight.data.flatten(1))

    def forward(self, patches: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch dim"]:
        return F.linear(patches, self.weight.flatten(1), self.bias)


class WanEmbed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        dim = arch.dim
        self.patch_embedding = WanPatchEmbedding(arch)
        self.text_embedding = nn.Sequential(
            nn.Linear(arch.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(CastLinear(arch.freq_dim, dim), nn.SiLU(), CastLinear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), CastLinear(dim, 6 * dim))

    def forward(self, inputs: WanInputs) -> WanCarry:
        precision = self.precision
        grids = tuple(self._grid(latent) for latent in inputs.latents)
        patches = [self._patches(latent) for latent in inputs.latents]
        tokens = self.patch_embedding(pad_sequence(patches, batch_first=True).to(precision.matmul))
        uniform = len(set(grids)) == 1
        angles = [rotary_angles(grid, self.arch.head_dim, tokens.device) for grid in grids[: 1 if uniform else None]]
        table = pad_sequence(angles, batch_first=True)[:, :, None]  # angle 0 on padding: unrotated
        timestep = inputs.timestep if inputs.timestep.ndim == 2 else inputs.timestep[:, None]
        features = timestep_features(timestep, self.arch.freq_dim, precision.timestep)
        time = self.time_embedding(features.to(precision.time_mlp))
        return WanCarry(
            tokens=tokens.to(precision.entry),
            modulation=self.time_projection(time).unflatten(-1, (6, -1)).to(precision.modulation),
            time=time,
            cos=table.cos().to(precision.rotary_tables),
            sin=table.sin().to(precision.rotary_tables),
            text=self.text_embedding(self._padded_text(inputs.text).to(precision.matmul)),
            key_mask=key_mask([len(rows) for rows in patches], tokens.device),
            grids=grids,
        )

    def _grid(self, latent: Tensor) -> tuple[int, int, int]:
        frames, height, width = (size // step for size, step in zip(latent.shape[1:], self.arch.patch, strict=True))
        return frames, height, width

    def _patches(self, latent: Float[Tensor, "channels frames height width"]) -> Float[Tensor, "tokens features"]:
        pf, ph, pw = self.arch.patch
        return rearrange(latent, "c (f pf) (h ph) (w pw) -> (f h w) (c pf ph pw)", pf=pf, ph=ph, pw=pw)

    def _padded_text(self, text: Sequence[Tensor]) -> Float[Tensor, "batch text text_dim"]:
        return torch.stack([F.pad(rows, (0, 0, 0, self.arch.text_tokens - len(rows))) for rows in text])


class WanSelfAttention(nn.Module):
    """Attention among the tokens of a sample, q and k normalised over the full width and rotated."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.q, self.k, self.v, self.o = (nn.Linear(arch.dim, arch.dim) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.dim, eps=arch.eps) for _ in range(2))

    def forward(self, h: Tensor, carry: WanCarry) -> Tensor:
        precision, rotary = self.precision, (carry.cos, carry.sin)
        q = normalised_heads(self.q(h), self.norm_q, self.heads, precision, rotary)
        k = normalised_heads(self.k(h), self.norm_k, self.heads, precision, rotary)
        v = self.v(h).unflatten(-1, (self.heads, -1)).to(precision.attention)
        return self.o(attend(q, k, v, name="self", key_mask=carry.key_mask).flatten(2).to(precision.matmul))


class WanCrossAttention(nn.Module):
    """Attention from the tokens to the text; padding rows are attended to, as in training."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.q, self.k, self.v, self.o = (nn.Linear(arch.dim, arch.dim) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.dim, eps=arch.eps) for _ in range(2))

    def forward(self, h: Tensor, text: Float[Tensor, "batch text dim"]) -> Tensor:
        q = normalised_heads(self.q(h), self.norm_q, self.heads, self.precision)
        k = normalised_heads(self.k(text), self.norm_k, self.heads, self.precision)
        v = self.v(text).unflatten(-1, (self.heads, -1)).to(self.precision.attention)
        return self.o(attend(q, k, v, name="cross").flatten(2).to(self.precision.matmul))


class WanBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward on a residual stream."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.modulation = nn.Parameter(torch.randn(1, 6, arch.dim) / arch.dim**0.5)
        self.self_attn = WanSelfAttention(arch, precision)
        self.norm3 = nn.LayerNorm(arch.dim, eps=arch.eps)
        self.cross_attn = WanCrossAttention(arch, precision)
        self.ffn = nn.Sequential(
            nn.Linear(arch.dim, arch.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(arch.ffn_dim, arch.dim)
        )

    def forward(self, carry: WanCarry) -> WanCarry:
        precision = self.precision
        matmul, norms = precision.matmul, precision.norms
        modulation = self.modulation.to(precision.modulation) + carry.modulation
        shift_sa, scale_sa, gate_sa, shift_ffn, scale_ffn, gate_ffn = modulation.unbind(2)
        x = carry.tokens
        h = modulated_norm(x, scale_sa, shift_sa, self.eps, precision.norms_of(x.dtype)).to(matmul)
        x = gated_sum(self.self_attn(h, carry), x.to(precision.residual), gate_sa)
        weight, bias = self.norm3.weight.to(norms), self.norm3.bias.to(norms)
        h = F.layer_norm(x.to(norms), self.norm3.normalized_shape, weight, bias, self.eps).to(matmul)
        x = plain_sum(self.cross_attn(h, carry.text), x)
        h = modulated_norm(x, scale_ffn, shift_ffn, self.eps, norms).to(matmul)
        h = self.ffn[1](self.ffn[0](h))
        return carry._replace(tokens=last_step(self.ffn[2], h, gated_sum, x, gate_ffn))


class WanHead(nn.Module):
    """The last carry to one velocity per sample."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        pf, ph, pw = arch.patch
        self.modulation = nn.Parameter(torch.randn(1, 2, arch.dim) / arch.dim**0.5)
        self.head = CastLinear(arch.dim, arch.out_channels * pf * ph * pw)

    def forward(self, carry: WanCarry) -> list[Tensor]:
        dtype = self.precision.head
        shift, scale = (self.modulation[:, None].to(dtype) + carry.time[:, :, None].to(dtype)).unbind(2)
        rows = self.head(modulated_norm(carry.tokens, scale, shift, self.arch.eps, dtype))
        return [self._unpatch(row, grid) for row, grid in zip(rows, carry.grids, strict=True)]

    def _unpatch(self, row: Float[Tensor, "tokens features"], grid: tuple[int, int, int]) -> Tensor:
        (f, h, w), (pf, ph, pw) = grid, self.arch.patch
        pattern = "(f h w) (pf ph pw c) -> c (f pf) (h ph) (w pw)"
        return rearrange(row[: f * h * w], pattern, f=f, h=h, w=w, pf=pf, ph=ph, pw=pw)


class WanTransformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, timestep and text."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.embed = WanEmbed(arch, precision)
        self.layers = nn.ModuleList(WanBlock(arch, precision) for _ in range(arch.layers))
        self.head = WanHead(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, inputs: WanInputs, run: Engine = run_plain) -> list[Tensor]:
        return run(self, inputs)
