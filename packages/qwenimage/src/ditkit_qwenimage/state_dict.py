"""Qwen-Image's parameter names: ours, diffusers', which are the official ones and ComfyUI's; and
which programs read which adapter files.

Source: `QwenImageTransformer2DModel` and `QwenImageLoraLoaderMixin` in diffusers. Ours are
diffusers' names, but for the stages (`_STAGES`).
"""

import re

from ditkit_core.models.adapter_programs import (
    DIFFUSERS_BY_CONVERTER,
    AdapterRules,
)
from ditkit_core.models.other_models import OtherModel, others_than
from ditkit_core.models.state_dict import StateDictNames, TensorSlice

_STAGES = (
    ("embed.timestep_embedder.", "time_text_embed.timestep_embedder."),
    ("embed.", ""),
    ("head.", ""),
)
"""ours and diffusers', of what is not a block"""
_BLOCK = re.compile(
    r"transformer_blocks\.(\*|\d+)\.((img|txt)_mod\.1|(img|txt)_mlp\.net\.(0\.proj|2)|"
    r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|norm_(added_)?[qk]))\.(weight|bias)"
)
"""Names in a block; other models have other layers in blocks of the same names."""
_OUTSIDE = re.compile(
    r"((img_in|txt_in|time_text_embed\.timestep_embedder\.linear_[12])\.(weight|bias)|"
    r"txt_norm\.weight)|(norm_out\.linear|proj_out)\.(weight|bias)"
)
"""Names in front of blocks, and behind them."""


_MARK = "__index_timestep_zero__"
"""What ComfyUI's files of models with clean references have next to parameters."""


def to_diffusers(name: str) -> tuple[TensorSlice, ...]:
    """diffusers' tensor that a parameter of ours is."""
    for ours, theirs in _STAGES:
        if name.startswith(ours):
            return (TensorSlice(theirs + name.removeprefix(ours)),)
    return (TensorSlice(name),)


def to_native(name: str) -> tuple[TensorSlice, ...] | None:
    """The parameter of ours that a tensor of diffusers or ComfyUI is; None if neither has the
    name."""
    if name == _MARK:
        return ()
    if _BLOCK.fullmatch(name):
        return (TensorSlice(name),)
    if (outside := _OUTSIDE.fullmatch(name)) is None:
        return None
    stage = "embed" if outside[1] else "head"
    return (TensorSlice(f"{stage}.{name.removeprefix('time_text_embed.')}"),)


NAMES = StateDictNames(
    prefixes=("model.diffusion_model.", "diffusion_model."),
    to_native=to_native,
    from_native={"official": to_diffusers, "diffusers": to_diffusers},
    others=others_than("qwenimage", has_two_streams=True),
    shared=OtherModel(
        name="Stable Diffusion 3, FLUX.1, FLUX.2 or another model of two streams",
        keys=r"^transformer_blocks[._]\d+[._]attn[._]",
    ),
)

ROWS = DIFFUSERS_BY_CONVERTER
"""What programs do with Qwen-Image's adapter files; the tests run diffusers against it."""

RULES = AdapterRules(programs=ROWS)
"""Rules for Qwen-Image's adapter files: which programs load them."""
