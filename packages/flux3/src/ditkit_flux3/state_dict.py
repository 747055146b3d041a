"""FLUX.3's parameter names: ours, the official files', and diffusers'; and which programs read
which adapter files.

Source: `convert_flux3_transformer_checkpoint_to_diffusers` in diffusers,
loaders/single_file_utils.py.

Ours are the official names, but for modules that run before the blocks, which are below `embed`,
and after them, below `head`. Every tensor is one of ours; diffusers has the head's scale before its
shift.
"""

import re
from functools import partial

from ditkit_core.models.adapter_programs import (
    ALL_KINDS,
    DIFFERENCES_IN_DIFFUSERS,
    DORAS,
    NOT_TRIED,
    UNTRIED,
    AdapterRules,
    ProgramRow,
)
from ditkit_core.models.other_models import OtherModel, others_than
from ditkit_core.models.state_dict import (
    StateDictNames,
    TensorSlice,
    by_table,
    invert_table,
    look_up,
)

# ours -> diffusers; the official names follow by rules, in `_official`
_MODES = ("image", "image_cond", "txt")
_OUTSIDE = {
    **{f"embed.emb_in.{mode}": f"x_embedders.{mode}" for mode in _MODES[:2]},
    "embed.txt_in": "context_embedder",
    **{
        f"embed.{ours}.{layer}": f"{theirs}.linear_{index}"
        for ours, theirs in (
            ("time_in", "timestep_embedder"),
            ("ref_time_in", "target_timestep_embedder"),
        )
        for index, layer in ((1, "in_layer"), (2, "out_layer"))
    },
    **{
        f"embed.{blocks}_stream_modulations.{mode}.lin": f"{blocks}_stream_modulations.{mode}.linear"
        for blocks in ("early", "single")
        for mode in _MODES
    },
    "head.linear": "proj_out",
    "head.adaLN_modulation.1": "norm_out.linear",
}
_BLOCKS = {
    "txt_mode_blocks.*.": "txt_mode_blocks.*.",
    **{f"content_mode_blocks.{mode}.*.": f"mode_blocks.{mode}.*." for mode in _MODES[:2]},
    "single_blocks.*.": "single_transformer_blocks.*.",
}
_LAYERS = {
    "q_proj": "attn.to_q",
    "k_proj": "attn.to_k",
    "v_proj": "attn.to_v",
    "attn_out": "attn.to_out.0",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
}
_ADALN = "head.adaLN_modulation.1"
_PARAMETERS = {
    f"{ours}.weight": f"{theirs}.weight"
    for ours, theirs in {
        **_OUTSIDE,
        **{
            block + ours: their_block + theirs
            for block, their_block in _BLOCKS.items()
            for ours, theirs in _LAYERS.items()
        },
    }.items()
}


def _official(ours: str) -> str:
    name = ours.removeprefix("embed.")
    if name.startswith("head."):
        name = f"final_layer.image.{name.removeprefix('head.')}"
    return re.sub(r"(query|key)_norm\.weight$", r"\1_norm.scale", name)


_TO_OFFICIAL = {ours: (TensorSlice(_official(ours)),) for ours in _PARAMETERS}
_TO_DIFFUSERS = {
    ours: (TensorSlice(theirs, 1, 2), TensorSlice(theirs, 0, 2))
    if ours == f"{_ADALN}.weight"  # (shift, scale) become (scale, shift)
    else (TensorSlice(theirs),)
    for ours, theirs in _PARAMETERS.items()
}
_TO_NATIVE = {**invert_table(_TO_DIFFUSERS), **invert_table(_TO_OFFICIAL)}


def to_native(name: str) -> tuple[TensorSlice, ...] | None:
    """The parts of our parameters that make up an official or diffusers tensor, none for heads that
    only the authors' training uses; None if neither form has the name."""
    return () if name.startswith("repa_projectors.") else look_up(name, _TO_NATIVE)


to_official = by_table(_TO_OFFICIAL)
"""The official tensor that a parameter of ours is."""
to_diffusers = by_table(_TO_DIFFUSERS)
"""The parts of a diffusers tensor that a parameter of ours is."""


NAMES = StateDictNames(
    prefixes=("model.diffusion_model.", "diffusion_model."),
    to_native=to_native,
    from_native={"official": to_official, "diffusers": to_diffusers},
    others=(
        *others_than("flux3"),
        OtherModel(
            name="FLUX.2, or FLUX.1, which ditkit does not train",
            keys=r"double_blocks|to_qkv_mlp_proj|single_blocks[._]\d+[._]linear|"
            r"(?<!single_)transformer_blocks[._]\d+[._]attn[._](add_|to_)",
            remedy="use the flux2 commands",
        ),
    ),
)

_CONVERT = "write it with --to diffusers"
_LORAS = ("lora", *DORAS)
# Measured with diffusers 0.42.1 by loading an adapter of every kind of layer in each form:
# `Flux3LoraLoaderMixin` renames the layers of blocks alone.
_DIFFUSERS = partial(ProgramRow, program="diffusers")
_IN_OFFICIAL = partial(_DIFFUSERS, forms=("official",), kinds=_LORAS)
ROWS = (
    _DIFFUSERS(
        forms=("official", "diffusers"),
        kinds=_LORAS,
        up_down=True,
        misreads=f"loads nothing of lora_up and lora_down; {_CONVERT}",
    ),
    _DIFFUSERS(
        forms=("official", "diffusers"),
        kinds=_LORAS,
        alpha=True,
        misreads=f"rejects keys of alpha; {_CONVERT}",
    ),
    _DIFFUSERS(forms=("diffusers",), kinds=_LORAS),
    _IN_OFFICIAL(kinds=DORAS, misreads=f"drops DoRA magnitudes; {_CONVERT}"),
    _IN_OFFICIAL(unread=r"^(embed|head)\.", instead=_CONVERT),
    _DIFFUSERS(kinds=_LORAS, misreads=f"loads nothing of it, and only warns; {_CONVERT}"),
    _DIFFUSERS(misreads="has no reader of LoKr or LoHa for this model; merge it"),
    DIFFERENCES_IN_DIFFUSERS,
    *(
        ProgramRow(program=program, kinds=ALL_KINDS, misreads=NOT_TRIED)
        for program in ("ComfyUI", "DiffSynth", "musubi-tuner", "LyCORIS", "sd-scripts")
    ),
    *UNTRIED,
)
"""What programs do with FLUX.3's adapter files; the tests run diffusers against it. None of the
others was seen that has this model."""

RULES = AdapterRules(programs=ROWS)
"""Rules for FLUX.3's adapter files: which programs load them."""
