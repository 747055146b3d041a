"""Wan's parameter names: ours, those of the official files (which ComfyUI keeps), and diffusers'.

Source: `WanModel` in Wan-Video/Wan2.1, wan/modules/model.py and vace_model.py; the diffusers names are those of its
`WanTransformer3DModel` and `WanVACETransformer3DModel`.

Ours are the official names, put where the seam wants them: what runs before the blocks below `embed`, the blocks in
`layers`. The forms differ only in module names, so one table says everything and is read in both directions.
"""

import re
from collections.abc import Mapping

from ditkit_core.model import StateDictNames

# official -> diffusers, modules and free parameters of one block
_IN_BLOCK = {
    "modulation": "scale_shift_table",
    **{
        f"{ours}.{inner}": f"{theirs}.{their_inner}"
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for inner, their_inner in {
            "q": "to_q",
            "k": "to_k",
            "v": "to_v",
            "o": "to_out.0",
            "norm_q": "norm_q",
            "norm_k": "norm_k",
        }.items()
    },
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    # The one affine norm is before the cross-attention: official code counts it third, diffusers second.
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "before_proj": "proj_in",  # VACE blocks only
    "after_proj": "proj_out",  # VACE blocks only
}

# official -> diffusers, before the blocks
_EMBED = {
    "patch_embedding": "patch_embedding",
    "vace_patch_embedding": "vace_patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
}

# official -> diffusers, after the blocks
_HEAD = {"head.modulation": "scale_shift_table", "head.head": "proj_out"}

# Ours, official, diffusers; `*` stands for the block's number.
_FORMS = (
    [(f"layers.*.{official}", f"blocks.*.{official}", f"blocks.*.{theirs}") for official, theirs in _IN_BLOCK.items()]
    + [
        (f"vace_blocks.*.{name}", f"vace_blocks.*.{name}", f"vace_blocks.*.{theirs}")
        for name, theirs in _IN_BLOCK.items()
    ]
    + [(f"embed.{official}", official, theirs) for official, theirs in _EMBED.items()]
    + [(official, official, theirs) for official, theirs in _HEAD.items()]
)
_TO_OFFICIAL = {ours: official for ours, official, _ in _FORMS}
_TO_DIFFUSERS = {ours: theirs for ours, _, theirs in _FORMS}
_TO_NATIVE = {theirs: ours for ours, _, theirs in _FORMS} | {official: ours for ours, official, _ in _FORMS}

_BLOCK = re.compile(r"(layers|blocks|vace_blocks)\.(\d+)\.")


def _translate(name: str, table: Mapping[str, str]) -> str | None:
    """Look a name up: it is a parameter of its own, or the weight or bias of a module."""
    block = _BLOCK.match(name)
    pattern = _BLOCK.sub(r"\1.*.", name, count=1) if block else name
    module, _, leaf = pattern.rpartition(".")
    if pattern in table:
        translated = table[pattern]
    elif leaf in ("weight", "bias") and module in table:
        translated = f"{table[module]}.{leaf}"
    else:
        return None
    return translated.replace("*", block[2], 1) if block else translated


def to_native(name: str) -> str | None:
    """Our name of an official or diffusers parameter, without prefix; None if neither form has it."""
    return _translate(name, _TO_NATIVE)


def to_official(name: str) -> str:
    """The official name, which ComfyUI uses too, of a parameter of ours."""
    official = _translate(name, _TO_OFFICIAL)
    assert official is not None, name
    return official


def to_diffusers(name: str) -> str:
    """The diffusers name of a parameter of ours."""
    theirs = _translate(name, _TO_DIFFUSERS)
    assert theirs is not None, name
    return theirs


NAMES = StateDictNames.renaming(
    prefixes=("model.diffusion_model.", "diffusion_model.", "model."),
    to_native=to_native,
    from_native={"official": to_official, "diffusers": to_diffusers},
)
