"""Qwen-Image 2.1's parameter names: ours, diffusers', which are the official ones, and ComfyUI's;
and which programs read which adapter files.

Source: `convert_qwen_image21_transformer_checkpoint_to_diffusers` and `QwenImageLoraLoaderMixin` in
diffusers. ComfyUI keeps the two first layers of an MLP in one tensor. Ours are diffusers' names,
but for the stages (`_STAGES`) and a norm whose parameter is its weight minus 1 (`offset`).
"""

import re
from dataclasses import replace

from ditkit_core.models.adapter_programs import (
    DIFFUSERS_BY_CONVERTER,
    AdapterRules,
    ProgramRow,
)
from ditkit_core.models.other_models import TWO_STREAMS, others_than
from ditkit_core.models.state_dict import StateDictNames, TensorSlice

_STAGES = (
    ("embed.timestep_embedder.", "time_text_embed.timestep_embedder."),
    ("embed.modulation.", "modulation.1."),
    ("embed.", ""),
    ("head.", ""),
)
"""ours and diffusers', of what is not a block"""
_HEAD = ("norm_out.", "proj_out.")
_EMBEDDED = ("img_in.", "txt_in.")
_NORM = "txt_in.text_norm."
_BLOCK = re.compile(
    r"transformer_blocks\.(\*|\d+)\.(attn\.(to_[qkv]|to_out\.0|norm_[qk])|img_mlp\.(gate_layer|proj|out))\.weight"
)
"""Names in a block; other models have other layers in blocks of the same names."""
_HALVES = re.compile(r"(.*\.img_mlp)\.(gate_layer|proj)\.weight")
_FUSED, _ORDER = ".img_mlp.gate_up.weight", ("gate_layer", "proj")


def to_diffusers(name: str) -> tuple[TensorSlice, ...]:
    """diffusers' tensor that a parameter of ours is."""
    for ours, theirs in _STAGES:
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    return (TensorSlice(f"{_NORM}weight" if name == f"{_NORM}offset" else name),)


def to_comfyui(name: str) -> tuple[TensorSlice, ...]:
    """The tensor of ComfyUI, or the part of one, that a parameter of ours is."""
    if half := _HALVES.fullmatch(name):
        return (TensorSlice(half[1] + _FUSED.removeprefix(".img_mlp"), _ORDER.index(half[2]), 2),)
    return to_diffusers(name)


def to_native(name: str) -> tuple[TensorSlice, ...] | None:
    """The parameters of ours that a tensor of diffusers or ComfyUI is; None if neither has the
    name."""
    if name.endswith(_FUSED):
        stem = name.removesuffix("gate_up.weight")
        return tuple(TensorSlice(f"{stem}{part}.weight") for part in _ORDER)
    if _BLOCK.fullmatch(name):
        return (TensorSlice(name),)
    if name == f"{_NORM}weight":
        return (TensorSlice(f"embed.{_NORM}offset"),)
    for ours, theirs in _STAGES[:2]:
        if name.startswith(theirs):
            return (TensorSlice(ours + name.removeprefix(theirs)),)
    if name.startswith(_HEAD):
        return (TensorSlice(f"head.{name}"),)
    return (TensorSlice(f"embed.{name}"),) if name.startswith(_EMBEDDED) else None


_TWO_STREAMS = replace(TWO_STREAMS, keys=TWO_STREAMS.keys.replace("(add_|to_)", "add_"))
"""Without the names that Qwen-Image 2.1 has as well."""

NAMES = StateDictNames(
    prefixes=("model.diffusion_model.", "diffusion_model."),
    to_native=to_native,
    from_native={"official": to_diffusers, "diffusers": to_diffusers, "comfyui": to_comfyui},
    scaled="comfyui",
    others=(*others_than("qwen"), _TWO_STREAMS),
)

ROWS = (
    ProgramRow(
        program="diffusers",
        forms=("musubi",),
        kinds=("lora",),
        present=r"\.gate_layer$|^embed\.(txt_in|modulation)",
        misreads="does not find {module}; write it with --to official",
    ),
    *DIFFUSERS_BY_CONVERTER,
)
"""What programs do with Qwen-Image 2.1's adapter files; the tests run diffusers against it."""

RULES = AdapterRules(programs=ROWS)
"""Rules for Qwen-Image 2.1's adapter files: which programs load them."""
