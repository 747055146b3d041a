"""The Krea 2 transformer as embed → layerwise blocks → collapse → refiner blocks →
projection → join → blocks → head.

Names follow diffusers' `Krea2Transformer2DModel`; `state_dict.py` has those that differ. A caption
is twelve hidden states per token: the layerwise blocks attend over these, the collapse makes one of
them, the refiner blocks attend over the tokens of the caption. Behind the join image and caption
are one stream, the image first: the caption's positions are zero, so their order changes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import gated_sum, normalised_heads
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import joined_padding_mask, padding_mask
from ditkit_core.nn.remat import recompute_boundary
from ditkit_core.nn.rms_norms import OffsetNorm, gated_product, scaled_norm
from ditkit_core.nn.rope import axis_angles, rotary_table, timestep_features
from ditkit_krea2.presets import Krea2Arch

PATCH = 2
"""Latent pixels on a side of a token."""

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


class Krea2Inputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size."""

    latents: Sequence[Tensor]
    """[channels, 1, height, width] each."""
    sigma: Float[Tensor, " batch"]
    """Noise level from 0 to 1, fp32 or wider."""
    text: Sequence[Tensor]
    """[rows, text_layers * text_dim] each: the layers of a token side by side."""


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> Krea2Inputs:
    """Make the model's inputs of noised latents and training items; Krea 2 has no embedding of
    guidance."""
    return Krea2Inputs(noised, sigma, [item["text"].to(noised[0].device) for item in items])


class Krea2TextCarry(NamedTuple):
    """Everything one block hands to the next before the join."""

    image: Float[Tensor, "batch image dim"]
    text: Float[Tensor, "batch text width"]
    """The layers of a token side by side until the collapse, then one row as wide as a layer,
    behind the projection as wide as the image's."""
    time: Float[Tensor, "batch 1 dim"]
    modulation: Float[Tensor, "batch 1 6 dim"]
    """Scale, shift and gate of attention, then of the MLP; each block adds a table of its own."""
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    """Cosines and sines, side by side, of image, then caption; `tables` is 1 when all samples share
    a layout."""
    text_mask: Bool[Tensor, "batch all_text"] | None
    """False on what pads a caption to the longest; None when all have one length."""
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    """The same for image and caption."""
    grids: tuple[Grid, ...]
    """Rows and columns of each sample's tokens."""


class Krea2Carry(NamedTuple):
    """Everything one block hands to the next behind the join."""

    tokens: Float[Tensor, "batch tokens dim"]
    """Image, then caption."""
    time: Float[Tensor, "batch 1 dim"]
    modulation: Float[Tensor, "batch 1 6 dim"]
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    grids: tuple[Grid, ...]


def _token_fields(carry: Krea2TextCarry | Krea2Carry) -> dict[str, tuple[str, ...]]:
    both = ("image", "text")
    if isinstance(carry, Krea2Carry):
        return {"tokens": both, "rotary": both}
    return {"image": ("image",), "text": ("text",), "rotary": both}


TOKEN_STREAMS = TokenStreams(
    names=("image", "text"),
    fields=_token_fields,
    within={"text": ("text",)},
    inputs=dict.fromkeys(
        ("layerwise_blocks.*", "collapse.*", "refiner_blocks.*", "txt_in.*"), ("text",)
    ),
    masks={"padding_mask": (), "text_mask": ("text",)},
    residual=("image", "text", "tokens"),
    routed="image",
)
"""Image and caption, each divided among ranks by itself. A token's layers stay together, so the
attention among them is on one rank. The caption skips no block."""


class Krea2Embed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: Krea2Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.img_in = nn.Linear(PATCH**2 * arch.in_channels, arch.dim)
        self.time_embed = nn.ModuleDict(
            {
                "linear_1": CastLinear(arch.freq_dim, arch.dim),
                "linear_2": CastLinear(arch.dim, arch.dim),
            }
        )
        self.time_mod_proj = CastLinear(arch.dim, 6 * arch.dim)

    def forward(self, inputs: Krea2Inputs) -> Krea2TextCarry:
        precision, device = self.precision, inputs.latents[0].device
        pattern = "c 1 (h p) (w q) -> (h w) (c p q)"
        patches = [rearrange(x, pattern, p=PATCH, q=PATCH) for x in inputs.latents]
        grids = tuple((x.shape[2] // PATCH, x.shape[3] // PATCH) for x in inputs.latents)
        image = self.img_in(pad_sequence(patches, batch_first=True).to(precision.matmul))
        # In the shapes of layers and back: features of another encoder fail here, on `meta`.
        layers = (self.arch.text_layers, self.arch.text_dim)
        text = pad_sequence(list(inputs.text), batch_first=True).unflatten(-1, layers).flatten(-2)
        # One table serves the whole batch where all samples share a grid: it is broadcast instead
        # of stored per sample.
        angles = torch.stack(
            [
                self._angles(grid, image.shape[1], text.shape[1], device)
                for grid in (grids if len(set(grids)) > 1 else grids[:1])
            ]
        )
        sigma = inputs.sigma.to(precision.timestep)
        features = timestep_features(1000 * sigma, self.arch.freq_dim, precision.timestep)
        hidden = self.time_embed["linear_1"](features.to(precision.time_mlp))
        time = self.time_embed["linear_2"](F.gelu(hidden, approximate="tanh"))[:, None]
        rows = self.time_mod_proj(F.gelu(time, approximate="tanh").to(precision.modulation))
        lengths = [[len(x) for x in samples] for samples in (patches, inputs.text)]
        return Krea2TextCarry(
            image=image.to(precision.entry),
            text=text.to(precision.entry),
            time=time,
            modulation=rows.unflatten(-1, (6, -1)),
            rotary=rotary_table(angles[:, :, None], precision.rotary_tables),
            text_mask=padding_mask(lengths[1], device),
            padding_mask=joined_padding_mask(lengths, device),
            grids=grids,
        )

    def _angles(
        self, grid: Grid, num_image: int, num_text: int, device: torch.device
    ) -> Float[Tensor, "tokens pairs"]:
        """Angles of image, then caption; 0 on the image's padding, and for the caption, which has
        no positions."""
        arch = self.arch
        axes = (torch.arange(size, device=device) for size in (1, *grid))
        positions = torch.cartesian_prod(*axes)
        parts = [
            axis_angles(positions[:, axis], size // 2, arch.theta)
            for axis, size in enumerate(arch.axes)
        ]
        return F.pad(torch.cat(parts, -1), (0, 0, 0, num_image - len(positions) + num_text))


class Krea2Attention(nn.Module):
    """Attention whose result passes a gate that its input opens; several heads of queries share one
    of keys and values."""

    def __init__(self, dim: int, heads: int, kv_heads: int, eps: float, precision: Precision):
        super().__init__()
        self.heads, self.kv_heads, self.precision = heads, kv_heads, precision
        head_dim = dim // heads
        self.to_q, self.to_gate = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.to_k, self.to_v = (nn.Linear(dim, kv_heads * head_dim, bias=False) for _ in range(2))
        self.to_out = nn.Sequential(nn.Linear(dim, dim, bias=False))
        self.norm_q, self.norm_k = (OffsetNorm(head_dim, eps) for _ in range(2))

    def forward(
        self,
        h: Float[Tensor, "*batch tokens dim"],
        rotary: Tensor | None,
        mask: Tensor | None,
        name: str,
    ) -> Float[Tensor, "*batch tokens dim"]:
        precision = self.precision
        q, k, v = (to(h).flatten(0, -3) for to in (self.to_q, self.to_k, self.to_v))
        q = normalised_heads(q, self.norm_q, self.heads, precision, rotary)
        k = normalised_heads(k, self.norm_k, self.kv_heads, precision, rotary)
        v = v.unflatten(-1, (self.kv_heads, -1)).to(precision.attention)
        # Not every backend, and no exchange between ranks, knows fewer heads of keys than of
        # queries.
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 2) for x in (k, v))
        y = attend(q, k, v, name=name, padding_mask=mask).flatten(2).to(precision.matmul)
        return self.to_out(y.view_as(h) * torch.sigmoid(self.to_gate(h)))


class Krea2FeedForward(nn.Module):
    """A gated MLP without its last layer, which blocks call."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, h: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch hidden_dim"]:
        return gated_product(self.gate(h), self.up(h))


class Krea2TextBlock(nn.Module):
    """Attention and MLP of a caption, which no noise level modulates. Its subclasses say what
    attends to what."""

    def __init__(self, arch: Krea2Arch, precision: Precision):
        super().__init__()
        dim, heads = arch.text_dim, (arch.text_heads, arch.text_kv_heads)
        self.dim, self.precision = dim, precision
        self.norm1, self.norm2 = (OffsetNorm(dim, arch.eps) for _ in range(2))
        self.attn = Krea2Attention(dim, *heads, arch.eps, precision)
        self.ff = Krea2FeedForward(dim, arch.text_mlp_dim)

    def run(self, x: Tensor, mask: Tensor | None, name: str) -> Tensor:
        """The stream behind the block."""
        h = normed(self.norm1, x, self.precision)
        x = x.to(self.precision.residual) + self.attn(h, None, mask, name)
        h = normed(self.norm2, x, self.precision)
        return x + recompute_boundary(self.ff.down, self.ff(h))


def normed(
    norm: OffsetNorm, x: Float[Tensor, "*batch tokens dim"], precision: Precision
) -> Float[Tensor, "*batch tokens dim"]:
    """The norm of a stream, rounded to the matmuls' dtype."""
    norms = precision.norms_of(x.dtype)
    factor = norm.weight[None, None].to(norms)
    rows = scaled_norm(x.flatten(0, -3), factor, norm.eps or 0.0, norms, precision.matmul)
    return rows.view(x.shape)


class Krea2LayerwiseBlock(Krea2TextBlock):
    """The layers of each token attend to each other."""

    def forward(self, carry: Krea2TextCarry) -> Krea2TextCarry:
        layers = carry.text.unflatten(-1, (-1, self.dim))
        return carry._replace(text=self.run(layers, None, "layers").flatten(-2))


class Krea2RefinerBlock(Krea2TextBlock):
    """The tokens of a caption attend to each other."""

    def forward(self, carry: Krea2TextCarry) -> Krea2TextCarry:
        return carry._replace(text=self.run(carry.text, carry.text_mask, "text"))


class Krea2Collapse(nn.Module):
    """The layers of each token become one."""

    def __init__(self, arch: Krea2Arch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.projector = nn.Linear(arch.text_layers, 1, bias=False)

    def forward(self, carry: Krea2TextCarry) -> Krea2TextCarry:
        layers = carry.text.unflatten(-1, (self.projector.in_features, -1))
        columns = layers.to(self.precision.matmul).transpose(-1, -2)
        text = recompute_boundary(self.projector, columns).squeeze(-1)
        return carry._replace(text=text.to(self.precision.entry))


class Krea2TextProjection(nn.Module):
    """The caption gets the image's width."""

    def __init__(self, arch: Krea2Arch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.norm = OffsetNorm(arch.text_dim, arch.eps)
        self.linear_1 = nn.Linear(arch.text_dim, arch.dim)
        self.linear_2 = nn.Linear(arch.dim, arch.dim)

    def forward(self, carry: Krea2TextCarry) -> Krea2TextCarry:
        hidden = self.linear_1(normed(self.norm, carry.text, self.precision))
        text = recompute_boundary(self.linear_2, F.gelu(hidden, approximate="tanh"))
        return carry._replace(text=text.to(carry.image.dtype))


class Krea2Join(nn.Module):
    """Two streams become one: image, then caption."""

    def forward(self, carry: Krea2TextCarry) -> Krea2Carry:
        return Krea2Carry(
            tokens=torch.cat([carry.image, carry.text], 1),
            time=carry.time,
            modulation=carry.modulation,
            rotary=carry.rotary,
            padding_mask=carry.padding_mask,
            grids=carry.grids,
        )


class Krea2Block(nn.Module):
    """Attention and MLP of image and caption together."""

    def __init__(self, arch: Krea2Arch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.scale_shift_table = nn.Parameter(torch.zeros(6, arch.dim))
        self.norm1, self.norm2 = (OffsetNorm(arch.dim, arch.eps) for _ in range(2))
        self.attn = Krea2Attention(arch.dim, arch.heads, arch.kv_heads, arch.eps, precision)
        self.ff = Krea2FeedForward(arch.dim, arch.mlp_dim)

    def forward(self, carry: Krea2Carry) -> Krea2Carry:
        precision, x, dtype = self.precision, carry.tokens, self.precision.modulation
        rows = carry.modulation + self.scale_shift_table.to(dtype)
        scale, shift, gate, scale_mlp, shift_mlp, gate_mlp = rows.unbind(2)
        factor, factor_mlp = (
            norm.weight.to(dtype) * (1 + row)
            for norm, row in ((self.norm1, scale), (self.norm2, scale_mlp))
        )
        norms = precision.norms_of(x.dtype)
        h = scaled_norm(x, factor, self.eps, norms, precision.matmul, shift)
        y = self.attn(h, carry.rotary, carry.padding_mask, "self")
        x = gated_sum(y, x.to(precision.residual), gate)
        h = scaled_norm(x, factor_mlp, self.eps, precision.norms, precision.matmul, shift_mlp)
        # A recompute of the block can stop in front of this matmul: its input and gate are all that
        # the backward needs.
        y = recompute_boundary(self.ff.down, self.ff(h), gate_mlp)
        return carry._replace(tokens=gated_sum(y, x, gate_mlp))


class Krea2Head(nn.Module):
    """The last carry to one velocity per sample, from data to noise."""

    def __init__(self, arch: Krea2Arch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.scale_shift_table = nn.Parameter(torch.zeros(2, arch.dim))
        self.norm = OffsetNorm(arch.dim, arch.eps)
        self.linear = CastLinear(arch.dim, PATCH**2 * arch.in_channels)

    def forward(self, carry: Krea2Carry) -> list[Tensor]:
        dtype = self.precision.head
        # The embedded noise level itself, and not the modulation of the blocks.
        rows = carry.time[:, :, None].to(dtype) + self.scale_shift_table.to(dtype)
        scale, shift = rows.unbind(2)
        # The image comes first, so padding behind the longest image and captions are never
        # normalised or projected.
        x = carry.tokens[:, : max(height * width for height, width in carry.grids)]
        factor = self.norm.weight.to(dtype) * (1 + scale)
        patches = self.linear(scaled_norm(x, factor, self.eps, dtype, dtype, shift))
        pattern = "(h w) (c p q) -> c 1 (h p) (w q)"
        return [
            rearrange(row[: height * width], pattern, h=height, p=PATCH, q=PATCH)
            for row, (height, width) in zip(patches, carry.grids, strict=True)
        ]


class Krea2Transformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, noise level and text."""

    def __init__(self, arch: Krea2Arch, precision: Precision):
        super().__init__()
        self.embed = Krea2Embed(arch, precision)
        self.layerwise_blocks = nn.ModuleList(
            Krea2LayerwiseBlock(arch, precision) for _ in range(arch.layerwise_blocks)
        )
        self.collapse = Krea2Collapse(arch, precision)
        self.refiner_blocks = nn.ModuleList(
            Krea2RefinerBlock(arch, precision) for _ in range(arch.refiner_blocks)
        )
        self.txt_in = Krea2TextProjection(arch, precision)
        self.join = Krea2Join()
        self.transformer_blocks = nn.ModuleList(
            Krea2Block(arch, precision) for _ in range(arch.layers)
        )
        self.head = Krea2Head(arch, precision)

    def blocks(self) -> list[nn.Module]:
        text = [*self.layerwise_blocks, self.collapse, *self.refiner_blocks]
        return [*text, self.txt_in, self.join, *self.transformer_blocks]

    def forward(self, inputs: Krea2Inputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
