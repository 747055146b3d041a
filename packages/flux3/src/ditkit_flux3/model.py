"""The FLUX.3 transformer as embed → text, image and reference towers → joint blocks → head.

Names follow the official ones, as diffusers' converter of `Flux3Transformer2DModel` reads them;
`state_dict.py` has the few that differ. Text, image and references are three streams of tokens. A
tower runs along one of them, a joint block along all three with one set of weights, and each stream
has a modulation of its own in both. Padding of a caption's window takes part; only what pads a
sample to the longest of its batch is masked.

Without references their stream has no tokens: their tower hands the carry on, and their weights
get no gradient.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.families.euler import NEXT_SIGMA
from ditkit_core.families.references import numbered_tensors
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import gated_sum, gated_unit, modulated_norm, normalised_heads
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import joined_padding_mask, padding_mask
from ditkit_core.nn.remat import recompute_boundaries
from ditkit_core.nn.rope import axis_angles, rotary_table, timestep_features
from ditkit_flux3.presets import Flux3Arch

STREAMS = ("text", "image", "reference")
"""The streams of tokens, in the order in which joint attention has them."""
MODES = {"text": "txt", "image": "image", "reference": "image_cond"}
"""The official name of each."""
GRID_STEP = 0.5
"""Distance of neighbouring tokens of an image on the axes of rows and columns."""

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


class Flux3Inputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size."""

    latents: Sequence[Tensor]
    """[channels, 1, height, width] each."""
    sigma: Float[Tensor, " batch"]
    """Noise level from 0 to 1, fp32 or wider."""
    target: Float[Tensor, " batch"]
    """The noise level that the step jumps to, which a flow map is told; others ignore it."""
    text: Sequence[Tensor]
    """[rows, text_dim] each; all rows are attended to."""
    references: Sequence[Sequence[Tensor]]
    """Latents of each sample's reference images, in order; may be empty."""


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> Flux3Inputs:
    """Make the model's inputs of noised latents and training items; there is no embedding of
    guidance.

    A sampler's items have the noise level that its step goes to. In training there is none, and a
    flow map is asked for its velocity at `sigma` itself, the limit of ever shorter jumps: of all
    its outputs the one whose regression target is noise minus data.
    """
    device = noised[0].device
    return Flux3Inputs(
        latents=noised,
        sigma=sigma,
        target=torch.stack(
            [
                item.get(NEXT_SIGMA, level).to(sigma)
                for item, level in zip(items, sigma, strict=True)
            ]
        ),
        text=[item["text"].to(device) for item in items],
        references=[numbered_tensors(item, "reference", device) for item in items],
    )


class Flux3Carry(NamedTuple):
    """Everything one block hands to the next."""

    text: Float[Tensor, "batch text dim"]
    image: Float[Tensor, "batch image dim"]
    reference: Float[Tensor, "batch reference dim"]
    """All references of a sample, one after the other; no tokens if no sample has one."""
    text_modulation: Float[Tensor, "batch 6 dim"]
    """Shift, scale and gate in the tower, then in joint blocks; likewise the other two."""
    image_modulation: Float[Tensor, "batch 6 dim"]
    reference_modulation: Float[Tensor, "batch 6 dim"]
    time: Float[Tensor, "batch dim"]
    """Of the image, for the head."""
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    """Cosines and sines, side by side, of the streams in their order; `tables` is 1 when all
    samples share a layout."""
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    """False on what pads a sample to the longest; None when all have one size. Likewise the other
    masks, each over one stream."""
    text_mask: Bool[Tensor, "batch all_text"] | None
    image_mask: Bool[Tensor, "batch all_image"] | None
    reference_mask: Bool[Tensor, "batch all_reference"] | None
    """True on the first token of a sample without references: attention to nothing is no number,
    and joint attention masks what comes of it."""
    grids: tuple[Grid, ...]
    """Rows and columns of each sample's image."""


TOKEN_STREAMS = TokenStreams(
    names=STREAMS,
    fields=lambda carry: {**{name: (name,) for name in STREAMS}, "rotary": STREAMS},
    head=("image",),
    within={name: (name,) for name in STREAMS},
    inputs={
        "txt_mode_blocks.*": ("text",),
        "content_mode_blocks.image.*": ("image",),
        "content_mode_blocks.image_cond.*": ("reference",),
    },
    masks={"padding_mask": (), **{f"{name}_mask": (name,) for name in STREAMS}},
    residual=STREAMS,
    routed="image",
)
"""Three streams, each divided among ranks by itself: towers run along one of them. Text and
references skip no block."""


class Flux3TimeEmbedder(nn.Module):
    """One number from 0 to 1 per sample, embedded to the model's width."""

    def __init__(self, arch: Flux3Arch):
        super().__init__()
        self.freq_dim = arch.freq_dim
        self.in_layer = CastLinear(arch.freq_dim, arch.dim, bias=False)
        self.out_layer = CastLinear(arch.dim, arch.dim, bias=False)

    def forward(
        self, x: Float[Tensor, " batch"], precision: Precision
    ) -> Float[Tensor, "batch dim"]:
        dtype = precision.timestep
        features = timestep_features(1000 * x.to(dtype), self.freq_dim, dtype)
        return self.out_layer(F.silu(self.in_layer(features.to(precision.time_mlp))))


class Flux3Modulation(nn.Module):
    """Shift, scale and gate of a stream, for all towers or all joint blocks."""

    def __init__(self, arch: Flux3Arch):
        super().__init__()
        self.lin = CastLinear(arch.dim, 3 * arch.dim, bias=False)

    def forward(self, activated: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch 3 dim"]:
        return self.lin(activated).unflatten(-1, (3, -1))


class Flux3Embed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: Flux3Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.emb_in = nn.ModuleDict(
            {MODES[name]: nn.Linear(arch.in_channels, arch.dim, bias=False) for name in STREAMS[1:]}
        )
        self.txt_in = nn.Linear(arch.text_dim, arch.dim, bias=False)
        self.time_in = Flux3TimeEmbedder(arch)
        self.ref_time_in = Flux3TimeEmbedder(arch) if arch.flow_map else None
        self.early_stream_modulations, self.single_stream_modulations = (
            nn.ModuleDict({mode: Flux3Modulation(arch) for mode in MODES.values()})
            for _ in range(2)
        )

    def forward(self, inputs: Flux3Inputs) -> Flux3Carry:
        precision, device = self.precision, inputs.latents[0].device
        streams = {
            "text": list(inputs.text),
            "image": [_tokens(latents) for latents in inputs.latents],
            "reference": [
                torch.cat([latents.new_empty(0, len(latents)), *map(_tokens, group)])
                for latents, group in zip(inputs.latents, inputs.references, strict=True)
            ],
        }
        lengths = {name: [len(rows) for rows in streams[name]] for name in STREAMS}
        # Without references their tokens are not embedded: no gradient instead of zeros.
        present = [name for name in STREAMS if any(lengths[name])]
        time = self._times(inputs)
        x = {
            name: self._layer(name)(
                pad_sequence(streams[name], batch_first=True).to(precision.matmul)
            ).to(precision.entry)
            for name in present
        }
        # Called without references too: ranks gather these weights, and all have to.
        activated = F.silu(time.to(precision.modulation))
        modulation = {
            name: torch.cat(
                [
                    heads[MODES[name]](activated[int(name == "image")])
                    for heads in (self.early_stream_modulations, self.single_stream_modulations)
                ],
                1,
            )
            for name in STREAMS
        }
        masks = {name: padding_mask(lengths[name], device) for name in present}
        if "reference" in present and 0 in lengths["reference"]:
            masks["reference"] = padding_mask([max(1, n) for n in lengths["reference"]], device)
        layouts = [
            (len(text), _grid(latents), tuple(map(_grid, group)))
            for text, latents, group in zip(
                inputs.text, inputs.latents, inputs.references, strict=True
            )
        ]
        # One table serves the whole batch where all samples share a layout: it is broadcast instead
        # of stored per sample.
        angles = self._angles(layouts if len(set(layouts)) > 1 else layouts[:1], device)
        return Flux3Carry(
            text=x["text"],
            image=x["image"],
            reference=x.get("reference", x["image"][:, :0]),
            text_modulation=modulation["text"],
            image_modulation=modulation["image"],
            reference_modulation=modulation["reference"],
            time=time[1],
            rotary=rotary_table(angles, precision.rotary_tables),
            padding_mask=joined_padding_mask([lengths[name] for name in present], device),
            text_mask=masks["text"],
            image_mask=masks["image"],
            reference_mask=masks.get("reference"),
            grids=tuple(grid for _, grid, _ in layouts),
        )

    def _layer(self, name: str) -> nn.Module:
        return self.txt_in if name == "text" else self.emb_in[MODES[name]]

    def _times(self, inputs: Flux3Inputs) -> Float[Tensor, "2 batch dim"]:
        """The embedded noise level of text and references, which is 0, and of the image."""
        sigma = inputs.sigma
        both = torch.cat([torch.zeros_like(sigma), sigma])
        time = self.time_in(both, self.precision).unflatten(0, (2, -1))
        if self.ref_time_in is None:
            return time
        return time + self.ref_time_in(inputs.target, self.precision)

    def _angles(
        self, layouts: Sequence[tuple[int, Grid, tuple[Grid, ...]]], device: torch.device
    ) -> Float[Tensor, "tables tokens 1 pairs"]:
        """Angles of each layout (rows of text, the image's grid, the references' grids): stream by
        stream, 0 on what pads a sample to the longest."""

        def rotated(index: float, rows: int, columns: int, last: int = 1) -> Tensor:
            """Angles of a grid at (0, row, column, index …)."""
            axes = (
                torch.zeros(1, device=device, dtype=torch.float64),
                torch.arange(rows, device=device).double() * GRID_STEP,
                torch.arange(columns, device=device).double() * GRID_STEP,
                torch.arange(last, device=device).double() + index,
            )
            positions = torch.cartesian_prod(*axes)
            parts = [
                axis_angles(positions[:, axis], size // 2, self.arch.theta)
                for axis, size in enumerate(self.arch.axes)
            ]
            return torch.cat(parts, -1)

        pairs = sum(self.arch.axes) // 2
        nothing = torch.zeros(0, pairs, device=device, dtype=torch.float64)
        streams = (
            [rotated(0, 1, 1, rows) for rows, _, _ in layouts],
            [rotated(0, *grid) for _, grid, _ in layouts],
            [
                torch.cat([nothing, *(rotated(-1 - k, *grid) for k, grid in enumerate(group))])
                for _, _, group in layouts
            ],
        )
        return torch.cat([pad_sequence(rows, batch_first=True) for rows in streams], 1)[:, :, None]


def _tokens(latents: Tensor) -> Float[Tensor, "tokens channels"]:
    return rearrange(latents, "c 1 h w -> (h w) c")


def _grid(latents: Tensor) -> Grid:
    return latents.shape[2], latents.shape[3]


class Flux3QKNorm(nn.Module):
    """The norms of q and k, each over one head."""

    def __init__(self, arch: Flux3Arch):
        super().__init__()
        self.query_norm, self.key_norm = (nn.RMSNorm(arch.head_dim, eps=arch.eps) for _ in range(2))


class Flux3Layer(nn.Module):
    """Attention and gated MLP of one modulated norm, added to the stream by one gate. Its
    subclasses say which streams it runs along."""

    def __init__(self, arch: Flux3Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.q_proj, self.k_proj, self.v_proj, self.attn_out = (
            nn.Linear(arch.dim, arch.dim, bias=False) for _ in range(4)
        )
        self.norm = Flux3QKNorm(arch)
        self.mlp_in = nn.Linear(arch.dim, 2 * arch.mlp_dim, bias=False)
        self.mlp_out = nn.Linear(arch.mlp_dim, arch.dim, bias=False)

    def run(
        self,
        carry: Flux3Carry,
        names: Sequence[str],
        rows: slice,
        rotary: Tensor,
        mask: Tensor | None,
        call: str,
    ) -> Flux3Carry:
        """The carry behind the layer, which runs along these streams together with these rows of
        their modulations."""
        arch, precision, heads = self.arch, self.precision, self.arch.heads
        streams = [getattr(carry, name) for name in names]
        modulations = [
            getattr(carry, f"{name}_modulation")[:, None, rows].unbind(2) for name in names
        ]
        norms = precision.norms_of(streams[0].dtype)
        parts = [
            modulated_norm(x, scale, shift, arch.eps, norms, precision.matmul)
            for x, (shift, scale, _) in zip(streams, modulations, strict=True)
        ]
        h = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        q = normalised_heads(self.q_proj(h), self.norm.query_norm, heads, precision, rotary)
        k = normalised_heads(self.k_proj(h), self.norm.key_norm, heads, precision, rotary)
        v = self.v_proj(h).unflatten(-1, (heads, -1)).to(precision.attention)
        out = attend(q, k, v, name=call, padding_mask=mask).flatten(2).to(precision.matmul)
        hidden = gated_unit(self.mlp_in(h))
        attended, y = recompute_boundaries([(self.attn_out, out), (self.mlp_out, hidden)])
        sums = (attended + y).split([x.shape[1] for x in streams], 1)
        advanced: dict[str, Any] = {
            name: gated_sum(part, x.to(precision.residual), gate)
            for name, part, x, (_, _, gate) in zip(names, sums, streams, modulations, strict=True)
        }
        return carry._replace(**advanced)


class Flux3TextTower(Flux3Layer):
    """A block of the text alone. A class for each stream: plans take blocks of one class to be
    alike."""

    stream: ClassVar[str] = "text"

    def forward(self, carry: Flux3Carry) -> Flux3Carry:
        lengths = [getattr(carry, name).shape[1] for name in STREAMS]
        if not lengths[index := STREAMS.index(self.stream)]:
            return carry
        rotary = carry.rotary.split(lengths, 1)[index]
        mask = getattr(carry, f"{self.stream}_mask")
        return self.run(carry, (self.stream,), slice(0, 3), rotary, mask, self.stream)


class Flux3ImageTower(Flux3TextTower):
    """A block of the image alone."""

    stream = "image"


class Flux3ReferenceTower(Flux3TextTower):
    """A block of a sample's references alone, all of them together."""

    stream = "reference"


class Flux3Block(Flux3Layer):
    """A block of text, image and references together."""

    def forward(self, carry: Flux3Carry) -> Flux3Carry:
        names = [name for name in STREAMS if getattr(carry, name).shape[1]]
        return self.run(carry, names, slice(3, 6), carry.rotary, carry.padding_mask, "self")


class Flux3Head(nn.Module):
    """The last carry to one velocity per sample; text and references are dropped."""

    def __init__(self, arch: Flux3Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.linear = CastLinear(arch.dim, arch.in_channels, bias=False)
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), CastLinear(arch.dim, 2 * arch.dim, bias=False)
        )

    def forward(self, carry: Flux3Carry) -> list[Tensor]:
        dtype = self.precision.head
        shift, scale = self.adaLN_modulation(carry.time.to(dtype))[:, None].chunk(2, -1)
        rows = self.linear(modulated_norm(carry.image, scale, shift, self.arch.eps, dtype, dtype))
        return [
            rearrange(row[: height * width], "(h w) c -> c 1 h w", h=height)
            for row, (height, width) in zip(rows, carry.grids, strict=True)
        ]


class Flux3Transformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, noise level, text and
    references."""

    def __init__(self, arch: Flux3Arch, precision: Precision):
        super().__init__()
        self.embed = Flux3Embed(arch, precision)
        towers = range(arch.tower_layers)
        self.txt_mode_blocks = nn.ModuleList(Flux3TextTower(arch, precision) for _ in towers)
        self.content_mode_blocks = nn.ModuleDict(
            {
                MODES[tower.stream]: nn.ModuleList(tower(arch, precision) for _ in towers)
                for tower in (Flux3ImageTower, Flux3ReferenceTower)
            }
        )
        self.single_blocks = nn.ModuleList(Flux3Block(arch, precision) for _ in range(arch.layers))
        self.head = Flux3Head(arch, precision)

    def blocks(self) -> list[nn.Module]:
        contents: Any = self.content_mode_blocks.values()
        towers = [*self.txt_mode_blocks, *chain.from_iterable(contents)]
        return [*towers, *self.single_blocks]

    def forward(self, inputs: Flux3Inputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
