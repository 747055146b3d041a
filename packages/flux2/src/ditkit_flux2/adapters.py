"""How other programs read FLUX.2's adapter files: which modules each ignores or misreads, form by form.

Measured by loading an adapter on each Linear layer alone, in each form, with diffusers 0.42: `Flux2LoraLoaderMixin` loads every
one of them, also those outside the blocks, and misreads one. Programs that keep the official names misread none, but a file that
two programs read differently is not written.
"""

from collections.abc import Collection, Mapping

from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import (
    NO_FACTORED,
    AdapterLayout,
    AdapterRules,
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
                f"the {form} form cannot store an adapter on {module} ({reason}); {set_forms(['diffusers'])}, "
                "or leave the module out of adapter.targets"
            )


_CONVERT = "write it with --to diffusers"
_ADALN = "head.adaLN_modulation.1"
_DROPPED = ("embed.guidance_in.", "embed.double_stream_modulation_", "embed.single_stream_modulation.", _ADALN)
"""Modules that diffusers skips, with a warning, in files with kohya's names."""


def _diffusers(layout: AdapterLayout, modules: Collection[str]) -> str:
    if layout.method != "lora" and _ADALN in modules:
        return f"has no reader of LoKr or LoHa, and {_ADALN} in another order; merge it"
    if layout.method != "lora":
        return NO_FACTORED
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


def _comfyui(layout: AdapterLayout) -> str:
    if layout.form in ("videox", "onetrainer", "peft", "lycoris", "prefixed"):
        return "is not known to load these names; write it with --to official"
    if layout.use_dora and not layout.dora_over_base:
        return "generates other images with magnitudes over another norm; write it with --to official"
    return ""


RULES = AdapterRules(
    readers=readers_by_program(_diffusers, _comfyui, "diffusers"),
    one_to_one="diffusers",  # the official names have q, k and v in one
)
"""Rules for FLUX.2's adapter files: which programs load them."""
