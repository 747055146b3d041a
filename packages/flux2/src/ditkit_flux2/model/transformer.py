"""The FLUX.2 transformer as embed → double blocks → join → single blocks → head.

Names follow black-forest-labs/flux2, src/flux2/model.py; `state_dict.py` has the few that differ. Single-device code: no device, no
autocast, no checkpointing in here. Every place of `Precision` (timestep, modulation, norms, rotation, both residual streams, head, …) is cast
to explicitly, and nothing takes its dtype from a neighbour.

Modulation is computed once and shared by all blocks of a kind. It travels as one tensor per kind and is split inside the block: as a
tuple it would pass a reentrant checkpoint unseen, whose recompute then runs backwards through the one graph of all blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.nn.attention import attend
from ditkit_core.nn.functional import gated_sum, gated_unit, modulated_norm, normalised_heads
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import padding_mask
from ditkit_core.nn.remat import recompute_boundaries, recompute_boundary
from ditkit_core.nn.rope import timestep_features
from ditkit_flux2.model.rope import Grid, rotary_angles, token_positions
from ditkit_flux2.presets import Flux2Arch


class Flux2Inputs(NamedTuple):
    """What `embed` takes: one entry per sample, which may differ in size."""

    latents: Sequence[Tensor]
    """[channels, 1, height, width] each."""
    sigma: Float[Tensor, "batch"]
    """Noise level from 0 to 1, fp32 or wider."""
    guidance: Float[Tensor, "batch"] | None
    """Strength of guidance; a model without an embedding of it leaves it."""
    text: Sequence[Tensor]
    """[text_tokens, text_dim] each; all rows are attended to."""
    references: Sequence[Sequence[Tensor]]
    """Latents of the pictures that each sample is made from, in order; may be none."""


class Flux2DoubleCarry(NamedTuple):
    """Everything one block hands to the next before the join."""

    image: Float[Tensor, "batch image dim"]
    """Target first, then references, then padding."""
    text: Float[Tensor, "batch text dim"]
    image_modulation: Float[Tensor, "batch 6 dim"]
    text_modulation: Float[Tensor, "batch 6 dim"]
    single_modulation: Float[Tensor, "batch 3 dim"]
    time: Float[Tensor, "batch dim"]
    cos: Float[Tensor, "tables tokens 1 pairs"]
    """Of text and image, in this order; `tables` is 1 when all samples share a layout."""
    sin: Float[Tensor, "tables tokens 1 pairs"]
    padding_mask: Bool[Tensor, "batch tokens"] | None
    """False on the padding of samples shorter than the longest; None when all are of one size."""
    grids: tuple[Grid, ...]
    """Rows and columns of each sample's target."""


class Flux2SingleCarry(NamedTuple):
    """Everything one block hands to the next after the join."""

    tokens: Float[Tensor, "batch tokens dim"]
    """Text, then image."""
    modulation: Float[Tensor, "batch 3 dim"]
    time: Float[Tensor, "batch dim"]
    cos: Float[Tensor, "tables tokens 1 pairs"]
    sin: Float[Tensor, "tables tokens 1 pairs"]
    padding_mask: Bool[Tensor, "batch tokens"] | None
    grids: tuple[Grid, ...]
    num_text: int
    """How many of the tokens are text."""


class Flux2MlpEmbedder(nn.Module):
    """A number from 0 to 1 for each sample, as features of the model's width."""

    def __init__(self, arch: Flux2Arch):
        super().__init__()
        self.freq_dim = arch.freq_dim
        self.in_layer = CastLinear(arch.freq_dim, arch.dim, bias=False)
        self.out_layer = CastLinear(arch.dim, arch.dim, bias=False)

    def forward(self, x: Float[Tensor, "batch"], precision: Precision) -> Float[Tensor, "batch dim"]:
        dtype = precision.timestep
        features = timestep_features(1000 * x.to(dtype), self.freq_dim, dtype).to(precision.time_mlp)
        return self.out_layer(F.silu(self.in_layer(features)))


class Flux2Modulation(nn.Module):
    """Shift, scale and gate, once or twice, for all blocks of a kind."""

    def __init__(self, arch: Flux2Arch, rows: int):
        super().__init__()
        self.rows = rows
        self.lin = CastLinear(arch.dim, rows * arch.dim, bias=False)

    def forward(self, time: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch rows dim"]:
        """In the dtype of `time`."""
        return self.lin(F.silu(time)).unflatten(-1, (self.rows, -1))


class Flux2Embed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.img_in = nn.Linear(arch.in_channels, arch.dim, bias=False)
        self.txt_in = nn.Linear(arch.text_dim, arch.dim, bias=False)
        self.time_in = Flux2MlpEmbedder(arch)
        self.guidance_in = Flux2MlpEmbedder(arch) if arch.guidance else None
        self.double_stream_modulation_img = Flux2Modulation(arch, 6)
        self.double_stream_modulation_txt = Flux2Modulation(arch, 6)
        self.single_stream_modulation = Flux2Modulation(arch, 3)

    def forward(self, inputs: Flux2Inputs) -> Flux2DoubleCarry:
        precision = self.precision
        pictures = [(latent, *others) for latent, others in zip(inputs.latents, inputs.references, strict=True)]
        rows = [torch.cat([rearrange(picture, "c 1 h w -> (h w) c") for picture in group]) for group in pictures]
        image = self.img_in(pad_sequence(rows, batch_first=True).to(precision.matmul)).to(precision.entry)
        assert all(len(text) == self.arch.text_tokens for text in inputs.text)
        text = self.txt_in(torch.stack(list(inputs.text)).to(precision.matmul)).to(precision.entry)
        layouts = [tuple((picture.shape[2], picture.shape[3]) for picture in group) for group in pictures]
        table = self._angles(layouts if len(set(layouts)) > 1 else layouts[:1], image.device)
        time = self.time_in(inputs.sigma, precision)
        if self.guidance_in is not None:
            assert inputs.guidance is not None, "this model takes the strength of guidance"
            time = time + self.guidance_in(inputs.guidance, precision)
        modulating = time.to(precision.modulation)
        return Flux2DoubleCarry(
            image=image,
            text=text,
            image_modulation=self.double_stream_modulation_img(modulating),
            text_modulation=self.double_stream_modulation_txt(modulating),
            single_modulation=self.single_stream_modulation(modulating),
            time=time,
            cos=table.cos().to(precision.rotary_tables),
            sin=table.sin().to(precision.rotary_tables),
            padding_mask=padding_mask([self.arch.text_tokens + len(row) for row in rows], image.device),
            grids=tuple(layout[0] for layout in layouts),
        )

    def _angles(
        self, layouts: Sequence[tuple[Grid, ...]], device: torch.device
    ) -> Float[Tensor, "tables tokens 1 pairs"]:
        """Angles of each layout (target, then references); 0 on padding, which stays unrotated."""
        arch = self.arch
        positions = [token_positions(arch.text_tokens, target, others, device) for target, *others in layouts]
        angles = [rotary_angles(position, arch.axes, arch.theta) for position in positions]
        return pad_sequence(angles, batch_first=True)[:, :, None]


class Flux2QKNorm(nn.Module):
    """The norms of q and k, each over one head."""

    def __init__(self, arch: Flux2Arch):
        super().__init__()
        self.query_norm, self.key_norm = (nn.RMSNorm(arch.head_dim, eps=arch.eps) for _ in range(2))


class Flux2StreamAttention(nn.Module):
    """One stream's own part of the attention that both streams share: its projections and norms."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.q, self.k, self.v, self.proj = (nn.Linear(arch.dim, arch.dim, bias=False) for _ in range(4))
        self.norm = Flux2QKNorm(arch)

    def forward(self, h: Float[Tensor, "batch rows dim"], rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """q, k and v [batch, rows, heads, head_dim]."""
        q = normalised_heads(self.q(h), self.norm.query_norm, self.heads, self.precision, rotary)
        k = normalised_heads(self.k(h), self.norm.key_norm, self.heads, self.precision, rotary)
        return q, k, self.v(h).unflatten(-1, (self.heads, -1)).to(self.precision.attention)


class Flux2GatedUnit(nn.Module):
    """silu(a) · b, the first half of the features being the gate."""

    def forward(self, x: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch half"]:
        return gated_unit(x)


class Flux2DoubleBlock(nn.Module):
    """Attention over text and image together, all else in two streams with weights and modulation of their own."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.img_attn, self.txt_attn = (Flux2StreamAttention(arch, precision) for _ in range(2))
        self.img_mlp, self.txt_mlp = (
            nn.Sequential(
                nn.Linear(arch.dim, 2 * arch.mlp_dim, bias=False),
                Flux2GatedUnit(),
                nn.Linear(arch.mlp_dim, arch.dim, bias=False),
            )
            for _ in range(2)
        )

    def forward(self, carry: Flux2DoubleCarry) -> Flux2DoubleCarry:
        precision, image, text = self.precision, carry.image, carry.text
        matmul, norms = precision.matmul, precision.norms_of(image.dtype)
        shift_i, scale_i, gate_i, *mlp_i = carry.image_modulation[:, None].unbind(2)
        shift_t, scale_t, gate_t, *mlp_t = carry.text_modulation[:, None].unbind(2)
        sizes = [text.shape[1], image.shape[1]]
        rotary_t, rotary_i = zip(carry.cos.split(sizes, 1), carry.sin.split(sizes, 1), strict=True)
        of_text = self.txt_attn(modulated_norm(text, scale_t, shift_t, self.eps, norms).to(matmul), rotary_t)
        of_image = self.img_attn(modulated_norm(image, scale_i, shift_i, self.eps, norms).to(matmul), rotary_i)
        q, k, v = (torch.cat(pair, 1) for pair in zip(of_text, of_image, strict=True))
        out = attend(q, k, v, name="self", padding_mask=carry.padding_mask).flatten(2).to(matmul)
        out_t, out_i = out.split(sizes, 1)
        text = gated_sum(self.txt_attn.proj(out_t), text.to(precision.residual), gate_t)
        image = gated_sum(self.img_attn.proj(out_i), image.to(precision.residual), gate_i)
        h_t, h_i = self._hidden(self.txt_mlp, text, *mlp_t), self._hidden(self.img_mlp, image, *mlp_i)
        y_t, y_i = recompute_boundaries([(self.txt_mlp[2], h_t), (self.img_mlp[2], h_i)])
        return carry._replace(text=gated_sum(y_t, text, mlp_t[2]), image=gated_sum(y_i, image, mlp_i[2]))

    def _hidden(self, mlp: nn.Sequential, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        h = modulated_norm(x, scale, shift, self.eps, self.precision.norms).to(self.precision.matmul)
        return mlp[1](mlp[0](h))


class Flux2Join(nn.Module):
    """Two streams become one: text, then image."""

    def forward(self, carry: Flux2DoubleCarry) -> Flux2SingleCarry:
        return Flux2SingleCarry(
            tokens=torch.cat([carry.text, carry.image], 1),
            modulation=carry.single_modulation,
            time=carry.time,
            cos=carry.cos,
            sin=carry.sin,
            padding_mask=carry.padding_mask,
            grids=carry.grids,
            num_text=carry.text.shape[1],
        )


class Flux2SingleBlock(nn.Module):
    """Attention and MLP side by side, between one matmul in and one out."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.linear1 = nn.Linear(arch.dim, 3 * arch.dim + 2 * arch.mlp_dim, bias=False)
        self.linear2 = nn.Linear(arch.dim + arch.mlp_dim, arch.dim, bias=False)
        self.norm = Flux2QKNorm(arch)

    def forward(self, carry: Flux2SingleCarry) -> Flux2SingleCarry:
        arch, precision, x = self.arch, self.precision, carry.tokens
        shift, scale, gate = carry.modulation[:, None].unbind(2)
        norms = precision.norms_of(x.dtype)
        h = self.linear1(modulated_norm(x, scale, shift, arch.eps, norms).to(precision.matmul))
        q, k, v, both = h.split([arch.dim, arch.dim, arch.dim, 2 * arch.mlp_dim], -1)
        rotary = carry.cos, carry.sin
        q = normalised_heads(q, self.norm.query_norm, arch.heads, precision, rotary)
        k = normalised_heads(k, self.norm.key_norm, arch.heads, precision, rotary)
        v = v.unflatten(-1, (arch.heads, -1)).to(precision.attention)
        out = attend(q, k, v, name="self", padding_mask=carry.padding_mask).flatten(2).to(precision.matmul)
        h = torch.cat([out, gated_unit(both)], -1)
        return carry._replace(tokens=gated_sum(recompute_boundary(self.linear2, h), x.to(precision.residual), gate))


class Flux2Head(nn.Module):
    """The last carry to one velocity per sample; text and references are dropped first."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.linear = CastLinear(arch.dim, arch.out_channels, bias=False)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), CastLinear(arch.dim, 2 * arch.dim, bias=False))

    def forward(self, carry: Flux2SingleCarry) -> list[Tensor]:
        dtype = self.precision.head
        shift, scale = self.adaLN_modulation(carry.time.to(dtype))[:, None].chunk(2, -1)
        longest = max(height * width for height, width in carry.grids)
        target = carry.tokens[:, carry.num_text : carry.num_text + longest]
        rows = self.linear(modulated_norm(target, scale, shift, self.arch.eps, dtype))
        return [
            rearrange(row[: height * width], "(h w) c -> c 1 h w", h=height, w=width)
            for row, (height, width) in zip(rows, carry.grids, strict=True)
        ]


class Flux2Transformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, noise level, text and references."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.embed = Flux2Embed(arch, precision)
        self.double_blocks = nn.ModuleList(Flux2DoubleBlock(arch, precision) for _ in range(arch.double_layers))
        self.join = Flux2Join()
        self.single_blocks = nn.ModuleList(Flux2SingleBlock(arch, precision) for _ in range(arch.single_layers))
        self.head = Flux2Head(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return [*self.double_blocks, self.join, *self.single_blocks]

    def forward(self, inputs: Flux2Inputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
