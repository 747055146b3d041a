"""The Qwen-Image transformer as embed → blocks → head.

Names follow diffusers' `QwenImageTransformer2DModel`, which are the official ones. Caption and image
have weights of their own in each block, and all of their tokens attend to each other. References
share the image's weights; they are a stream of their own, because they may have another noise level.
What the last block would make of caption and references nothing reads, so it leaves that out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.families.references import numbered_tensors
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, PartlyUsed, run_plain
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import gated_sum, modulated_norm, normalised_heads
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import joined_padding_mask
from ditkit_core.nn.remat import recompute_boundaries, recompute_boundary
from ditkit_core.nn.rope import axis_angles, rotary_table, timestep_features
from ditkit_qwenimage.presets import QwenImageArch

PATCH = 2
"""Latent pixels on a side of a token."""
FREQ_DIM, THETA, EPS = 256, 10_000.0, 1e-6
"""Features of the noise level; base of the rotary frequencies; of all norms."""
STREAMS = ("text", "image", "reference")
"""The streams of tokens, in the order in which attention has them."""

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


class QwenImageInputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size."""

    latents: Sequence[Tensor]
    """[channels, 1, height, width] each."""
    sigma: Float[Tensor, " batch"]
    """Noise level from 0 to 1, fp32 or wider."""
    text: Sequence[Tensor]
    """[rows, text_dim] each."""
    references: Sequence[Sequence[Tensor]]
    """Latents of each sample's reference images, in order; may be empty."""


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> QwenImageInputs:
    """Make the model's inputs of noised latents and training items; there is no embedding of
    guidance."""
    device = noised[0].device
    return QwenImageInputs(
        latents=noised,
        sigma=sigma,
        text=[item["text"].to(device) for item in items],
        references=[numbered_tensors(item, "reference", device) for item in items],
    )


def tokens_of(latents: Float[Tensor, "c 1 height width"]) -> Float[Tensor, "tokens channels"]:
    """Squares of latent pixels as the features of a token each, in the order channel, row, column."""
    return rearrange(latents, "c 1 (h p) (w q) -> (h w) (c p q)", p=PATCH, q=PATCH)


def _grid(latents: Tensor) -> Grid:
    return latents.shape[2] // PATCH, latents.shape[3] // PATCH


class QwenImageCarry(NamedTuple):
    """Everything one block hands to the next."""

    text: Float[Tensor, "batch text dim"]
    image: Float[Tensor, "batch image dim"]
    reference: Float[Tensor, "batch reference dim"]
    """All references of a sample, one after the other; no tokens if no sample has one."""
    time: Float[Tensor, "batch times dim"]
    """The embedded noise level behind its activation; a second row is for references, if they
    have another."""
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    """Cosines and sines, side by side, of the streams in their order; `tables` is 1 when all
    samples share a layout."""
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    """False on what pads a sample to the longest; None when all have one size."""
    grids: tuple[Grid, ...]
    """Rows and columns of each sample's image."""


def token_streams(arch: QwenImageArch) -> TokenStreams:
    """Caption, image and references, each divided among ranks by itself. Caption and references
    skip no block."""
    images, last = ("image", "reference"), f"^transformer_blocks.{arch.layers - 1}."
    narrow = ("attn.to_q", "attn.to_out.0", "img_mlp.net.0.proj", "img_mlp.net.2")
    return TokenStreams(
        names=STREAMS,
        fields=lambda carry: {**{name: (name,) for name in STREAMS}, "rotary": STREAMS},
        head=("image",),
        attention=("self", "last"),
        queries={"last": ("image",)},
        inputs={
            "*_mod.1": (),
            **{f"{last}{layer}": ("image",) for layer in narrow},
            **dict.fromkeys(("*.attn.add_*", "*.to_add_out", "*.txt_mlp.*"), ("text",)),
            **dict.fromkeys(("*.attn.to_*", "*.img_mlp.*"), images),
        },
        residual=STREAMS,
        routed="image",
    )


class QwenImageEmbed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: QwenImageArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.img_in = nn.Linear(PATCH**2 * arch.in_channels, arch.dim)
        self.txt_norm = nn.RMSNorm(arch.text_dim, eps=EPS)
        self.txt_in = nn.Linear(arch.text_dim, arch.dim)
        self.timestep_embedder = nn.ModuleDict(
            {"linear_1": CastLinear(FREQ_DIM, arch.dim), "linear_2": CastLinear(arch.dim, arch.dim)}
        )

    def forward(self, inputs: QwenImageInputs) -> QwenImageCarry:
        precision, device = self.precision, inputs.latents[0].device
        tokens = {
            "text": list(inputs.text),
            "image": [tokens_of(latents) for latents in inputs.latents],
            "reference": [
                torch.cat([latents.new_empty(0, self.img_in.in_features), *map(tokens_of, group)])
                for latents, group in zip(inputs.latents, inputs.references, strict=True)
            ],
        }
        lengths = {name: [len(rows) for rows in tokens[name]] for name in STREAMS}
        present = [name for name in STREAMS if any(lengths[name])]
        x = {name: self._layer(name, tokens[name]).to(precision.entry) for name in present}
        layouts = [
            (len(text), (_grid(latents), *map(_grid, group)))
            for text, latents, group in zip(
                inputs.text, inputs.latents, inputs.references, strict=True
            )
        ]
        # One table serves the whole batch where all samples share a layout: it is broadcast instead
        # of stored per sample.
        angles = self._angles(layouts if len(set(layouts)) > 1 else layouts[:1], device)
        levels = [inputs.sigma]
        if self.arch.clean_references and "reference" in present:
            levels.append(torch.zeros_like(inputs.sigma))
        return QwenImageCarry(
            text=x["text"],
            image=x["image"],
            reference=x.get("reference", x["image"][:, :0]),
            time=self._time(torch.stack(levels, 1)),
            rotary=rotary_table(angles, precision.rotary_tables),
            padding_mask=joined_padding_mask([lengths[name] for name in present], device),
            grids=tuple(grids[0] for _, grids in layouts),
        )

    def _layer(self, name: str, tokens: Sequence[Tensor]) -> Float[Tensor, "batch tokens dim"]:
        """A stream, padded to its longest sample, in the model's width."""
        rows, precision = pad_sequence(list(tokens), batch_first=True), self.precision
        if name != "text":
            return self.img_in(rows.to(precision.matmul))
        rows = rows.to(precision.norms)
        weight = self.txt_norm.weight.to(precision.norms)
        normed = F.rms_norm(rows, rows.shape[-1:], weight, EPS)
        return self.txt_in(normed.to(precision.matmul))

    def _time(self, levels: Float[Tensor, "batch times"]) -> Float[Tensor, "batch times dim"]:
        """The embedded noise levels, behind the activation that all readers begin with."""
        precision, dtype = self.precision, self.precision.timestep
        features = timestep_features(1000 * levels.to(dtype), FREQ_DIM, dtype)
        hidden = self.timestep_embedder["linear_1"](features.to(precision.time_mlp))
        time = self.timestep_embedder["linear_2"](F.silu(hidden))
        return F.silu(time.to(precision.modulation))

    def _angles(
        self, layouts: Sequence[tuple[int, tuple[Grid, ...]]], device: torch.device
    ) -> Float[Tensor, "tables tokens 1 pairs"]:
        """Angles of each layout (rows of text; grids of the image and its references): stream by
        stream, 0 on what pads a sample to the longest.

        An image is the frame of its number and has its centre at 0 on the axes of rows and columns.
        Text is behind all images, in the same place on each axis.
        """

        def angles(positions: Tensor) -> Tensor:
            parts = [
                axis_angles(positions[:, axis], size // 2, THETA)
                for axis, size in enumerate(self.arch.axes)
            ]
            return torch.cat(parts, -1)

        def image(frame: int, grid: Grid) -> Tensor:
            axes = [torch.arange(frame, frame + 1, device=device)]
            axes += [torch.arange(size // 2 - size, size // 2, device=device) for size in grid]
            return angles(torch.cartesian_prod(*axes))

        def text(rows: int, grids: Sequence[Grid]) -> Tensor:
            start = max(size // 2 for grid in grids for size in grid)
            positions = torch.arange(start, start + rows, device=device)
            return angles(positions[:, None].expand(-1, 3))

        nothing = torch.zeros(0, sum(self.arch.axes) // 2, device=device, dtype=torch.float64)
        streams = (
            [text(*layout) for layout in layouts],
            [image(0, grids[0]) for _, grids in layouts],
            [
                torch.cat([nothing, *(image(k, grid) for k, grid in enumerate(grids) if k)])
                for _, grids in layouts
            ],
        )
        return torch.cat([pad_sequence(rows, batch_first=True) for rows in streams], 1)[:, :, None]


class QwenImageAttention(nn.Module):
    """Projections and norms of both parts of joint attention: of the caption, whose names have
    `add`, and of images."""

    def __init__(self, arch: QwenImageArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.to_q, self.to_k, self.to_v = (nn.Linear(arch.dim, arch.dim) for _ in range(3))
        self.add_q_proj, self.add_k_proj, self.add_v_proj, self.to_add_out = (
            nn.Linear(arch.dim, arch.dim) for _ in range(4)
        )
        self.to_out = nn.Sequential(nn.Linear(arch.dim, arch.dim))
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = (
            nn.RMSNorm(arch.head_dim, eps=EPS) for _ in range(4)
        )

    def queries(
        self, text: Tensor | None, images: Tensor, rotary: Sequence[Tensor]
    ) -> Float[Tensor, "batch tokens heads head_dim"]:
        """Queries of caption and images, or of images alone."""
        heads, precision = self.heads, self.precision
        q = normalised_heads(self.to_q(images), self.norm_q, heads, precision, rotary[1])
        if text is None:
            return q
        q_text = self.add_q_proj(text)
        q_text = normalised_heads(q_text, self.norm_added_q, heads, precision, rotary[0])
        return torch.cat([q_text, q], 1)

    def keys_and_values(
        self, text: Tensor, images: Tensor, rotary: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, tokens, heads, head_dim] of caption, then images."""
        heads, precision = self.heads, self.precision
        k_text, k = self.add_k_proj(text), self.to_k(images)
        k_text = normalised_heads(k_text, self.norm_added_k, heads, precision, rotary[0])
        k = normalised_heads(k, self.norm_k, heads, precision, rotary[1])
        v = torch.cat([self.add_v_proj(text), self.to_v(images)], 1)
        return torch.cat([k_text, k], 1), v.unflatten(-1, (heads, -1)).to(precision.attention)


class QwenImageFeedForward(nn.Module):
    """An MLP without its last layer, which blocks call."""

    def __init__(self, arch: QwenImageArch):
        super().__init__()
        self.net = nn.ModuleDict(
            {
                "0": nn.ModuleDict({"proj": nn.Linear(arch.dim, 4 * arch.dim)}),
                "2": nn.Linear(4 * arch.dim, arch.dim),
            }
        )

    def forward(self, h: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch hidden"]:
        first: Any = self.net["0"]
        return F.gelu(first["proj"](h), approximate="tanh")


Rows = Sequence[Float[Tensor, "batch 1 dim"]]
"""Modulation of a stream: shift, scale and gate of attention, then of the MLP."""


class _Entry(NamedTuple):
    """What blocks compute up to attention."""

    images: list[Tensor]
    """The image, and references if there are any."""
    text_rows: Rows
    image_rows: list[Rows]
    """Of each of the images."""
    h_text: Tensor
    h_images: Tensor
    """Normalised and modulated, all images one after the other."""
    rotary: Sequence[Tensor]
    """Of caption and images."""


class QwenImageLayer(nn.Module):
    """The weights of a block."""

    def __init__(self, arch: QwenImageArch, precision: Precision):
        super().__init__()
        self.precision = precision
        # A third of all weights: they have the dtype and the format of matmuls, and their results
        # the dtype of modulation.
        self.img_mod, self.txt_mod = (
            nn.ModuleDict({"1": nn.Linear(arch.dim, 6 * arch.dim)}) for _ in range(2)
        )
        self.attn = QwenImageAttention(arch, precision)
        self.img_mlp, self.txt_mlp = (QwenImageFeedForward(arch) for _ in range(2))

    def enter(self, carry: QwenImageCarry) -> _Entry:
        """The part of a block in front of attention."""
        images = [carry.image, *([carry.reference] if carry.reference.shape[1] else [])]
        text_rows = self._rows(self.txt_mod, carry.time[:, :1])[0]
        levels = self._rows(self.img_mod, carry.time)
        image_rows = [levels[0], levels[-1]][: len(images)]
        norms = self.precision.norms_of(carry.image.dtype)
        h_text = self.normed(carry.text, text_rows[:2], norms)
        h_images = [
            self.normed(x, rows[:2], norms) for x, rows in zip(images, image_rows, strict=True)
        ]
        h = torch.cat(h_images, 1) if len(images) > 1 else h_images[0]
        rotary = carry.rotary.split([h_text.shape[1], h.shape[1]], 1)
        return _Entry(images, text_rows, image_rows, h_text, h, rotary)

    def _rows(self, layers: nn.ModuleDict, time: Float[Tensor, "batch times dim"]) -> list[Rows]:
        """Modulation at each noise level."""
        rows = layers["1"](time.to(self.precision.matmul)).to(self.precision.modulation)
        return [level.chunk(6, -1) for level in rows.split(1, 1)]

    def normed(self, x: Tensor, rows: Rows, norms: torch.dtype) -> Tensor:
        """A stream, normalised and modulated by shift and scale."""
        shift, scale = rows
        return modulated_norm(x, scale, shift, EPS, norms, self.precision.matmul)

    def sums(self, y: Tensor, streams: Sequence[Tensor], gates: Sequence[Tensor]) -> list[Tensor]:
        """The streams behind a sub-layer, whose result has them one after the other."""
        parts = y.split([x.shape[1] for x in streams], 1)
        return [
            gated_sum(part, x.to(self.precision.residual), gate)
            for part, x, gate in zip(parts, streams, gates, strict=True)
        ]


class QwenImageBlock(QwenImageLayer):
    """Joint attention over caption, image and references; caption and images have weights and
    modulation of their own for everything else."""

    def forward(self, carry: QwenImageCarry) -> QwenImageCarry:
        attn, precision = self.attn, self.precision
        images, text_rows, image_rows, h_text, h, rotary = self.enter(carry)
        q = attn.queries(h_text, h, rotary)
        k, v = attn.keys_and_values(h_text, h, rotary)
        out = attend(q, k, v, name="self", padding_mask=carry.padding_mask).flatten(2)
        out_text, out = out.to(precision.matmul).split([h_text.shape[1], h.shape[1]], 1)
        (text,) = self.sums(attn.to_add_out(out_text), [carry.text], text_rows[2:3])
        images = self.sums(attn.to_out(out), images, [rows[2] for rows in image_rows])
        h_text = self.txt_mlp(self.normed(text, text_rows[3:5], precision.norms))
        h_images = [
            self.normed(x, rows[3:5], precision.norms)
            for x, rows in zip(images, image_rows, strict=True)
        ]
        h = self.img_mlp(torch.cat(h_images, 1) if len(images) > 1 else h_images[0])
        gates = [rows[5] for rows in image_rows]
        # Both last matmuls at once: a recompute can stop in front of them only if nothing after the
        # first is recomputed.
        last = [(self.txt_mlp.net["2"], h_text), (self.img_mlp.net["2"], h)]
        y_text, y = recompute_boundaries(last, text_rows[5], *gates)
        (text,) = self.sums(y_text, [text], text_rows[5:])
        image, *others = self.sums(y, images, gates)
        return carry._replace(text=text, image=image, reference=[*others, carry.reference][0])


class QwenImageLastBlock(QwenImageLayer, PartlyUsed):
    """A block of the image alone: nothing reads what would become of caption and references."""

    unused = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")

    def forward(self, carry: QwenImageCarry) -> QwenImageCarry:
        attn, precision, length = self.attn, self.precision, carry.image.shape[1]
        _, _, (rows, *_), h_text, h, rotary = self.enter(carry)
        q = attn.queries(None, h[:, :length], [part[:, :length] for part in rotary])
        k, v = attn.keys_and_values(h_text, h, rotary)
        out = attend(q, k, v, name="last", padding_mask=carry.padding_mask).flatten(2)
        (image,) = self.sums(attn.to_out(out.to(precision.matmul)), [carry.image], rows[2:3])
        hidden = self.img_mlp(self.normed(image, rows[3:5], precision.norms))
        y = recompute_boundary(self.img_mlp.net["2"], hidden, rows[5])
        (image,) = self.sums(y, [image], rows[5:])
        return carry._replace(image=image)


class QwenImageHead(nn.Module):
    """The last carry to one velocity per sample, from data to noise; text and references are
    dropped."""

    def __init__(self, arch: QwenImageArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.norm_out = nn.ModuleDict({"linear": CastLinear(arch.dim, 2 * arch.dim)})
        self.proj_out = CastLinear(arch.dim, PATCH**2 * arch.in_channels)

    def forward(self, carry: QwenImageCarry) -> list[Tensor]:
        dtype = self.precision.head
        scale, shift = self.norm_out["linear"](carry.time[:, :1].to(dtype)).chunk(2, -1)
        rows = self.proj_out(modulated_norm(carry.image, scale, shift, EPS, dtype, dtype))
        pattern = "(h w) (c p q) -> c 1 (h p) (w q)"
        return [
            rearrange(row[: height * width], pattern, h=height, p=PATCH, q=PATCH)
            for row, (height, width) in zip(rows, carry.grids, strict=True)
        ]


class QwenImageTransformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, noise level, text and
    references."""

    def __init__(self, arch: QwenImageArch, precision: Precision):
        super().__init__()
        self.embed = QwenImageEmbed(arch, precision)
        kinds = [QwenImageBlock] * (arch.layers - 1) + [QwenImageLastBlock]
        self.transformer_blocks = nn.ModuleList(kind(arch, precision) for kind in kinds)
        self.head = QwenImageHead(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return list(self.transformer_blocks)

    def forward(self, inputs: QwenImageInputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
