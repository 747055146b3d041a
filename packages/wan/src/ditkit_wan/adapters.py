"""How other programs read Wan's adapter files, form by form.

The tests check the installed diffusers, and tools/clients the other programs
(benchmarks/clients.md).
"""

import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from ditkit_core.models.adapter_programs import (
    ALL_KINDS,
    DIFFERENCES_IN_DIFFUSERS,
    DORAS,
    LYCORIS,
    NO_FACTORED,
    NO_MODEL,
    SD_SCRIPTS,
    UNTRIED,
    AdapterRules,
    ProgramRow,
    differences_in_comfyui,
    diffsynth_rows,
    musubi_rows,
)

_BLOCK = re.compile(r"layers\.(\d+)\.(.+)")
_KINDS = (
    *(f"{attention}.{matrix}" for attention in ("self_attn", "cross_attn") for matrix in "qkvo"),
    "ffn.0",
    "ffn.2",
)
_IMAGE_KINDS = ("cross_attn.k_img", "cross_attn.v_img")
_NOT_IN_DIFFUSERS = r"\.(music|audio)\.|^embed\.speech\.|^embed\.(ref_conv|control_adapter|img_emb_refimage|patch_embedding_global)|^head\.head_global"
"""Modules of models that diffusers lacks."""
_REJECTED = r"^vace_blocks\.|^embed\.(vace_|animate\.)|\.face\."
"""Modules that diffusers has, and does not read by their official names."""
_IN_BLOCKS = r"^layers\.\d+\.(?!.*face\.)"
_OUTSIDE = r"^(?!layers\.\d+\.)|\.face\."
_NO_MODEL = "has no such model; generate with a program that has it"
_CONVERT = "convert it with --to official"
_NOT_IN_MUSUBI = f"{_REJECTED}|{_NOT_IN_DIFFUSERS}"
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


_OTHER_NORM = (
    "generates other videos with magnitudes over another norm; write it with --to official"
)
_DIFFUSERS = partial(ProgramRow, program="diffusers", kinds=("lora", *DORAS))
_IN_MUSUBI = partial(_DIFFUSERS, forms=("musubi",))
_IN_OFFICIAL = partial(_DIFFUSERS, forms=("official",), naming=("official",))
_DIFFUSERS_FORM = "write it with --to diffusers"
_NOT_WHOLE = (
    "rejects it: in these names it wants every layer of each block, and alpha; "
    "write it with --to musubi, or --to official"
)
_HALF_IMAGE = f"rejects k_img without v_img, and the other way round; {_DIFFUSERS_FORM}"
_COMFYUI = partial(ProgramRow, program="ComfyUI")
ROWS = (
    ProgramRow(program="diffusers", present=_NOT_IN_DIFFUSERS, misreads=_NO_MODEL),
    _DIFFUSERS(forms=("diffusers",), alpha=True, misreads=f"rejects keys of alpha; {_CONVERT}"),
    _DIFFUSERS(
        forms=("diffusers",), up_down=True, misreads=f"rejects lora_up and lora_down; {_CONVERT}"
    ),
    _DIFFUSERS(forms=("diffusers",)),
    _DIFFUSERS(forms=("videox",), misreads=f"rejects lora_unet__ with two underscores; {_CONVERT}"),
    _IN_MUSUBI(present=_OUTSIDE, misreads=f"rejects {{module}} in these names; {_CONVERT}"),
    _IN_MUSUBI(alpha=False, misreads=_NOT_WHOLE),
    _IN_MUSUBI(when=lambda modules: bool(fillers("musubi", modules)), misreads=_NOT_WHOLE),
    _IN_MUSUBI(kinds=DORAS, misreads=f"drops DoRA magnitudes; {_DIFFUSERS_FORM}"),
    _IN_MUSUBI(),
    _IN_OFFICIAL(
        present=_REJECTED, misreads=f"rejects {{module}} in these names; {_DIFFUSERS_FORM}"
    ),
    _IN_OFFICIAL(
        absent=_IN_BLOCKS,
        misreads=f"rejects a file without an adapter in the blocks; {_DIFFUSERS_FORM}",
    ),
    _IN_OFFICIAL(alpha=True, present=_OUTSIDE, misreads=f"rejects alpha of {{module}}; {_CONVERT}"),
    _IN_OFFICIAL(present=r"cross_attn\.k_img$", absent=r"cross_attn\.v_img$", misreads=_HALF_IMAGE),
    _IN_OFFICIAL(present=r"cross_attn\.v_img$", absent=r"cross_attn\.k_img$", misreads=_HALF_IMAGE),
    _IN_OFFICIAL(kinds=DORAS, misreads=f"drops DoRA magnitudes; {_DIFFUSERS_FORM}"),
    _IN_OFFICIAL(),
    _DIFFUSERS(
        forms=("official",), misreads=f"rejects these names behind diffusion_model.; {_CONVERT}"
    ),
    _DIFFUSERS(misreads=f"loads nothing of it, and only warns; {_CONVERT}"),
    ProgramRow(program="diffusers", misreads=NO_FACTORED),
    DIFFERENCES_IN_DIFFUSERS,
    _COMFYUI(
        forms=("official", "musubi"), naming=("official",), kinds=("lora", "dora", "lokr", "loha")
    ),
    _COMFYUI(
        forms=("videox",),
        kinds=("lora", "dora", "lokr", "loha"),
        absent=r"^layers\.0\.cross_attn\.k$",  # the key that it knows these files by
        misreads=f"loads nothing of it without layers.0.cross_attn.k, and only warns; {_CONVERT}",
    ),
    _COMFYUI(forms=("videox",), kinds=("lora", "dora", "lokr", "loha")),
    _COMFYUI(
        forms=("official", "musubi", "videox"),
        naming=("official",),
        kinds=("dora_merged", "lora"),
        misreads=_OTHER_NORM,
    ),
    _COMFYUI(misreads=f"loads nothing of it, and only warns; {_CONVERT}"),
    *differences_in_comfyui(r"norm|modulation|^(?!layers\.)"),
    *diffsynth_rows("official"),
    *musubi_rows(unread=_NOT_IN_MUSUBI),
    ProgramRow(program="OneTrainer", kinds=ALL_KINDS, misreads=NO_MODEL),
    *LYCORIS,
    SD_SCRIPTS,
    *UNTRIED,
)
"""What programs do with Wan's adapter files; the tests run diffusers against it, and tools/clients
the others."""

RULES = AdapterRules(programs=ROWS, fillers=fillers)
"""Rules for Wan's adapter files: which programs load them."""

RULES_WITHOUT_DIFFUSERS = replace(
    RULES, programs=(ProgramRow(program="diffusers", misreads=_NO_MODEL), *ROWS)
)
"""The same for an architecture that diffusers has no model of."""
