"""LTX-Video's parameter names: ours, the official files', which ComfyUI reads too, and diffusers';
and which programs read which adapter files.

Source: `convert_ltx_transformer_checkpoint_to_diffusers` and `LTXVideoLoraLoaderMixin` in diffusers.
Ours are diffusers' names, but for the stages and modules that do nothing.
"""

import re
from collections.abc import Collection
from functools import partial

from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import set_forms
from ditkit_core.models.adapter_programs import (
    DIFFUSERS_ALONE,
    DORAS,
    AdapterRules,
    ProgramRow,
)
from ditkit_core.models.other_models import TWO_STREAMS, others_than
from ditkit_core.models.state_dict import StateDictNames

_MODULES = (
    ("time_embed.linear_", "time_embed.emb.timestep_embedder.linear_"),
    (".ff.0.", ".ff.net.0.proj."),
    (".ff.2.", ".ff.net.2."),
)
"""ours and diffusers'"""
_OFFICIAL = (
    ("patchify_proj.", "proj_in."),
    ("adaln_single.", "time_embed."),
    (".q_norm.", ".norm_q."),
    (".k_norm.", ".norm_k."),
)
"""official and diffusers'"""
_HEAD = ("scale_shift_table", "proj_out.")
# All of the name: other models' blocks, and an adapter's tensors, begin as ours do.
_KNOWN = re.compile(
    r"(transformer_blocks\.(\*|\d+)\.(attn[12]\.(to_[qkv]|to_out\.0|norm_[qk])|ff\.net\.(0\.proj|2))|"
    r"proj_in|proj_out|time_embed\.(emb\.timestep_embedder\.linear_[12]|linear)|"
    r"caption_projection\.linear_[12])\.(weight|bias)|"
    r"(transformer_blocks\.(\*|\d+)\.)?scale_shift_table"
)


def to_diffusers(name: str) -> str:
    """diffusers' name of a parameter of ours."""
    name = name.removeprefix("embed.").removeprefix("head.")
    for ours, theirs in _MODULES:
        name = name.replace(ours, theirs, 1)
    return name


def to_official(name: str) -> str:
    """The official name of a parameter of ours."""
    name = to_diffusers(name)
    for official, theirs in _OFFICIAL:
        name = name.replace(theirs, official, 1)
    return name


def to_native(name: str) -> str | None:
    """Our name of an official or diffusers parameter; None if neither has the name."""
    for official, theirs in _OFFICIAL:
        name = name.replace(official, theirs, 1)
    if not _KNOWN.fullmatch(name):
        return None
    for ours, theirs in _MODULES:
        name = name.replace(theirs, ours, 1)
    if name.startswith("transformer_blocks."):
        return name
    return f"head.{name}" if name.startswith(_HEAD) else f"embed.{name}"


NAMES = StateDictNames.renaming(
    prefixes=("model.diffusion_model.", "diffusion_model."),
    to_native=to_native,
    from_native={"official": to_official, "diffusers": to_diffusers},
    others=(*others_than("ltx"), TWO_STREAMS),
)

_RENAMED = r"^embed\.(proj_in|time_embed\.)"
"""Modules, by our names, whose official names diffusers' loader of adapters does not know."""


def check_adapter(form: str, modules: Collection[str]) -> None:
    """Refuse official names for modules that diffusers' loader does not rename.

    Raises:
        UserError: If there is one; the message names it and another form.
    """
    renamed = [module for module in modules if re.search(_RENAMED, module)]
    if form == "official" and renamed:
        raise UserError(
            f"the official form cannot store an adapter on {renamed[0]} (diffusers' loader does "
            f"not know its official name); {set_forms(['diffusers'])}, or leave the module out of "
            f"adapter.targets"
        )


_CONVERT = "write it with --to official"
_READ = ("official", "diffusers")
_LORAS = ("lora", *DORAS)
# Measured with diffusers 0.42 by loading an adapter of every layer in each form.
_DIFFUSERS = partial(ProgramRow, program="diffusers", kinds=_LORAS)
ROWS = (
    _DIFFUSERS(forms=_READ, alpha=True, misreads=f"rejects keys of alpha; {_CONVERT}"),
    _DIFFUSERS(forms=_READ, up_down=True, misreads=f"rejects lora_up and lora_down; {_CONVERT}"),
    _DIFFUSERS(
        forms=("official",),
        kinds=DORAS,
        misreads="drops DoRA magnitudes; write it with --to diffusers",
    ),
    _DIFFUSERS(
        forms=("official",),
        naming=("official",),
        present=_RENAMED,
        misreads="does not know the official name of {module}; write it with --to diffusers",
    ),
    _DIFFUSERS(forms=_READ),
    _DIFFUSERS(misreads=f"loads nothing of it; {_CONVERT}"),
    *DIFFUSERS_ALONE,
)
"""What programs do with LTX-Video's adapter files; the tests run diffusers against it."""

RULES = AdapterRules(programs=ROWS)
"""Rules for LTX-Video's adapter files: which programs load them."""
