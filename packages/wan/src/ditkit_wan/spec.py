"""Wan as plain values and functions: everything the core needs to train it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.components import Components
from ditkit_core.model import Companion, Encoder, Engine, ModelSpec, SampleDefaults, Sampler, Streaming
from ditkit_wan.model import WanInputs, WanTransformer
from ditkit_wan.presets import PRESETS, WanArch, arch_from_config
from ditkit_wan.state_dict import NAMES

# The place that a parameter computes in, by how its name begins, then by how it ends; the rest are the matmuls'.
_PARTS = {"embed.time_embedding.": "time_mlp", "embed.time_projection.": "time_mlp", "head.": "head"}
_LEAVES = {
    ".modulation": "modulation", ".norm3.weight": "norms", ".norm3.bias": "norms", ".norm_q.weight": "qk_norms",
    ".norm_k.weight": "qk_norms", ".norm_k_img.weight": "qk_norms",
}  # fmt: skip

# As wan/modules/model.py of Wan-Video/Wan2.1 runs under its bf16 autocast: rotation in complex128, q and k rounded between norm and
# weight, the stream in bf16 until the first sum makes it fp32; what else is fp32 there is so by default.
_REFERENCE = {"rotary_tables": "fp64", "rotary": "fp64", "qk_norms": "matmul", "entry": "matmul"}

_ATTENTION = tuple(f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo")


def _place_of(name: str) -> str:
    found = [place for part, place in _PARTS.items() if name.startswith(part)]
    found += [place for leaf, place in _LEAVES.items() if name.endswith(leaf)]
    return found[0] if found else "matmul"


def _make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> WanInputs:
    device = noised[0].device
    return WanInputs(noised, 1000 * sigma, [item["text"].to(device) for item in items])


def _outline(arch: WanArch, size: tuple[int, int, int], references: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    frames, height, width = size
    return {
        "latents": torch.empty(arch.in_channels, 1 + (frames - 1) // 4, height // 8, width // 8),
        "text": torch.empty(arch.text_tokens, arch.text_dim, dtype=torch.bfloat16),
    }


def _companions(arch: WanArch, components: Components) -> Sequence[Companion]:
    from ditkit_wan.companions import companions

    return companions(arch, components)


# The encoders and the sampler pull in diffusers and transformers: only the stages that need them pay for the import.
def _media_encoder(components: Components, device: torch.device, tiled: bool) -> Encoder:
    from ditkit_wan.vae import VaeEncoder

    return VaeEncoder(components, device, tiled=tiled)


def _text_encoder(components: Components, device: torch.device, dtype: torch.dtype, streaming: Streaming) -> Encoder:
    from ditkit_wan.text import TextEncoder

    return TextEncoder(components, device, dtype)


def _sampler(components: Components, device: torch.device, dtype: torch.dtype, tiled: bool) -> Sampler:
    from ditkit_wan.sample import WanSampler

    return WanSampler(components, device, tiled=tiled)


def _write_demo(folder: Path) -> None:
    from ditkit_wan.demo import write_demo

    write_demo(folder)


def _verify_export(adapter: Path, components: Components, model: Any, run: Engine) -> str:
    from ditkit_wan.verify import verify_export

    return verify_export(adapter, components, model, run)


WAN = ModelSpec(
    name="wan",
    presets=PRESETS,
    build=WanTransformer,
    place_of=_place_of,
    reference_precision=_REFERENCE,
    names=NAMES,
    adapter_targets={
        "q,k,v,o,ffn.0,ffn.2": (*_ATTENTION, "ffn.0", "ffn.2"),
        "q,k,v,o": _ATTENTION,
        "self": tuple(name for name in _ATTENTION if name.startswith("self")),
    },
    make_inputs=_make_inputs,
    outline=_outline,
    companions=_companions,
    num_tokens=lambda item: math.prod(item["latents"].shape[1:]) // 4,  # patches of 1 × 2 × 2
    training_shift=lambda latents: 5.0,
    sample_defaults=lambda arch: SampleDefaults(steps=50, guidance=5.0),
    infer_arch=arch_from_config,
    media_encoder=_media_encoder,
    text_encoder=_text_encoder,
    sampler=_sampler,
    frame_step=4,
    size_step=16,
    fps=16.0,
    size=(81, 480, 832),
    write_demo=_write_demo,
    demo_config=Path(__file__).parent / "demo.toml",
    verify_export=_verify_export,
)
