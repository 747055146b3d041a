"""The smallest model that the core can train: read it before writing your own.

Latents [channels, frames, height, width] of any size are cut into single positions; text of any
length is attended to. One block mixes the tokens, attends to the text and applies an MLP, all under
a modulation that depends on the noise level.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ditkit_core.io.console import NullProgress
from ditkit_core.models.encoders import Decoder, Denoiser, GenerationRequest
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    AuxiliarySpec,
    DataSpec,
    DemoSpec,
    ModelSpec,
    PrecisionSpec,
    SampleDefaults,
    TrainingSpec,
)
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.functional import plain_sum
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import padding_mask
from ditkit_core.testing.specs import altered


@dataclass(frozen=True, kw_only=True)
class ToyArch:
    """Sizes of the toy."""

    channels: int = 4
    dim: int = 32
    heads: int = 2
    text_dim: int = 8
    depth: int = 2
    dropout: float = 0.0


class ToyInputs(NamedTuple):
    """What the toy's `embed` takes."""

    latents: Sequence[Tensor]
    sigma: Float[Tensor, " batch"]
    text: Sequence[Tensor]


class ToyCarry(NamedTuple):
    """Everything one block of the toy hands to the next."""

    tokens: Float[Tensor, "batch tokens dim"]
    modulation: Float[Tensor, "batch 3 dim"]
    text: Float[Tensor, "batch text dim"]
    padding_mask: Bool[Tensor, "batch tokens"] | None
    sizes: tuple[tuple[int, ...], ...]


class ToyEmbed(nn.Module):
    """Latents, noise level and text to the carry."""

    def __init__(self, arch: ToyArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.patch = nn.Linear(arch.channels, arch.dim)
        self.text = nn.Linear(arch.text_dim, arch.dim)
        self.time = CastLinear(16, 3 * arch.dim)

    def forward(self, inputs: ToyInputs) -> ToyCarry:
        precision = self.precision
        sizes = tuple(tuple(latent.shape) for latent in inputs.latents)
        rows = [latent.flatten(1).T for latent in inputs.latents]
        tokens = self.patch(nn.utils.rnn.pad_sequence(rows, batch_first=True).to(precision.matmul))
        frequencies = torch.logspace(0, 2, 8, dtype=torch.float64, device=tokens.device)
        wide = torch.promote_types(precision.timestep, torch.float32)
        angles = inputs.sigma.to(precision.timestep).to(wide)[:, None] * frequencies.to(wide)
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(precision.time_mlp))
        text = self.text(
            nn.utils.rnn.pad_sequence(list(inputs.text), batch_first=True).to(precision.matmul)
        )
        mask = padding_mask([len(row) for row in rows], tokens.device)
        modulation = time.unflatten(-1, (3, -1)).to(precision.modulation)
        return ToyCarry(tokens.to(precision.entry), modulation, text, mask, sizes)


class ToyBlock(nn.Module):
    """Self-attention, attention to the text, MLP."""

    def __init__(self, arch: ToyArch, precision: Precision):
        super().__init__()
        self.heads, self.dropout, self.precision = arch.heads, arch.dropout, precision
        self.qkv = nn.Linear(arch.dim, 3 * arch.dim)
        self.out = nn.Linear(arch.dim, arch.dim)
        self.query = nn.Linear(arch.dim, arch.dim)
        self.key_value = nn.Linear(arch.dim, 2 * arch.dim)
        self.mlp = nn.Sequential(
            nn.Linear(arch.dim, 2 * arch.dim), nn.GELU(), nn.Linear(2 * arch.dim, arch.dim)
        )

    def forward(self, carry: ToyCarry) -> ToyCarry:
        precision = self.precision
        matmul, attention = precision.matmul, precision.attention
        shift, scale, gate = carry.modulation[:, :, None].unbind(1)
        rate = self.dropout if self.training else 0.0
        x = carry.tokens
        normed = F.layer_norm(x.to(precision.norms_of(x.dtype)), x.shape[-1:]).to(
            precision.modulation
        )
        h = (normed * (1 + scale) + shift).to(matmul)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).to(attention) for t in self.qkv(h).chunk(3, -1)
        )
        y = (
            attend(q, k, v, name="self", padding_mask=carry.padding_mask, dropout=rate)
            .flatten(2)
            .to(matmul)
        )
        x = plain_sum(gate * F.dropout(self.out(y), rate, self.training), x.to(precision.residual))
        q = self.query(x.to(matmul)).unflatten(-1, (self.heads, -1)).to(attention)
        k, v = (
            t.unflatten(-1, (self.heads, -1)).to(attention)
            for t in self.key_value(carry.text).chunk(2, -1)
        )
        x = plain_sum(attend(q, k, v, name="cross").flatten(2), x)
        return carry._replace(
            tokens=plain_sum(F.dropout(self.mlp(x.to(matmul)), rate, self.training), x)
        )


class ToyHead(nn.Module):
    """Carry to one velocity per sample."""

    def __init__(self, arch: ToyArch, precision: Precision):
        super().__init__()
        self.precision = precision
        self.out = CastLinear(arch.dim, arch.channels)

    def forward(self, carry: ToyCarry) -> list[Tensor]:
        rows = self.out(carry.tokens.to(self.precision.head))
        sized = zip(rows, carry.sizes, strict=True)
        return [row[: math.prod(size[1:])].T.reshape(size) for row, size in sized]


class ToyModel(nn.Module):
    """embed → blocks → head."""

    def __init__(self, arch: ToyArch, precision: Precision):
        super().__init__()
        self.embed = ToyEmbed(arch, precision)
        self.layers = nn.ModuleList(ToyBlock(arch, precision) for _ in range(arch.depth))
        self.head = ToyHead(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, inputs: ToyInputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)


class _Counted:
    """Counts its loads and calls, so that a test can say what was encoded."""

    items_at_once = 1

    def __init__(self) -> None:
        self.loads = self.calls = 0

    def load(self) -> None:
        self.loads += 1

    def unload(self) -> None:
        pass


class ToyMediaEncoder(_Counted):
    """Averages 4×4 pixels."""

    identity = "toy-media"

    def encode(
        self, items: Sequence[Tensor], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        (item,) = items
        self.calls += 1
        advance(1.0)
        pooled = F.avg_pool2d(item.transpose(0, 1), 4)[::4].transpose(0, 1)
        return [{"latents": torch.cat([pooled, pooled.mean(0, keepdim=True)]).contiguous()}]


class ToyTextEncoder(_Counted):
    """One row of features per character."""

    identity = "toy-text"

    def encode(
        self, items: Sequence[str], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        (item,) = items
        self.calls += 1
        advance(1.0)
        codes = torch.tensor([ord(c) for c in item or " "], dtype=torch.float32)
        return [{"text": torch.sin(codes[:, None] * torch.arange(1, 9))}]


class ToyReader(ToyTextEncoder):
    """One row of features per character, in front of it one per picture: the colours of its left
    and of its right half."""

    identity = "toy-reader"

    def encode(
        self, items: Sequence[Any], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        (prompt,) = items
        (captioned,) = super().encode([prompt.text], advance)
        halves = [picture.chunk(2, dim=-1) for picture in prompt.pictures]
        rows = [
            torch.cat([half.mean((1, 2)) for half in pair] + [torch.ones(2)]) for pair in halves
        ]
        return [{"text": torch.cat([*(row[None] for row in rows), captioned["text"]])}]


class ToySampler:
    """Euler steps from noise to data, which it decodes itself."""

    decoded = "whole"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def decoder(self) -> Decoder:
        return self

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        size = (4, (job.frames - 1) // 4 + 1, job.height // 4, job.width // 4)
        latents = torch.randn(size, generator=torch.Generator().manual_seed(job.seed)).to(
            self.device
        )
        text = [job.conditions["text"].to(self.device)]
        for step in range(job.steps):
            level = 1 - step / job.steps
            denoiser = yield level
            sigma = torch.full((1,), level, device=self.device)
            latents = (
                latents - denoiser(ToyInputs([latents], sigma, text))[0].to(self.device) / job.steps
            )
        return latents

    def decode(self, latents: Tensor, seed: int = 0) -> Tensor:
        return (
            F.interpolate(latents[:3].transpose(0, 1), scale_factor=4)
            .transpose(0, 1)
            .clamp(0, 1)
            .cpu()
        )

    def unload(self) -> None:
        pass


def _make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> ToyInputs:
    return ToyInputs(noised, sigma, [item["text"].to(noised[0].device) for item in items])


_OFFICIAL = {"patch": "patch_in", "time": "time_in", "text": "text_in"}
_NATIVE = {theirs: ours for ours, theirs in _OFFICIAL.items()}


def official_name(name: str) -> str:
    """A parameter's name in the official form, which differs in names alone."""
    first, *rest = name.split(".")
    if first == "embed":
        return ".".join([_OFFICIAL[rest[0]], *rest[1:]])
    return name.replace("layers.", "blocks.", 1)


def native_name(name: str) -> str | None:
    """Our name of a parameter of the official form."""
    first, *rest = name.split(".")
    if first in _NATIVE:
        return ".".join(["embed", _NATIVE[first], *rest])
    return name.replace("blocks.", "layers.", 1) if first in ("blocks", "head") else None


# How a block of the diffusers form is stacked: one module is three there, one has its halves
# swapped, two are one.
_STACKED = {
    "to_q": (TensorSlice("qkv", 0, 3),),
    "to_k": (TensorSlice("qkv", 1, 3),),
    "to_v": (TensorSlice("qkv", 2, 3),),
    "to_vk": (TensorSlice("key_value", 1, 2), TensorSlice("key_value", 0, 2)),
    "to_out_query": (TensorSlice("out"), TensorSlice("query")),
}
_UNSTACKED = {
    "qkv": (TensorSlice("to_q"), TensorSlice("to_k"), TensorSlice("to_v")),
    "key_value": (TensorSlice("to_vk", 1, 2), TensorSlice("to_vk", 0, 2)),
    "out": (TensorSlice("to_out_query", 0, 2),),
    "query": (TensorSlice("to_out_query", 1, 2),),
}
_DIFFUSERS_BLOCK = re.compile(r"(transformer_blocks\.\d+\.)(.+)\.(weight|bias)")
_NATIVE_BLOCK = re.compile(r"(layers\.\d+\.)(.+)\.(weight|bias)")


def _to_diffusers(name: str) -> tuple[TensorSlice, ...]:
    if (match := _NATIVE_BLOCK.fullmatch(name)) is None:
        return (TensorSlice(f"outer.{name}"),)
    block = match[1].replace("layers", "transformer_blocks")
    return tuple(
        replace(p, name=f"{block}{p.name}.{match[3]}")
        for p in _UNSTACKED.get(match[2], (TensorSlice(match[2]),))
    )


def _to_native(name: str) -> tuple[TensorSlice, ...] | None:
    if match := _DIFFUSERS_BLOCK.fullmatch(name):
        block = match[1].replace("transformer_blocks", "layers")
        return tuple(
            replace(p, name=f"{block}{p.name}.{match[3]}")
            for p in _STACKED.get(match[2], (TensorSlice(match[2]),))
        )
    if name.startswith("outer."):
        return (TensorSlice(name.removeprefix("outer.")),)
    native = native_name(name)
    return None if native is None else (TensorSlice(native),)


def _op_group_of(name: str) -> str:
    return (
        "time_mlp"
        if name.startswith("embed.time.")
        else "head"
        if name.startswith("head.")
        else "matmul"
    )


TOY = ModelSpec(
    name="toy",
    architecture=ArchitectureSpec(
        presets={"tiny": ToyArch(), "dropout": ToyArch(dropout=0.2)},
        build=ToyModel,
        names=StateDictNames(
            prefixes=("model.",),
            to_native=_to_native,
            from_native={
                "official": lambda name: (TensorSlice(official_name(name)),),
                "diffusers": _to_diffusers,
            },
        ),
        token_streams=lambda arch: TokenStreams(
            fields=lambda carry: {"tokens": ("tokens",)}, inputs={"key_value": ()}, routed="tokens"
        ),
    ),
    precision=PrecisionSpec(op_group_of=_op_group_of),
    training=TrainingSpec(
        make_inputs=_make_inputs,
        empty_item=lambda arch, size, references: {
            "latents": torch.empty(
                arch.channels, 1 + (size[0] - 1) // 4, size[1] // 4, size[2] // 4
            ),
            "text": torch.empty(16, arch.text_dim),
        },
        num_tokens=lambda item: math.prod(item["latents"].shape[1:]),
        shift=lambda latents: 5.0,
    ),
    data=DataSpec(frame_step=4, size_step=4, fps=8.0, size=(5, 16, 16)),
    auxiliary=AuxiliarySpec(
        media_encoder=lambda components, device, mode: ToyMediaEncoder(),
        text_encoder=lambda components, device, dtype, streaming: ToyTextEncoder(),
        sampler=lambda components, device, dtype, decodings: ToySampler(device),
        sample_defaults=lambda arch: SampleDefaults(steps=4, guidance=2.0),
        models=lambda arch, components: (),
    ),
    adapters=AdapterSpec(
        targets={
            "all": ("qkv", "out", "query", "key_value", "mlp.0", "mlp.2"),
            "attention": ("qkv", "query"),
        }
    ),
    demo=DemoSpec(write=lambda folder: None, config=Path("demo.toml"), trained_base=False),
    import_path="ditkit_core.testing.toy:TOY",
)


TOY_EDITS = altered(
    TOY,
    reference_size=lambda height, width, count: (16, 16),
    picture_size=lambda height, width, count: (8, 8),
    text_encoder=lambda components, device, dtype, streaming: ToyReader(),
    empty_item=lambda arch, size, references: {
        **TOY.training.empty_item(arch, size, ()),
        **{
            f"reference.{index}": torch.empty(arch.channels, 1, height // 4, width // 4)
            for index, (height, width) in enumerate(references)
        },
        "text": torch.empty(16 + len(references), arch.text_dim),
    },
    import_path="ditkit_core.testing.toy:TOY_EDITS",
)
"""The toy with a text encoder that sees references, which it attends to in no other way."""


def in_form(state: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """The toy's parameters as a file of this form has them."""
    rows: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        parts = TOY.architecture.names.from_native[form](name)
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            rows.setdefault(part.name, {})[part.index] = piece.clone()
    return {
        name: torch.cat([piece for _, piece in sorted(pieces.items())])
        for name, pieces in rows.items()
    }


def toy_items(count: int = 4, *, seed: int = 0, ragged: bool = False) -> list[dict[str, Tensor]]:
    """Training items as the encode stage would make them."""
    generator = torch.Generator().manual_seed(seed)
    # the third has as many positions as the first
    grids = ((4, 4), (4, 8), (2, 8)) if ragged else ((4, 4),)
    sizes = [(4, 2, *grids[index % len(grids)]) for index in range(count)]
    return [
        {
            "latents": torch.randn(size, generator=generator),
            "text": torch.randn(5, 8, generator=generator),
        }
        for size in sizes
    ]


__all__ = [
    "TOY",
    "TOY_EDITS",
    "ToyArch",
    "ToyInputs",
    "ToyModel",
    "ToyReader",
    "in_form",
    "native_name",
    "official_name",
    "toy_items",
]
