"""Forms of adapter files: how each names a module's matrices, and what a family says of their readers.

| form | key | scale |
|---|---|---|
| `official` | `diffusion_model.` + official name + `.lora_A.weight` | in B |
| `diffusers` | `transformer.` + diffusers name + `.lora_A.weight` | in B, and ranks in the header |
| `diffsynth` | name without a prefix + `.lora_A.default.weight` | in B |
| `musubi` | `lora_unet_` + official name with underscores + `.lora_down.weight` | `.alpha` |
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AdapterLayout:
    """How a file that was found says an adapter."""

    form: str
    """One of `ADAPTER_FORMS`, or `videox`, `onetrainer`, `peft`; `bare` without prefix or `.default`, `prefixed` with a model's own."""
    naming: str = "official"
    """Whose names the modules have, by `StateDictNames.from_native`; empty: ours."""
    alpha: bool = False
    """Whether there are keys `.alpha`."""
    up_down: bool = False
    """Whether the matrices are called `lora_up` and `lora_down`, not `lora_B` and `lora_A`."""
    use_dora: bool = False


@dataclass(frozen=True, kw_only=True)
class AdapterForm:
    """How a form that we write spells a key."""

    prefix: str
    down: str
    """What follows the module's name in the key of A."""
    up: str
    naming: str = ""
    """Whose names the modules have, by `StateDictNames.from_native`; empty: those that the family's files without a prefix have."""
    underscores: bool = False
    """Whether the dots of a module's name are underscores."""
    alpha: bool = False
    """Whether the scale is said by a key `.alpha`; otherwise it is multiplied into B, and alpha = rank."""

    def keys(self, module: str) -> dict[str, str]:
        """The keys of a module, by its name in this form: `down`, `up`, `alpha`, `magnitude`."""
        stem = self.prefix + (module.replace(".", "_") if self.underscores else module)
        parts = {"down": self.down, "up": self.up, "alpha": ".alpha", "magnitude": ".lora_magnitude_vector"}
        return {part: stem + ending for part, ending in parts.items()}

    def layout(self, form: str, bare: str, *, use_dora: bool) -> AdapterLayout:
        """The layout of a file in this form, whose name is `form`, of a family whose files without a prefix have names `bare`."""
        return AdapterLayout(
            form=form, naming=self.naming or bare, alpha=self.alpha, up_down="lora_down" in self.down, use_dora=use_dora
        )


ADAPTER_FORMS: Mapping[str, AdapterForm] = {
    "official": AdapterForm(
        prefix="diffusion_model.", naming="official", down=".lora_A.weight", up=".lora_B.weight"
    ),
    "diffusers": AdapterForm(prefix="transformer.", naming="diffusers", down=".lora_A.weight", up=".lora_B.weight"),
    "diffsynth": AdapterForm(prefix="", down=".lora_A.default.weight", up=".lora_B.default.weight"),
    "musubi": AdapterForm(
        prefix="lora_unet_", naming="official", down=".lora_down.weight", up=".lora_up.weight", underscores=True,
        alpha=True,
    ),
}  # fmt: skip
"""The forms that adapters are written in."""

FORM_OF_PREFIX: Mapping[str, str] = {
    "diffusion_model.": "official",
    "transformer.": "diffusers",
    "lora_unet__": "videox",
    "lora_unet_": "musubi",
    "lora_transformer_": "onetrainer",
    "base_model.model.": "peft",
}
"""The forms that are read, by the prefix of their keys; longer ones first."""

_ALSO_CALLED = {
    "comfyui": "official", "comfy": "official", "original": "official", "ai-toolkit": "official", "peft": "diffusers",
    "kohya": "musubi", "musubi-tuner": "musubi", "sd-scripts": "musubi", "diffsynth-studio": "diffsynth",
}  # fmt: skip


def nearest_form(name: str) -> str:
    """The form that a name which is none most likely means; empty if it is like none."""
    known = {**_ALSO_CALLED, **{form: form for form in ADAPTER_FORMS}}
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return known[close[0]] if close else ""


def _no_readers(layout: AdapterLayout, modules: Collection[str]) -> dict[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class AdapterRules:
    """What a family knows of adapter files that names do not say."""

    readers: Callable[[AdapterLayout, Collection[str]], Mapping[str, str]] = _no_readers
    """(layout of a file, adapted modules by our names) to programs that read such files: what each makes of it, empty where it loads all."""
    fillers: Callable[[str, Collection[str]], Collection[str]] = lambda form, modules: ()
    """(form to write, adapted modules by our names) to the modules which readers of the form want beside them: they are written as zeros."""
    strangers: Mapping[str, str] = field(default_factory=dict)
    """Patterns of names in other models' files to what such a file is of."""
