"""FLUX.2's parameter names: ours, the official files' (which ComfyUI keeps), and diffusers'.

Source: `Flux2` in black-forest-labs/flux2, src/flux2/model.py, and diffusers'
`Flux2Transformer2DModel`.

Ours are the official names with three changes: modules that run before the blocks are below
`embed`, modules that run after them are below `head`, and q, k and v are separate as in diffusers,
so that an adapter on one of them leaves the others alone. The forms differ in more than names:
official double blocks stack q, k and v in one tensor, and diffusers has the head's scale before its
shift.
"""

import re

from ditkit_core.models.other_models import SEVERAL_TWO_STREAMS, OtherModel, others_than
from ditkit_core.models.state_dict import (
    StateDictNames,
    TensorSlice,
    by_table,
    invert_table,
    look_up,
)

# ours -> diffusers, before and after the blocks; the official names follow by rules, in `_official`
_OUTSIDE = {
    "embed.img_in": "x_embedder",
    "embed.txt_in": "context_embedder",
    "embed.time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "embed.time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "embed.guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
    "embed.guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
    "embed.double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "embed.double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "embed.single_stream_modulation.lin": "single_stream_modulation.linear",
    "head.linear": "proj_out",
    "head.adaLN_modulation.1": "norm_out.linear",
}

# ours -> diffusers, in a block
_DOUBLE = {
    "img_attn.q": "attn.to_q",
    "img_attn.k": "attn.to_k",
    "img_attn.v": "attn.to_v",
    "img_attn.proj": "attn.to_out.0",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.q": "attn.add_q_proj",
    "txt_attn.k": "attn.add_k_proj",
    "txt_attn.v": "attn.add_v_proj",
    "txt_attn.proj": "attn.to_add_out",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "img_mlp.0": "ff.linear_in",
    "img_mlp.2": "ff.linear_out",
    "txt_mlp.0": "ff_context.linear_in",
    "txt_mlp.2": "ff_context.linear_out",
}
_SINGLE = {
    "linear1": "attn.to_qkv_mlp_proj",
    "linear2": "attn.to_out",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}

_BLOCKS = {
    "double_blocks.*.": ("transformer_blocks.*.", _DOUBLE),
    "single_blocks.*.": ("single_transformer_blocks.*.", _SINGLE),
}
_STACKED = re.compile(r"(.*_attn)\.([qkv])\.weight")
_ADALN = "head.adaLN_modulation.1.weight"


def _parameters() -> dict[str, str]:
    """ours -> diffusers, `*` for the number of a block."""
    pairs = dict(_OUTSIDE)
    for block, (theirs, inner) in _BLOCKS.items():
        pairs |= {f"{block}{ours}": f"{theirs}{name}" for ours, name in inner.items()}
    return {f"{ours}.weight": f"{name}.weight" for ours, name in pairs.items()}


def _official(ours: str) -> tuple[TensorSlice, ...]:
    """The official tensor, or the part of one, that a parameter of ours is."""
    if stacked := _STACKED.fullmatch(ours):
        return (TensorSlice(f"{stacked[1]}.qkv.weight", "qkv".index(stacked[2]), 3),)
    name = ours.removeprefix("embed.").replace("head.", "final_layer.", 1)
    return (TensorSlice(re.sub(r"(query|key)_norm\.weight$", r"\1_norm.scale", name)),)


def _diffusers(ours: str, theirs: str) -> tuple[TensorSlice, ...]:
    """The parts of a diffusers tensor that a parameter of ours is: (shift, scale) of the head
    become (scale, shift)."""
    return (
        (TensorSlice(theirs, 1, 2), TensorSlice(theirs, 0, 2))
        if ours == _ADALN
        else (TensorSlice(theirs),)
    )


_TO_OFFICIAL = {ours: _official(ours) for ours in _parameters()}
_TO_DIFFUSERS = {ours: _diffusers(ours, theirs) for ours, theirs in _parameters().items()}
_FROM_OFFICIAL = invert_table(_TO_OFFICIAL)
_TO_NATIVE = {
    **invert_table(_TO_DIFFUSERS),
    **_FROM_OFFICIAL,
    # Some repacked files name the weight of a norm as torch does.
    **{
        re.sub(r"_norm\.scale$", "_norm.weight", name): parts
        for name, parts in _FROM_OFFICIAL.items()
    },
}


def to_native(name: str) -> tuple[TensorSlice, ...] | None:
    """The parts of our parameters that make up an official or diffusers tensor; None if neither
    form has the name."""
    return look_up(name, _TO_NATIVE)


to_official = by_table(_TO_OFFICIAL)
"""The official tensor, or the part of one, that a parameter of ours is; ComfyUI uses these names
too."""
to_diffusers = by_table(_TO_DIFFUSERS)
"""The parts of a diffusers tensor that a parameter of ours is."""


NAMES = StateDictNames(
    prefixes=("model.diffusion_model.", "diffusion_model."),
    to_native=to_native,
    from_native={"official": to_official, "diffusers": to_diffusers},
    bare="diffusers",
    shared=OtherModel(
        name="Stable Diffusion 3, FLUX.1, HunyuanVideo or another model of two streams",
        keys=r"^(transformer_blocks[._]\d+[._]attn[._]|double_blocks[._]\d+[._](img|txt)_(attn|mlp)[._]|"
        r"single_blocks[._]\d+[._]linear[12]$)",
    ),
    others=(
        *others_than("flux2"),
        OtherModel(  # it has at most eight such blocks
            name="another of diffusers' models, such as Stable Diffusion 3, FLUX.1 or Qwen-Image",
            keys=r"(?<!single_)transformer_blocks[._]([89]|[1-9]\d)[._]attn[._]to_",
            remedy=SEVERAL_TWO_STREAMS.remedy,
        ),
    ),
)
