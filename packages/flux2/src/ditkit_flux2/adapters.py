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
from ditkit_core.models.adapter_formats import set_forms
from ditkit_core.models.adapter_programs import (
    DIFFERENCES_IN_DIFFUSERS,
    DORAS,
    LYCORIS,
    SD_SCRIPTS,
    UNTRIED,
    AdapterRules,
    ProgramRow,
    differences_in_comfyui,
    diffsynth_rows,
    musubi_rows,
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
                f"{set_forms(['diffusers'])}, or leave the module out of adapter.targets"
            )


_CONVERT = "write it with --to diffusers"
_ADALN = "head.adaLN_modulation.1"
_DROPPED = (
    r"^embed\.(guidance_in\.|double_stream_modulation_|single_stream_modulation\.)"
    r"|^head\.adaLN_modulation\.1"
)
"""Modules that diffusers skips, with a warning, in files with kohya's names."""
_LORAS = ("lora", *DORAS)
_DIFFUSERS = partial(ProgramRow, program="diffusers")
_IN_MUSUBI = partial(_DIFFUSERS, forms=("musubi",), kinds=_LORAS)
_IN_OFFICIAL = partial(_DIFFUSERS, forms=("official", "peft"), kinds=_LORAS)
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
    _DIFFUSERS(
        forms=("diffusers",),
        kinds=("lokr",),
        alpha=True,
        misreads="rejects keys of alpha; merge it",
    ),
    _DIFFUSERS(forms=("diffusers",), kinds=("lokr",)),
    _DIFFUSERS(
        forms=("diffusers",),
        kinds=_LORAS,
        alpha=True,
        misreads=f"rejects keys of alpha; {_CONVERT}",
    ),
    _DIFFUSERS(
        forms=("diffusers",),
        kinds=_LORAS,
        up_down=True,
        misreads=f"loads nothing of lora_up and lora_down, and only warns; {_CONVERT}",
    ),
    _DIFFUSERS(forms=("diffusers",), kinds=_LORAS),
    _IN_MUSUBI(
        present=_DROPPED,
        misreads=f"leaves {{module}} out of a file with these names, and only warns; {_CONVERT}",
    ),
    _IN_MUSUBI(kinds=DORAS, misreads=f"drops DoRA magnitudes; {_CONVERT}"),
    _IN_MUSUBI(),
    _IN_OFFICIAL(
        up_down=True,
        misreads="loads nothing of lora_up and lora_down behind diffusion_model., and only warns; "
        f"{_CONVERT}",
    ),
    _IN_OFFICIAL(alpha=True, misreads=f"rejects keys of alpha; {_CONVERT}"),
    _IN_OFFICIAL(
        naming=("official",),
        present=r"^head\.adaLN_modulation\.1$",
        misreads=f"misreads {{module}}: {MISREAD['official'][_ADALN]}; {_CONVERT}",
    ),
    _IN_OFFICIAL(kinds=DORAS, misreads=f"drops DoRA magnitudes; {_CONVERT}"),
    _IN_OFFICIAL(),
    _DIFFUSERS(kinds=_LORAS, misreads=f"loads nothing of it, and only warns; {_CONVERT}"),
    _DIFFUSERS(misreads="reads LoKr in the diffusers form alone, and no LoHa; merge it"),
    DIFFERENCES_IN_DIFFUSERS,
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
    *differences_in_comfyui(r"norm|modulation|^(?!(double|single)_blocks\.)"),
    *diffsynth_rows("diffusers"),
    *musubi_rows(),
    *LYCORIS,
    SD_SCRIPTS,
    *UNTRIED,
)
"""What programs do with FLUX.2's adapter files; the tests run diffusers against it, and
tools/clients the others."""

RULES = AdapterRules(
    programs=ROWS,
    one_to_one="diffusers",  # the official names have q, k and v in one
)
"""Rules for FLUX.2's adapter files: which programs load them."""
