"""Z-Image's parameter names: ours, the official ones, which diffusers has too, and ComfyUI's; and
which programs read which adapter files.

Source: `ZImageTransformer2DModel` in Tongyi-MAI/Z-Image, src/zimage/transformer.py, and in
diffusers. ComfyUI keeps q, k and v in one tensor, and reads the official names as well, of
transformers and of adapters. So these are what we write.

Ours are the official names, but for modules that run before the blocks, which are below `embed`,
and after them, below `head`.
"""

import re
from functools import partial

from ditkit_core.models.adapter_programs import (
    DIFFERENCES_IN_DIFFUSERS,
    DORAS,
    LYCORIS,
    SD_SCRIPTS,
    UNTRIED,
    AdapterRules,
    ProgramRow,
    differences_in_comfyui,
    diffsynth_rows,
    musubi_rows,
)
from ditkit_core.models.other_models import TWO_STREAMS, others_than
from ditkit_core.models.state_dict import StateDictNames, TensorSlice

_BLOCK = re.compile(r"(noise_refiner|context_refiner|layers)\.(\*|\d+)\.")
_STARTS = (
    ("embed.x_embedder.", "all_x_embedder.2-1.", "x_embedder."),
    ("head.", "all_final_layer.2-1.", "final_layer."),
)
_EMBEDDED = ("t_embedder.mlp.", "cap_embedder.", "x_pad_token", "cap_pad_token")
_ENDS = {
    ".attention.norm_q.weight": ".attention.q_norm.weight",
    ".attention.norm_k.weight": ".attention.k_norm.weight",
    ".attention.to_out.0.weight": ".attention.out.weight",
}
"""ours and the official ones -> ComfyUI's, in a block"""
_STACKED = re.compile(r"(.*\.attention)\.to_([qkv])\.weight")
_QKV = ".attention.qkv.weight"


def _renamed(name: str, form: int) -> str:
    for starts in _STARTS:
        if name.startswith(starts[0]):
            return starts[form] + name.removeprefix(starts[0])
    return name.removeprefix("embed.")


def to_official(name: str) -> tuple[TensorSlice, ...]:
    """The official tensor that a parameter of ours is; diffusers uses these names too."""
    return (TensorSlice(_renamed(name, 1)),)


def to_comfyui(name: str) -> tuple[TensorSlice, ...]:
    """The tensor of ComfyUI, or the part of one, that a parameter of ours is."""
    if stacked := _STACKED.fullmatch(name):
        return (TensorSlice(f"{stacked[1]}.qkv.weight", "qkv".index(stacked[2]), 3),)
    for ours, theirs in _ENDS.items():
        if name.endswith(ours):
            return (TensorSlice(name.removesuffix(ours) + theirs),)
    return (TensorSlice(_renamed(name, 2)),)


def to_native(name: str) -> tuple[TensorSlice, ...] | None:
    """The parameters of ours that an official or ComfyUI tensor is; None if neither has the
    name."""
    if _BLOCK.match(name):
        if name.endswith(_QKV):
            return tuple(
                TensorSlice(f"{name.removesuffix('qkv.weight')}to_{part}.weight") for part in "qkv"
            )
        for ours, theirs in _ENDS.items():
            if name.endswith(theirs):
                return (TensorSlice(name.removesuffix(theirs) + ours),)
        return (TensorSlice(name),)
    for ours, *others in _STARTS:
        for theirs in others:
            if name.startswith(theirs):
                return (TensorSlice(ours + name.removeprefix(theirs)),)
    return (TensorSlice(f"embed.{name}"),) if name.startswith(_EMBEDDED) else None


NAMES = StateDictNames(
    prefixes=("model.diffusion_model.", "diffusion_model."),
    to_native=to_native,
    from_native={"official": to_official, "diffusers": to_official, "comfyui": to_comfyui},
    scaled="comfyui",
    others=(*others_than("zimage"), TWO_STREAMS),
)


_UNKNOWN_TO_COMFYUI = r"\.attention\.to_|^embed\.x_embedder$|^head\."
"""Modules that ComfyUI has by its own names alone behind kohya's prefix: musubi-tuner keeps the
official ones."""
_COMFYUI = partial(ProgramRow, program="ComfyUI")
_KINDS = ("lora", "dora", "lokr", "loha")
_OFFICIAL = "write it with --to official"
_NO_ALPHA = f"rejects keys of alpha; {_OFFICIAL}"
# Measured with diffusers 0.42 by loading an adapter of every layer in each form:
# `ZImageLoraLoaderMixin` reads them all.
_DIFFUSERS = partial(ProgramRow, program="diffusers")
_LORAS = ("lora", *DORAS)
ROWS = (
    # It converts names where alpha is, and then finds its own prefix twice.
    _DIFFUSERS(forms=("diffusers",), kinds=("lokr",), alpha=True, misreads=_NO_ALPHA),
    _DIFFUSERS(forms=("official", "diffusers"), kinds=("lokr",)),
    _DIFFUSERS(
        naming=("comfyui",),
        kinds=_LORAS,
        misreads=f"does not find the layers of ComfyUI's own names; {_OFFICIAL}",
    ),
    # Its converter runs where a file has alpha, and so adds the prefix that these lack.
    _DIFFUSERS(forms=("bare",), kinds=("lora",), alpha=True),
    _DIFFUSERS(forms=("diffusers",), kinds=_LORAS, alpha=True, misreads=_NO_ALPHA),
    _DIFFUSERS(
        forms=("diffusers",),
        kinds=_LORAS,
        up_down=True,
        misreads=f"rejects lora_up and lora_down; {_OFFICIAL}",
    ),
    _DIFFUSERS(forms=("diffusers",), kinds=_LORAS),
    _DIFFUSERS(forms=("official", "diffsynth", "musubi"), kinds=("lora",)),
    _DIFFUSERS(
        forms=("official", "diffsynth", "musubi"),
        kinds=DORAS,
        misreads="drops DoRA magnitudes; write it with --to diffusers",
    ),
    _DIFFUSERS(kinds=_LORAS, misreads=f"loads nothing of it, and only warns; {_OFFICIAL}"),
    _DIFFUSERS(
        misreads=f"reads LoKr with official names alone, and no LoHa; {_OFFICIAL}, or merge it"
    ),
    DIFFERENCES_IN_DIFFUSERS,
    _COMFYUI(
        forms=("official", "diffusers", "diffsynth", "bare", "lycoris"),
        naming=("official", "diffusers"),
        kinds=_KINDS,
    ),
    _COMFYUI(forms=("official", "musubi"), naming=("comfyui",), kinds=_KINDS),
    _COMFYUI(
        forms=("musubi",),
        naming=("official",),
        kinds=_KINDS,
        unread=_UNKNOWN_TO_COMFYUI,
        instead=_OFFICIAL,
    ),
    _COMFYUI(
        kinds=("dora_merged",),
        misreads=f"generates other images with magnitudes over another norm; {_OFFICIAL}",
    ),
    _COMFYUI(misreads=f"loads nothing of it, and only warns; {_OFFICIAL}"),
    *differences_in_comfyui(
        r"norm|modulation|^(?!layers\.)", unread=_UNKNOWN_TO_COMFYUI, instead=_OFFICIAL
    ),
    *diffsynth_rows("official"),
    *musubi_rows(),
    *LYCORIS,
    SD_SCRIPTS,
    *UNTRIED,
)
"""What programs do with Z-Image's adapter files; the tests run diffusers against it, and
tools/clients the others."""

RULES = AdapterRules(programs=ROWS)
"""Rules for Z-Image's adapter files: which programs load them."""
