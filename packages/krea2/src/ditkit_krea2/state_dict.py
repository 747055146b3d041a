"""Krea 2's parameter names: ours, the official files', which ComfyUI reads too, and diffusers'; and
which programs read which adapter files.

Source: `convert_krea2_transformer_checkpoint_to_diffusers` and
`_convert_non_diffusers_krea2_lora_to_diffusers` in diffusers, which name the modules of
krea-ai/krea-2. Ours are diffusers' names, but for the stages (`_STAGES`), and norms whose parameter
is their weight minus 1 (`offset`).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from ditkit_core.models.adapter_programs import (
    DIFFUSERS_ALONE,
    DORAS,
    AdapterRules,
    ProgramRow,
)
from ditkit_core.models.other_models import TWO_STREAMS, others_than
from ditkit_core.models.state_dict import StateDictNames

_STAGES = (
    ("embed.", ""),
    ("layerwise_blocks.", "text_fusion.layerwise_blocks."),
    ("collapse.projector.", "text_fusion.projector."),
    ("refiner_blocks.", "text_fusion.refiner_blocks."),
    ("head.", "final_layer."),
)
"""ours and diffusers', of what is not a block of image and caption"""
_OUTSIDE = (
    ("first.", "img_in."),
    ("tmlp.0.", "time_embed.linear_1."),
    ("tmlp.2.", "time_embed.linear_2."),
    ("tproj.1.", "time_mod_proj."),
    ("txtmlp.0.scale", "txt_in.norm.weight"),
    ("txtmlp.1.", "txt_in.linear_1."),
    ("txtmlp.3.", "txt_in.linear_2."),
    ("txtfusion.", "text_fusion."),
    ("blocks.", "transformer_blocks."),
    ("last.linear.", "final_layer.linear."),
    ("last.norm.scale", "final_layer.norm.weight"),
    ("last.modulation.lin", "final_layer.scale_shift_table"),
)
"""official and diffusers': how names begin"""
_INSIDE = (
    (".attn.wq.", ".attn.to_q."),
    (".attn.wk.", ".attn.to_k."),
    (".attn.wv.", ".attn.to_v."),
    (".attn.wo.", ".attn.to_out.0."),
    (".attn.gate.", ".attn.to_gate."),
    (".attn.qknorm.qnorm.scale", ".attn.norm_q.weight"),
    (".attn.qknorm.knorm.scale", ".attn.norm_k.weight"),
    (".mlp.", ".ff."),
    (".prenorm.scale", ".norm1.weight"),
    (".postnorm.scale", ".norm2.weight"),
    (".mod.lin", ".scale_shift_table"),
)
"""official and diffusers': in a block"""
_NORM = re.compile(r"(^|\.)(norm[12qk_]*)\.(weight|offset)$")
_BLOCK = re.compile(r"(transformer_blocks|text_fusion\.\w+_blocks)\.(\*|\d+)\.")
_TABLE = re.compile(r"blocks\.\d+\.mod\.lin")
# All of the name: another model's blocks, and an adapter's tensors, begin as ours do.
_KNOWN = re.compile(
    r"((transformer_blocks|text_fusion\.\w+_blocks)\.(\*|\d+)\."
    r"(attn\.(to_[qkv]|to_out\.0|to_gate|norm_[qk])|ff\.(gate|up|down)|norm[12])|"
    r"text_fusion\.projector|txt_in\.(norm|linear_[12])|final_layer\.(norm|linear)|img_in|"
    r"time_embed\.linear_[12]|time_mod_proj)\.(weight|bias)|"
    r"(transformer_blocks\.(\*|\d+)|final_layer)\.scale_shift_table"
)


_TWO_STREAMS = replace(TWO_STREAMS, keys=TWO_STREAMS.keys.replace("(add_|to_)", "add_"))
"""Without the names that Krea 2 has as well."""


def to_diffusers(name: str) -> str:
    """diffusers' name of a parameter of ours."""
    name = _NORM.sub(r"\1\2.weight", name)
    for ours, theirs in _STAGES:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def to_official(name: str) -> str:
    """The official name of a parameter of ours."""
    name = to_diffusers(name)
    if _BLOCK.match(name):
        for official, theirs in _INSIDE:
            name = name.replace(theirs, official, 1)
    for official, theirs in _OUTSIDE:
        if name.startswith(theirs):
            return official + name.removeprefix(theirs)
    raise AssertionError(name)


def to_native(name: str) -> str | None:
    """Our name of an official or diffusers parameter; None if neither has the name."""
    for official, theirs in _OUTSIDE:
        if name.startswith(official):
            name = theirs + name.removeprefix(official)
            break
    if _BLOCK.match(name):
        for official, theirs in _INSIDE:
            name = name.replace(official, theirs, 1)
    if not _KNOWN.fullmatch(name):
        return None
    name = _NORM.sub(r"\1\2.offset", name)
    for ours, theirs in _STAGES[1:]:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name if name.startswith(("transformer_blocks.", "txt_in.")) else f"embed.{name}"


def _stored(form: str, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """Official files have a block's table [6, dim] as one axis."""
    return {name: tensor.flatten() if form == "official" and _TABLE.search(name) else tensor}


NAMES = replace(
    StateDictNames.renaming(
        prefixes=("model.diffusion_model.", "diffusion_model."),
        to_native=to_native,
        from_native={"official": to_official, "diffusers": to_diffusers},
        others=(*others_than("krea2"), _TWO_STREAMS),
    ),
    stored=_stored,
    flat=_TABLE.pattern,
)


_OFFICIAL = "write it with --to official"
_READ = ("official", "peft", "diffusers")
_LORAS = ("lora", *DORAS)
# Measured with diffusers 0.42 by loading an adapter of every layer in each form.
_DIFFUSERS = partial(ProgramRow, program="diffusers", kinds=_LORAS)
ROWS = (
    _DIFFUSERS(forms=_READ, alpha=True, misreads=f"rejects keys of alpha; {_OFFICIAL}"),
    _DIFFUSERS(forms=_READ, up_down=True, misreads=f"rejects lora_up and lora_down; {_OFFICIAL}"),
    _DIFFUSERS(forms=("official", "peft"), naming=("official",), kinds=("lora",)),
    _DIFFUSERS(forms=("diffusers",), naming=("diffusers",)),
    _DIFFUSERS(
        forms=("official", "peft"),
        kinds=DORAS,
        misreads="drops DoRA magnitudes; write it with --to diffusers",
    ),
    _DIFFUSERS(misreads=f"loads nothing of it; {_OFFICIAL}"),
    *DIFFUSERS_ALONE,
)
"""What programs do with Krea 2's adapter files; the tests run diffusers against it."""

RULES = AdapterRules(programs=ROWS)
"""Rules for Krea 2's adapter files: which programs load them."""
