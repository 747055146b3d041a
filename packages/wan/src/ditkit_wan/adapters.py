"""How other programs read Wan's adapter files, form by form.

The tests check the installed diffusers, and tools/clients the other programs
(benchmarks/clients.md).
"""

import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from ditkit_core.models.adapter_formats import (
    NO_FACTORED,
    AdapterLayout,
    AdapterRules,
    ProgramRow,
    diffsynth_rows,
    musubi_rows,
    readers_by_program,
)

_BLOCK = re.compile(r"layers\.(\d+)\.(.+)")
_KINDS = (
    *(f"{attention}.{matrix}" for attention in ("self_attn", "cross_attn") for matrix in "qkvo"),
    "ffn.0",
    "ffn.2",
)
_IMAGE_KINDS = ("cross_attn.k_img", "cross_attn.v_img")
_NOT_IN_DIFFUSERS = re.compile(
    r"\.(music|audio)\.|^embed\.speech\.|^embed\.(ref_conv|control_adapter|img_emb_refimage|patch_embedding_global)|^head\.head_global"
)
"""Modules of models that diffusers lacks."""
_REJECTED = ("vace_blocks.", "embed.vace_", "embed.animate.")
"""Starts of modules that diffusers has, and does not read by their official names."""
_NO_MODEL = "has no such model; generate with a program that has it"
_CONVERT = "convert it with --to official"
_NOT_IN_MUSUBI = (
    r"^vace_blocks\.|^embed\.vace_|^embed\.animate\.|\.face\.|" + _NOT_IN_DIFFUSERS.pattern
)
"""Modules of models that musubi-tuner lacks."""


def fillers(form: str, modules: Collection[str]) -> list[str]:
    """The modules without an adapter that diffusers expects in a musubi file: every layer of each
    block, from the first block on.

    diffusers looks each key up and fails where one is missing. Other programs that read that form
    load the keys that exist.
    """
    numbers = [int(match[1]) for name in modules if (match := _BLOCK.fullmatch(name))]
    if form != "musubi" or not numbers:
        return []
    kinds = (*_KINDS, *(_IMAGE_KINDS if _image_kinds(modules) else ()))
    wanted = [f"layers.{number}.{kind}" for number in range(max(numbers) + 1) for kind in kinds]
    return [name for name in wanted if name not in modules]


def _image_kinds(modules: Collection[str]) -> set[str]:
    return {kind for kind in _IMAGE_KINDS if any(name.endswith(kind) for name in modules)}


def _diffusers(layout: AdapterLayout, modules: Collection[str]) -> str:
    if any(_NOT_IN_DIFFUSERS.search(name) for name in modules):
        return _NO_MODEL
    if layout.method != "lora":
        return NO_FACTORED
    outside = [name for name in modules if not _BLOCK.fullmatch(name) or ".face." in name]
    if layout.form == "diffusers":
        return f"rejects keys of alpha; {_CONVERT}" if layout.alpha else ""
    if layout.form == "videox":
        return f"rejects lora_unet__ with two underscores; {_CONVERT}"
    if layout.form == "musubi":
        if outside:
            return f"rejects {outside[0]} in these names; {_CONVERT}"
        if not layout.alpha or fillers("musubi", modules):
            return "rejects it: in these names it wants every layer of each block, and alpha; write it with --to musubi, or --to official"
        return "drops DoRA magnitudes; write it with --to diffusers" if layout.use_dora else ""
    if layout.form != "official":
        return f"loads nothing of it, and only warns; {_CONVERT}"
    if layout.naming != "official":
        return f"rejects these names behind diffusion_model.; {_CONVERT}"
    if rejected := [name for name in outside if name.startswith(_REJECTED) or ".face." in name]:
        return f"rejects {rejected[0]} in these names; write it with --to diffusers"
    if len(outside) == len(modules):
        return "rejects a file without an adapter in the blocks; write it with --to diffusers"
    if layout.alpha and outside:
        return f"rejects alpha of {outside[0]}; {_CONVERT}"
    if len(_image_kinds(modules)) == 1:
        return "rejects k_img without v_img, and the other way round; write it with --to diffusers"
    return "drops DoRA magnitudes; write it with --to diffusers" if layout.use_dora else ""


_OTHER_NORM = (
    "generates other videos with magnitudes over another norm; write it with --to official"
)
_COMFYUI = partial(ProgramRow, program="ComfyUI")
ROWS = (
    _COMFYUI(
        forms=("official", "musubi"), naming=("official",), kinds=("lora", "dora", "lokr", "loha")
    ),
    _COMFYUI(
        forms=("videox",),
        kinds=("lora", "dora", "lokr", "loha"),
        required=r"^layers\.0\.cross_attn\.k$",  # the key that it knows these files by
        instead=_CONVERT,
    ),
    _COMFYUI(
        forms=("official", "musubi", "videox"),
        naming=("official",),
        kinds=("dora_merged", "lora"),
        misreads=_OTHER_NORM,
    ),
    _COMFYUI(misreads=f"loads nothing of it, and only warns; {_CONVERT}"),
    *diffsynth_rows("official"),
    *musubi_rows(unread=_NOT_IN_MUSUBI),
)
"""What other programs than diffusers do with Wan's adapter files; tools/clients runs them against
it."""

RULES = AdapterRules(readers=readers_by_program(ROWS, _diffusers), fillers=fillers)
"""Rules for Wan's adapter files: which programs load them."""

RULES_WITHOUT_DIFFUSERS = replace(
    RULES, readers=readers_by_program(ROWS, lambda layout, modules: _NO_MODEL)
)
"""The same for an architecture that diffusers has no model of."""
