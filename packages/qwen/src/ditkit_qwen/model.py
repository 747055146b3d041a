"""The Qwen-Image 2.1 transformer as embed → blocks → head, for text to image and for edits.

Names follow diffusers' `QwenImage21Transformer2DModel`; `state_dict.py` has those that differ.
Two streams of tokens have one set of weights: the image, and a prefix, which is the caption with
references where its text has them. The prefix is modulated as at noise level 0 and attends to
itself alone, each token to those before it, and tokens of a reference to each other; so nothing of
it depends on the image. The image attends to both.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.errors import UserError
from ditkit_core.families.references import numbered_tensors
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.nn.attention.attention import Blocks, attend
from ditkit_core.nn.functional import gated_sum, modulated_norm, normalised_heads
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import joined_padding_mask
from ditkit_core.nn.remat import recompute_boundary
from ditkit_core.nn.rms_norms import OffsetNorm, gated_product
from ditkit_core.nn.rope import axis_angles, rotary_table, timestep_features
from ditkit_qwen.presets import QwenArch

STREAMS = ("prefix", "image")
"""The streams of tokens, in the order in which the image's attention has their keys. The prefix is
the caption, with references where its text has them."""
FREQ_DIM, THETA = 256, 10_000.0
"""Features of the noise level; base of the rotary frequencies."""

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


class QwenInputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size."""

    latents: Sequence[Tensor]
    """[channels, 1, height, width] each."""
    sigma: Float[Tensor, " batch"]
    """Noise level from 0 to 1, fp32 or wider."""
    text: Sequence[Sequence[Tensor]]
    """[rows, text_dim] in front of each reference, and behind the last one."""
    references: Sequence[Sequence[Tensor]]
    """Latents of each sample's references, in order; may be empty."""


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> QwenInputs:
    """Make the model's inputs of noised latents and training items; there is no embedding of
    guidance."""
    device = noised[0].device
    references = [numbered_tensors(item, "reference", device) for item in items]
    text = [[*numbered_tensors(item, "text", device), item["text"].to(device)] for item in items]
    for parts, group in zip(text, references, strict=True):
        if len(parts) != len(group) + 1:
            raise UserError(
                f"a caption that was encoded with {len(parts) - 1} references is used with "
                f"{len(group)}: encode it with those of its sample"
            )
    return QwenInputs(noised, sigma, text, references)


class Layout(NamedTuple):
    """Where a sample's tokens are."""

    text: tuple[int, ...]
    """Rows of text in front of each reference, and behind the last one."""
    references: tuple[Grid, ...]
    image: Grid

    @property
    def blocks(self) -> Blocks:
        """The tokens of the prefix that are a reference's."""
        stretches, behind = [], 0
        for rows, grid in zip(self.text, self.references, strict=False):
            start = behind + rows
            behind = start + prod(grid)
            stretches.append((start, behind))
        return tuple(stretches)

    @property
    def prefix(self) -> int:
        """Number of tokens of the prefix."""
        return sum(self.text) + sum(map(prod, self.references))


class QwenCarry(NamedTuple):
    """Everything one block hands to the next."""

    prefix: Float[Tensor, "batch prefix dim"]
    image: Float[Tensor, "batch image dim"]
    prefix_modulation: Float[Tensor, "batch 4 dim"]
    """Scale and gate of attention, then of the MLP, the same for all blocks; the gates are behind
    their tanh."""
    image_modulation: Float[Tensor, "batch 4 dim"]
    time: Float[Tensor, "batch dim"]
    """Of the image, for the head."""
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    """Cosines and sines, side by side, of prefix, then image; `tables` is 1 when all samples share
    a layout."""
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    """False on what pads a sample to the longest; None when all have one size."""
    layouts: tuple[Layout, ...]
    """Of each sample."""


TOKEN_STREAMS = TokenStreams(
    names=STREAMS,
    fields=lambda carry: {**{name: (name,) for name in STREAMS}, "rotary": STREAMS},
    head=("image",),
    within={"prefix": ("prefix",)},
    queries={"self": ("image",)},
    residual=STREAMS,
    routed="image",
)
"""Prefix and image, each divided among ranks by itself. The prefix skips no block."""


class QwenEmbed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: QwenArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.img_in = nn.Linear(arch.in_channels, arch.dim, bias=False)
        self.txt_in = nn.ModuleDict(
            {
                "text_norm": OffsetNorm(arch.text_dim, arch.eps),
                "in_layer": nn.Linear(arch.text_dim, arch.dim, bias=False),
                "out_layer": nn.Linear(arch.dim, arch.dim, bias=False),
            }
        )
        self.timestep_embedder = nn.ModuleDict(
            {
                "linear_1": CastLinear(FREQ_DIM, arch.dim, bias=False),
                "linear_2": CastLinear(arch.dim, arch.dim, bias=False),
            }
        )
        self.modulation = CastLinear(arch.dim, 4 * arch.dim, bias=False)

    def forward(self, inputs: QwenInputs) -> QwenCarry:
        precision, device = self.precision, inputs.latents[0].device
        layouts = tuple(map(_layout, inputs.text, inputs.references, inputs.latents))
        # References in front: their tokens and the image's have one layer.
        images = zip(inputs.references, inputs.latents, strict=True)
        tokens = [torch.cat([*map(_tokens, group), _tokens(x)]) for group, x in images]
        image = self.img_in(pad_sequence(tokens, batch_first=True).to(precision.matmul))
        text = self._text(pad_sequence([torch.cat([*x]) for x in inputs.text], batch_first=True))
        prefix = text
        if any(inputs.references):
            behind = [prod(layout.image) for layout in layouts]
            parts = zip(text, image, layouts, strict=True)
            prefix = pad_sequence([_prefix(*part) for part in parts], batch_first=True)
            rows = zip(image, map(len, tokens), behind, strict=True)
            image = pad_sequence([x[end - n : end] for x, end, n in rows], batch_first=True)
        lengths = [[x.prefix for x in layouts], [prod(x.image) for x in layouts]]
        # One table serves the whole batch where all samples share a layout: it is broadcast instead
        # of stored per sample.
        angles = [
            self._angles(layout, prefix.shape[1], image.shape[1], device)
            for layout in (layouts if len(set(layouts)) > 1 else layouts[:1])
        ]
        times = [self._time(level) for level in (torch.zeros_like(inputs.sigma), inputs.sigma)]
        modulations = [self._modulation(time) for time in times]
        return QwenCarry(
            prefix=prefix.to(precision.entry),
            image=image.to(precision.entry),
            prefix_modulation=modulations[0],
            image_modulation=modulations[1],
            time=times[1],
            rotary=rotary_table(torch.stack(angles)[:, :, None], precision.rotary_tables),
            padding_mask=joined_padding_mask(lengths, device),
            layouts=layouts,
        )

    def _text(self, text: Float[Tensor, "batch text text_dim"]) -> Float[Tensor, "batch text dim"]:
        precision, norm = self.precision, cast(OffsetNorm, self.txt_in["text_norm"])
        x = text.to(precision.norms)
        x = F.rms_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.eps)
        hidden = self.txt_in["in_layer"](x.to(precision.matmul))
        return self.txt_in["out_layer"](F.gelu(hidden, approximate="tanh"))

    def _time(self, sigma: Float[Tensor, " batch"]) -> Float[Tensor, "batch dim"]:
        """The embedded noise level."""
        dtype = self.precision.timestep
        features = timestep_features(1000 * sigma.to(dtype), FREQ_DIM, dtype)
        hidden = self.timestep_embedder["linear_1"](features.to(self.precision.time_mlp))
        return self.timestep_embedder["linear_2"](F.silu(hidden))

    def _modulation(self, time: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch 4 dim"]:
        rows = self.modulation(F.silu(time.to(self.precision.modulation))).chunk(4, -1)
        # scale, gate, scale, gate
        return torch.stack([row.tanh() if index % 2 else row for index, row in enumerate(rows)], 1)

    def _angles(
        self, layout: Layout, num_prefix: int, num_image: int, device: torch.device
    ) -> Float[Tensor, "tokens pairs"]:
        """Angles of prefix, then image; 0 on what pads them.

        A token of text has its place on all three axes. An image is behind the text before it on
        the first one, and has its centre at 0 on the others; text goes on behind its longer side.
        """

        def text(start: int, rows: int) -> Tensor:
            return torch.arange(start, start + rows, device=device)[:, None].expand(-1, 3)

        def image(start: int, grid: Grid) -> Tensor:
            sides = ((start, start + 1), *((size // 2 - size, size // 2) for size in grid))
            return torch.cartesian_prod(*(torch.arange(*side, device=device) for side in sides))

        begin, positions = 0, list[Tensor]()
        for rows, grid in zip(layout.text, (*layout.references, layout.image), strict=True):
            positions += [text(begin, rows), image(begin + rows, grid)]
            begin += rows + max(grid)
        *caption, last = positions
        streams = []
        for coordinates, length in ((torch.cat(caption), num_prefix), (last, num_image)):
            parts = [
                axis_angles(coordinates[:, axis], size // 2, THETA)
                for axis, size in enumerate(self.arch.axes)
            ]
            streams.append(F.pad(torch.cat(parts, -1), (0, 0, 0, length - len(coordinates))))
        return torch.cat(streams)


def _tokens(latents: Tensor) -> Float[Tensor, "tokens channels"]:
    return rearrange(latents, "c 1 h w -> (h w) c")


def _layout(text: Sequence[Tensor], references: Sequence[Tensor], latents: Tensor) -> Layout:
    *grids, image = [(x.shape[2], x.shape[3]) for x in (*references, latents)]
    return Layout(tuple(map(len, text)), tuple(grids), image)


def _prefix(
    text: Float[Tensor, "rows dim"], images: Float[Tensor, "pixels dim"], layout: Layout
) -> Float[Tensor, "tokens dim"]:
    """A sample's text with its references between it; more rows may be behind both."""
    parts = text.split([*layout.text, len(text) - sum(layout.text)])
    sizes = [prod(grid) for grid in layout.references]
    references = images.split([*sizes, len(images) - sum(sizes)])
    between = chain.from_iterable(zip(parts, references[:-1], strict=False))
    return torch.cat([*between, parts[len(sizes)]])


class QwenAttention(nn.Module):
    """Attention of the prefix among itself, each token to those before it and to its reference, and
    of the image to both."""

    def __init__(self, arch: QwenArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(arch.dim, arch.dim, bias=False) for _ in range(3)
        )
        self.to_out = nn.Sequential(nn.Linear(arch.dim, arch.dim, bias=False))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.head_dim, eps=arch.eps) for _ in range(2))

    def forward(
        self,
        h: Float[Tensor, "batch tokens dim"],
        rotary: Tensor,
        mask: Tensor | None,
        num_prefix: int,
        blocks: Sequence[Blocks],
    ) -> Float[Tensor, "batch tokens dim"]:
        precision = self.precision
        q = normalised_heads(self.to_q(h), self.norm_q, self.heads, precision, rotary)
        k = normalised_heads(self.to_k(h), self.norm_k, self.heads, precision, rotary)
        v = self.to_v(h).unflatten(-1, (self.heads, -1)).to(precision.attention)
        # What pads a prefix is behind it: no mask hides it from a token in front of it.
        parts = [x[:, :num_prefix] for x in (q, k, v)]
        prefix = attend(*parts, name="prefix", causal=True, blocks=blocks)
        image = attend(q[:, num_prefix:], k, v, name="self", padding_mask=mask)
        return self.to_out(torch.cat([prefix, image], 1).flatten(2).to(precision.matmul))


class QwenFeedForward(nn.Module):
    """A gated MLP without its last layer, which blocks call."""

    def __init__(self, arch: QwenArch):
        super().__init__()
        hidden = arch.mlp_ratio * arch.dim
        self.proj, self.gate_layer = (nn.Linear(arch.dim, hidden, bias=False) for _ in range(2))
        self.out = nn.Linear(hidden, arch.dim, bias=False)

    def forward(self, h: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch hidden"]:
        return gated_product(self.gate_layer(h), self.proj(h))


class QwenBlock(nn.Module):
    """Attention and MLP of both streams, which are modulated apart."""

    def __init__(self, arch: QwenArch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.attn, self.img_mlp = QwenAttention(arch, precision), QwenFeedForward(arch)

    def forward(self, carry: QwenCarry) -> QwenCarry:
        precision = self.precision
        streams = [carry.prefix, carry.image]
        modulations = [
            rows[:, None].unbind(2) for rows in (carry.prefix_modulation, carry.image_modulation)
        ]
        norms, num_prefix = precision.norms_of(carry.image.dtype), carry.prefix.shape[1]
        h = self._normed(streams, [scale for scale, _, _, _ in modulations], norms)
        blocks = [layout.blocks for layout in carry.layouts]
        y = self.attn(h, carry.rotary, carry.padding_mask, num_prefix, blocks)
        streams = [x.to(precision.residual) for x in streams]
        streams = _sums(y, streams, [gate for _, gate, _, _ in modulations])
        h = self._normed(streams, [scale for _, _, scale, _ in modulations], precision.norms)
        gates = [gate for _, _, _, gate in modulations]
        # A recompute of the block can stop in front of this matmul: its input is all that the
        # backward needs.
        y = recompute_boundary(self.img_mlp.out, self.img_mlp(h))
        prefix, image = _sums(y, streams, gates)
        return carry._replace(prefix=prefix, image=image)

    def _normed(
        self, streams: Sequence[Tensor], scales: Sequence[Tensor], norms: torch.dtype
    ) -> Float[Tensor, "batch tokens dim"]:
        """Prefix, then image, normalised and scaled; there is no shift."""
        matmul = self.precision.matmul
        parts = [
            modulated_norm(x, scale, torch.zeros_like(scale), self.eps, norms, matmul)
            for x, scale in zip(streams, scales, strict=True)
        ]
        return torch.cat(parts, 1)


def _sums(y: Tensor, streams: Sequence[Tensor], gates: Sequence[Tensor]) -> list[Tensor]:
    """The streams behind a sub-layer, whose result is prefix, then image."""
    parts = y.split([x.shape[1] for x in streams], 1)
    return [gated_sum(part, x, gate) for part, x, gate in zip(parts, streams, gates, strict=True)]


class QwenHead(nn.Module):
    """The last carry to one velocity per sample, from data to noise; the prefix is dropped."""

    def __init__(self, arch: QwenArch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.norm_out = nn.ModuleDict({"linear": CastLinear(arch.dim, arch.dim, bias=False)})
        self.proj_out = CastLinear(arch.dim, arch.in_channels, bias=False)

    def forward(self, carry: QwenCarry) -> list[Tensor]:
        dtype = self.precision.head
        scale = self.norm_out["linear"](F.silu(carry.time.to(dtype)))[:, None]
        shift = torch.zeros_like(scale)
        rows = self.proj_out(modulated_norm(carry.image, scale, shift, self.eps, dtype, dtype))
        return [
            rearrange(row[: prod(image)], "(h w) c -> c 1 h w", h=image[0])
            for row, (_, _, image) in zip(rows, carry.layouts, strict=True)
        ]


class QwenTransformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, noise level, text and
    references."""

    def __init__(self, arch: QwenArch, precision: Precision):
        super().__init__()
        self.embed = QwenEmbed(arch, precision)
        self.transformer_blocks = nn.ModuleList(
            QwenBlock(arch, precision) for _ in range(arch.layers)
        )
        self.head = QwenHead(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return list(self.transformer_blocks)

    def forward(self, inputs: QwenInputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
