"""The Z-Image transformer as embed → noise refiners → context refiners → join → blocks → head.

Names follow Tongyi-MAI/Z-Image, src/zimage/transformer.py, and diffusers'
`ZImageTransformer2DModel`; `state_dict.py` has the few that differ. Image and caption are padded to
multiples of 32 with learned tokens that take part in attention; only what pads a sample to the
longest of its batch is masked. The refiners run along one of both, the blocks behind the join along
image, then caption.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import normalised_heads
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import joined_padding_mask, padding_mask
from ditkit_core.nn.rms_norms import gated_product, normed_sum, scaled_norm
from ditkit_core.nn.rope import axis_angles, rotary_table, timestep_features
from ditkit_zimage.presets import ZImageArch

PATCH = 2
"""Latent pixels on a side of a token."""
MULTIPLE = 32
"""Image and caption have a multiple of this many tokens each."""
TEXT_TOKENS = 512
"""Most tokens of a caption, with its template."""
FREQ_DIM, TIME_HIDDEN = 256, 1024
"""Features of the noise level, and width between the two layers that embed it: the same in any
architecture."""
HEAD_EPS = 1e-6

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


class ZImageInputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size."""

    latents: Sequence[Tensor]
    """[channels, 1, height, width] each."""
    sigma: Float[Tensor, " batch"]
    """Noise level from 0 to 1, fp32 or wider."""
    text: Sequence[Tensor]
    """[rows, text_dim] each, a multiple of `MULTIPLE` rows."""
    text_mask: Sequence[Tensor]
    """[rows] each: False where the padding token takes the place of a row."""


def with_padded_text(item: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An item whose `text` [rows, text_dim] has a multiple of `MULTIPLE` rows, and a `text_mask`
    that is False on padding.

    Not in `embed`: captions then come in a few lengths, which a replay of a micro-batch depends on.
    """
    if "text_mask" in item:
        return dict(item)
    text = item["text"]
    missing = -len(text) % MULTIPLE
    mask = torch.arange(len(text) + missing, device=text.device) < len(text)
    return {**item, "text": F.pad(text, (0, 0, 0, missing)), "text_mask": mask}


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> ZImageInputs:
    """Make the model's inputs of noised latents and training items; Z-Image has no embedding of
    guidance."""
    device, padded = noised[0].device, [with_padded_text(item) for item in items]
    text, mask = ([item[name].to(device) for item in padded] for name in ("text", "text_mask"))
    return ZImageInputs(noised, sigma, text, mask)


def num_tokens(item: Mapping[str, Tensor]) -> int:
    """Number of tokens: rows of text and patches of the image, each with its padding."""
    height, width = item["latents"].shape[2:]
    image, text = height // PATCH * (width // PATCH), len(item["text"])
    return image + text + -image % MULTIPLE + -text % MULTIPLE


class ZImageRefinerCarry(NamedTuple):
    """Everything one block hands to the next before the join."""

    image: Float[Tensor, "batch image dim"]
    caption: Float[Tensor, "batch caption dim"]
    time: Float[Tensor, "batch time_dim"]
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    """Cosines and sines, side by side, of image, then caption; `tables` is 1 when all samples share
    a layout."""
    image_mask: Bool[Tensor, "batch all_image"] | None
    """False on what pads a sample to the longest; None when all have one length. Likewise the other
    two masks."""
    caption_mask: Bool[Tensor, "batch all_caption"] | None
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    grids: tuple[Grid, ...]
    """Rows and columns of each sample's tokens."""


class ZImageCarry(NamedTuple):
    """Everything one block hands to the next after the join."""

    tokens: Float[Tensor, "batch tokens dim"]
    """Image, then caption."""
    time: Float[Tensor, "batch time_dim"]
    rotary: Float[Tensor, "tables tokens 1 pairs 2"]
    padding_mask: Bool[Tensor, "batch all_tokens"] | None
    grids: tuple[Grid, ...]


def _token_fields(carry: ZImageRefinerCarry | ZImageCarry) -> dict[str, tuple[str, ...]]:
    both = ("image", "caption")
    if isinstance(carry, ZImageCarry):
        return {"tokens": both, "rotary": both}
    return {"image": ("image",), "caption": ("caption",), "rotary": both}


TOKEN_STREAMS = TokenStreams(
    names=("image", "caption"),
    fields=_token_fields,
    within={"image": ("image",), "caption": ("caption",)},
    inputs={
        "adaLN_modulation.0": (),
        "noise_refiner.*": ("image",),
        "context_refiner.*": ("caption",),
    },
    masks={"padding_mask": (), "image_mask": ("image",), "caption_mask": ("caption",)},
    residual=("image", "caption", "tokens"),
    routed="image",
)
"""Image and caption, each divided among ranks by itself: the refiners run along one of them. The
caption skips no block."""


class ZImageEmbed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: ZImageArch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.x_embedder = nn.Linear(PATCH**2 * arch.in_channels, arch.dim)
        self.cap_embedder = nn.Sequential(
            nn.RMSNorm(arch.text_dim, eps=arch.eps), nn.Linear(arch.text_dim, arch.dim)
        )
        layers = (
            CastLinear(FREQ_DIM, TIME_HIDDEN),
            nn.SiLU(),
            CastLinear(TIME_HIDDEN, arch.time_dim),
        )
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(*layers)})
        self.x_pad_token, self.cap_pad_token = (
            nn.Parameter(torch.zeros(1, arch.dim)) for _ in range(2)
        )

    def forward(self, inputs: ZImageInputs) -> ZImageRefinerCarry:
        precision, device = self.precision, inputs.latents[0].device
        grids = tuple((x.shape[2] // PATCH, x.shape[3] // PATCH) for x in inputs.latents)
        patches = [_patches(x).to(precision.matmul) for x in inputs.latents]
        is_patch = [
            torch.arange(len(rows), device=device) < height * width
            for rows, (height, width) in zip(patches, grids, strict=True)
        ]
        image = self.x_embedder(pad_sequence(patches, batch_first=True)).to(precision.entry)
        norm, linear = cast(nn.RMSNorm, self.cap_embedder[0]), self.cap_embedder[1]
        text = pad_sequence(list(inputs.text), batch_first=True).to(precision.norms)
        text = F.rms_norm(text, norm.normalized_shape, norm.weight.to(text.dtype), norm.eps)
        caption = linear(text.to(precision.matmul)).to(precision.entry)
        lengths = [[len(rows) for rows in samples] for samples in (patches, inputs.text)]
        # One table serves the whole batch where all samples share a layout: it is broadcast instead
        # of stored per sample.
        layouts = list(zip(grids, lengths[1], strict=True))
        angles = self._angles(
            layouts if len(set(layouts)) > 1 else layouts[:1],
            image.shape[1],
            caption.shape[1],
            device,
        )
        features = timestep_features(
            1000 * (1 - inputs.sigma.to(precision.timestep)), FREQ_DIM, precision.timestep
        )
        return ZImageRefinerCarry(
            image=_with_token(image, is_patch, self.x_pad_token),
            caption=_with_token(caption, inputs.text_mask, self.cap_pad_token),
            time=self.t_embedder["mlp"](features.to(precision.time_mlp)),
            rotary=rotary_table(angles, precision.rotary_tables),
            image_mask=padding_mask(lengths[0], device),
            caption_mask=padding_mask(lengths[1], device),
            padding_mask=joined_padding_mask(lengths, device),
            grids=grids,
        )

    def _angles(
        self,
        layouts: Sequence[tuple[Grid, int]],
        num_image: int,
        num_caption: int,
        device: torch.device,
    ) -> Float[Tensor, "tables tokens 1 pairs"]:
        """Angles of each layout (grid, rows of the caption with its padding): image, then caption;
        0 on the image's padding.

        The caption's rows are at 1, 2, … of the first axis, its padding included, and the image is
        behind them.
        """
        rows = torch.arange(1, num_caption + 1, device=device)
        caption = self._rotary_angles(F.pad(rows[:, None], (0, 2)))
        tables = []
        for (height, width), start in layouts:
            axes = (
                torch.arange(first, first + size, device=device)
                for first, size in ((start + 1, 1), (0, height), (0, width))
            )
            image = self._rotary_angles(torch.cartesian_prod(*axes))
            tables.append(torch.cat([F.pad(image, (0, 0, 0, num_image - len(image))), caption]))
        return torch.stack(tables)[:, :, None]

    def _rotary_angles(self, positions: Int[Tensor, "tokens 3"]) -> Float[Tensor, "tokens pairs"]:
        arch = self.arch
        parts = [
            axis_angles(positions[:, axis], size // 2, arch.theta)
            for axis, size in enumerate(arch.axes)
        ]
        return torch.cat(parts, -1)


def _patches(latents: Tensor) -> Float[Tensor, "tokens features"]:
    """Squares of latent pixels with their channels last, and rows of zeros up to a multiple of
    `MULTIPLE`."""
    rows = rearrange(latents, "c 1 (h p) (w q) -> (h w) (p q c)", p=PATCH, q=PATCH)
    return F.pad(rows, (0, 0, 0, -len(rows) % MULTIPLE))


def _with_token(
    rows: Float[Tensor, "batch tokens dim"], real: Sequence[Tensor], token: Float[Tensor, "1 dim"]
) -> Float[Tensor, "batch tokens dim"]:
    """The rows, with the learned token in place of padding."""
    mask = pad_sequence(list(real), batch_first=True)
    return torch.where(mask[..., None], rows, token.to(rows.dtype))


class ZImageAttention(nn.Module):
    """Attention among the tokens of a stream."""

    def __init__(self, arch: ZImageArch, precision: Precision):
        super().__init__()
        self.heads, self.precision = arch.heads, precision
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(arch.dim, arch.dim, bias=False) for _ in range(3)
        )
        self.to_out = nn.Sequential(nn.Linear(arch.dim, arch.dim, bias=False))
        self.norm_q, self.norm_k = (nn.RMSNorm(arch.head_dim, eps=1e-5) for _ in range(2))

    def forward(
        self, h: Float[Tensor, "batch tokens dim"], rotary: Tensor, mask: Tensor | None, name: str
    ) -> Tensor:
        precision = self.precision
        q = normalised_heads(self.to_q(h), self.norm_q, self.heads, precision, rotary)
        k = normalised_heads(self.to_k(h), self.norm_k, self.heads, precision, rotary)
        v = self.to_v(h).unflatten(-1, (self.heads, -1)).to(precision.attention)
        return self.to_out(
            attend(q, k, v, name=name, padding_mask=mask).flatten(2).to(precision.matmul)
        )


class ZImageFeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self, arch: ZImageArch):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(arch.dim, arch.mlp_dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(arch.mlp_dim, arch.dim, bias=False)

    def forward(self, h: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        return self.w2(gated_product(self.w1(h), self.w3(h)))


class ZImageLayer(nn.Module):
    """Attention and MLP, each with an RMS norm before and after it. Its subclasses say which part
    of the carry it runs on."""

    modulated = True

    def __init__(self, arch: ZImageArch, precision: Precision):
        super().__init__()
        self.eps, self.precision = arch.eps, precision
        self.attention, self.feed_forward = (
            ZImageAttention(arch, precision),
            ZImageFeedForward(arch),
        )
        self.attention_norm1, self.attention_norm2, self.ffn_norm1, self.ffn_norm2 = (
            nn.RMSNorm(arch.dim, eps=arch.eps) for _ in range(4)
        )
        if self.modulated:
            self.adaLN_modulation = nn.Sequential(CastLinear(arch.time_dim, 4 * arch.dim))

    def run(
        self, x: Tensor, rotary: Tensor, mask: Tensor | None, time: Tensor, name: str
    ) -> Float[Tensor, "batch tokens dim"]:
        """The stream behind the layer."""
        precision, eps = self.precision, self.eps
        before, after, before_mlp, after_mlp = self._factors(time)
        h = scaled_norm(x, before, eps, precision.norms_of(x.dtype), precision.matmul)
        h = self.attention(h, rotary, mask, name)
        x = normed_sum(h, x.to(precision.residual), after, eps, precision.norms)
        h = self.feed_forward(scaled_norm(x, before_mlp, eps, precision.norms, precision.matmul))
        return normed_sum(h, x, after_mlp, eps, precision.norms)

    def _factors(
        self, time: Float[Tensor, "batch time_dim"]
    ) -> list[Float[Tensor, "samples 1 dim"]]:
        """The weight of each norm, times scale or gate."""
        norms = (self.attention_norm1, self.attention_norm2, self.ffn_norm1, self.ffn_norm2)
        if not self.modulated:
            return [norm.weight[None, None].to(self.precision.norms) for norm in norms]
        dtype = self.precision.modulation
        rows = self.adaLN_modulation(time.to(dtype))[:, None].chunk(4, -1)
        # scale, gate, scale, gate
        return [
            norm.weight.to(dtype) * (row.tanh() if index % 2 else 1 + row)
            for index, (norm, row) in enumerate(zip(norms, rows, strict=True))
        ]


class ZImageNoiseRefiner(ZImageLayer):
    """A layer of the image alone."""

    def forward(self, carry: ZImageRefinerCarry) -> ZImageRefinerCarry:
        rotary = carry.rotary[:, : carry.image.shape[1]]
        return carry._replace(
            image=self.run(carry.image, rotary, carry.image_mask, carry.time, "image")
        )


class ZImageContextRefiner(ZImageLayer):
    """A layer of the caption alone, which no noise level modulates."""

    modulated = False

    def forward(self, carry: ZImageRefinerCarry) -> ZImageRefinerCarry:
        rotary = carry.rotary[:, carry.image.shape[1] :]
        return carry._replace(
            caption=self.run(carry.caption, rotary, carry.caption_mask, carry.time, "caption")
        )


class ZImageJoin(nn.Module):
    """Two streams become one: image, then caption."""

    def forward(self, carry: ZImageRefinerCarry) -> ZImageCarry:
        tokens = torch.cat([carry.image, carry.caption], 1)
        return ZImageCarry(tokens, carry.time, carry.rotary, carry.padding_mask, carry.grids)


class ZImageBlock(ZImageLayer):
    """A layer of image and caption together."""

    def forward(self, carry: ZImageCarry) -> ZImageCarry:
        return carry._replace(
            tokens=self.run(carry.tokens, carry.rotary, carry.padding_mask, carry.time, "self")
        )


class ZImageHead(nn.Module):
    """The last carry to one velocity per sample."""

    def __init__(self, arch: ZImageArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.linear = CastLinear(arch.dim, PATCH**2 * arch.in_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), CastLinear(arch.time_dim, arch.dim))

    def forward(self, carry: ZImageCarry) -> list[Tensor]:
        dtype = self.precision.head
        scale = 1 + self.adaLN_modulation(carry.time.to(dtype))[:, None]
        # The image comes first, so padding behind the longest image and captions are never
        # normalised or projected.
        x = carry.tokens[:, : max(height * width for height, width in carry.grids)].to(dtype)
        rows = self.linear(F.layer_norm(x, x.shape[-1:], eps=HEAD_EPS) * scale)
        # Upstream predicts the velocity from noise to data.
        return [
            -rearrange(
                row[: height * width],
                "(h w) (p q c) -> c 1 (h p) (w q)",
                h=height,
                p=PATCH,
                q=PATCH,
            )
            for row, (height, width) in zip(rows, carry.grids, strict=True)
        ]


class ZImageTransformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, noise level and text."""

    def __init__(self, arch: ZImageArch, precision: Precision):
        super().__init__()
        self.embed = ZImageEmbed(arch, precision)
        refiners, layers = range(arch.refiner_layers), range(arch.layers)
        self.noise_refiner = nn.ModuleList(ZImageNoiseRefiner(arch, precision) for _ in refiners)
        self.context_refiner = nn.ModuleList(
            ZImageContextRefiner(arch, precision) for _ in refiners
        )
        self.join = ZImageJoin()
        self.layers = nn.ModuleList(ZImageBlock(arch, precision) for _ in layers)
        self.head = ZImageHead(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return [*self.noise_refiner, *self.context_refiner, self.join, *self.layers]

    def forward(self, inputs: ZImageInputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
