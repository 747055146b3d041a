"""How other programs read FLUX.2's adapter files: which modules each ignores or misreads, form by
form.

Measured by loading an adapter on each Linear layer alone, in each form, with diffusers 0.42:
`Flux2LoraLoaderMixin` loads every one of them, also those outside the blocks, and misreads one.
Programs that keep the official names misread none, but a file that two programs read differently is
not written.
"""

from collections.abc import Collection, Mapping
from functools import partial

from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import (
    AdapterLayout,
    AdapterRules,
    ProgramRow,
    diffsynth_rows,
    musubi_rows,
    readers_by_program,
    set_forms,
)

MISREAD: Mapping[str, Mapping[str, str]] = {
    "official": {
        "head.adaLN_modulation.1": "diffusers renames it but leaves shift and scale in the official order, which is not its own"
    }
}
"""What goes wrong, by form and by our name of the module."""


def check_adapter(form: str, modules: Collection[str]) -> None:
    """Refuse a form in which a reader would ignore or misread an adapted module.

    Args:
        form: The form of the file.
        modules: The adapted modules, by our names.

    Raises:
        UserError: If a module is misread; the message names the module and another form.
    """
    # An error, not a warning: diffusers loads such a file without a word, and its images are wrong.
    for module, reason in MISREAD.get(form, {}).items():
        if module in modules:
            raise UserError(
                f"the {form} form cannot store an adapter on {module} ({reason}); "
                f"{set_forms(['diffusers'])}, "
                "or leave the module out of adapter.targets"
            )


_CONVERT = "write it with --to diffusers"
_ADALN = "head.adaLN_modulation.1"
_DROPPED = (
    "embed.guidance_in.",
    "embed.double_stream_modulation_",
    "embed.single_stream_modulation.",
    _ADALN,
)
"""Modules that diffusers skips, with a warning, in files with kohya's names."""


def _diffusers(layout: AdapterLayout, modules: Collection[str]) -> str:
    if layout.method == "lokr" and layout.form == "diffusers":
        return "rejects keys of alpha; merge it" if layout.alpha else ""
    if layout.method != "lora":
        return "reads LoKr in the diffusers form alone, and no LoHa; merge it"
    if layout.form == "diffusers":
        return f"rejects keys of alpha; {_CONVERT}" if layout.alpha else ""
    if layout.form == "musubi":
        if dropped := [name for name in modules if name.startswith(_DROPPED)]:
            return f"leaves {dropped[0]} out of a file with these names, and only warns; {_CONVERT}"
        return f"drops DoRA magnitudes; {_CONVERT}" if layout.use_dora else ""
    if layout.form not in ("official", "peft"):
        return f"loads nothing of it, and only warns; {_CONVERT}"
    if layout.up_down:
        return f"loads nothing of lora_up and lora_down behind diffusion_model., and only warns; {_CONVERT}"
    if layout.alpha:
        return f"rejects keys of alpha; {_CONVERT}"
    if layout.naming == "official" and _ADALN in modules:
        return f"misreads {_ADALN}: {MISREAD['official'][_ADALN]}; {_CONVERT}"
    return f"drops DoRA magnitudes; {_CONVERT}" if layout.use_dora else ""


_UNKNOWN_TO_COMFYUI = (
    r"^embed\.(double_stream_modulation_|single_stream_modulation|time_in|guidance_in)"
)
"""Modules whose names in diffusers ComfyUI lacks: it has the ones in FLUX.1."""
_COMFYUI = partial(ProgramRow, program="ComfyUI")
_IN_DIFFUSERS_NAMES = partial(
    _COMFYUI,
    forms=("diffusers", "diffsynth", "bare", "onetrainer", "lycoris"),
    naming=("diffusers",),
    unread=_UNKNOWN_TO_COMFYUI,
)
_OFFICIAL = "write it with --to official, or merge it"
ROWS = (
    _COMFYUI(
        forms=("official", "musubi"), naming=("official",), kinds=("lora", "dora", "lokr", "loha")
    ),
    _IN_DIFFUSERS_NAMES(kinds=("lora",), instead="write it with --to musubi"),
    _IN_DIFFUSERS_NAMES(kinds=("dora",), instead=_OFFICIAL),
    _IN_DIFFUSERS_NAMES(kinds=("lora", "lokr", "loha")),
    _COMFYUI(
        kinds=("dora_merged",),
        misreads=f"generates other images with magnitudes over another norm; {_OFFICIAL}",
    ),
    _COMFYUI(
        kinds=("lora",), misreads="loads nothing of it, and only warns; write it with --to musubi"
    ),
    _COMFYUI(misreads="loads nothing of it, and only warns; merge it"),
    *diffsynth_rows("diffusers"),
    *musubi_rows(),
)
"""What other programs than diffusers do with FLUX.2's adapter files; tools/clients runs them
against it."""

RULES = AdapterRules(
    readers=readers_by_program(ROWS, _diffusers),
    one_to_one="diffusers",  # the official names have q, k and v in one
)
"""Rules for FLUX.2's adapter files: which programs load them."""
