"""Forms of adapter files: a row for each in `FORMATS`."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

DIFFERENCES = "differences"
"""`AdapterLayout.method` of a file that only adds to whole parameters."""
VERIFIED = "ditkit.verified"
"""Key in the header of an exported file: what verifies it, or that nothing can."""
NO_READER = "no reader: "
"""Start of its value where nothing can."""


@dataclass(frozen=True, kw_only=True)
class AdapterLayout:
    """The layout of an adapter file that was read."""

    form: str
    """Name of a row of `FORMATS`."""
    naming: str = "official"
    """Form of the module names, a key of `StateDictNames.from_native`; empty for our names."""
    alpha: bool = False
    """Whether the file has keys `.alpha`."""
    up_down: bool = False
    """Whether the matrices are named `lora_up` and `lora_down` instead of `lora_B` and `lora_A`."""
    use_dora: bool = False
    method: str = "lora"
    """`lora`, `lokr` or `loha`; several in a file that has several; `differences` where it has none
    of them."""
    dora_over_base: bool = False
    """Whether the magnitudes are over the norm of the base's rows, as ComfyUI reads them; otherwise
    over the norm of the merged rows."""


@dataclass(frozen=True, kw_only=True)
class KeyFormat:
    """A form of adapter files: how it names the tensors of a module.

    A key is a prefix, the module's name and an ending. Every row is read; those with `down` and
    `up` are written too.
    """

    name: str
    title: str
    """The form as `--inspect` calls it."""
    prefixes: tuple[str, ...] = ()
    """How keys begin; the first is written. Empty for a prefix that no row has."""
    ending: str = ""
    """Pattern of the end of A's key, where the prefix does not tell; empty for any."""
    down: str = ""
    """End of the key of A, after the module's name."""
    up: str = ""
    """End of the key of B, after the module's name."""
    naming: str = ""
    """Form of the module names, a key of `StateDictNames.from_native`; empty for the names in the
    family's files without a prefix."""
    underscores: bool = False
    """Whether underscores replace the dots of a module's name."""
    scale: Literal["folded", "header", "alpha"] = "folded"
    """Where a scale is written: into B, so that alpha = rank; the same, with the ranks in a
    header as diffusers has it; or in a key `.alpha`, with B as it is."""
    dora: Literal["", "merged", "base"] = ""
    """The norm of a row that the form's readers divide DoRA's magnitudes by: of the merged weight,
    or of the base's; empty if they do neither."""
    lora_only: bool = False
    """Whether programs that read the form have no LoKr or LoHa."""
    aliases: tuple[str, ...] = ()
    """Names that people use for it: mostly the program that reads it."""

    def stem(self, module: str) -> str:
        """How the keys of a module begin, whose name is given in this form."""
        return self.prefixes[0] + (module.replace(".", "_") if self.underscores else module)

    def keys(self, module: str) -> dict[str, str]:
        """The keys of a module, whose name is given in this form: `down`, `up`, `alpha`,
        `magnitude`."""
        # peft's name without its last component, or ComfyUI's
        magnitude = ".dora_scale" if self.dora == "base" else ".lora_magnitude_vector"
        parts = {"down": self.down, "up": self.up, "alpha": ".alpha", "magnitude": magnitude}
        return {part: self.stem(module) + ending for part, ending in parts.items()}

    def layout(self, bare: str, *, use_dora: bool, method: str = "lora") -> AdapterLayout:
        """The layout of a file that is written in this form; `bare` is the form of names in the
        family's files without a prefix."""
        return AdapterLayout(
            form=self.name,
            naming=self.naming or bare,
            alpha=self.scale == "alpha",
            up_down="lora_down" in self.down,
            use_dora=use_dora,
            method=method,
            dora_over_base=use_dora and self.dora == "base",
        )


_ROWS = (
    KeyFormat(
        name="official",
        title="official names, as ComfyUI has them (diffusion_model.)",
        prefixes=("diffusion_model.",),
        down=".lora_A.weight",
        up=".lora_B.weight",
        naming="official",
        dora="base",
        aliases=("comfyui", "comfy", "original", "ai-toolkit"),
    ),
    KeyFormat(
        name="diffusers",
        title="diffusers (transformer.)",
        prefixes=("transformer.",),
        down=".lora_A.weight",
        up=".lora_B.weight",
        naming="diffusers",
        scale="header",
        dora="merged",
        aliases=("peft",),
    ),
    KeyFormat(
        name="diffsynth",
        title="DiffSynth (no prefix, .default)",
        prefixes=("",),
        ending=r"^\.\w+\.[\w-]+\.weight$",
        down=".lora_A.default.weight",
        up=".lora_B.default.weight",
        lora_only=True,
        aliases=("diffsynth-studio",),
    ),
    KeyFormat(
        name="musubi",
        title="musubi, kohya (lora_unet_)",
        prefixes=("lora_unet_",),
        down=".lora_down.weight",
        up=".lora_up.weight",
        naming="official",
        underscores=True,
        scale="alpha",
        aliases=("kohya", "musubi-tuner", "sd-scripts"),
    ),
    KeyFormat(name="videox", title="VideoX-Fun (lora_unet__)", prefixes=("lora_unet__",)),
    KeyFormat(
        name="onetrainer", title="OneTrainer (lora_transformer_)", prefixes=("lora_transformer_",)
    ),
    KeyFormat(
        name="peft",
        title="peft (base_model.model.)",
        # The second is of a module that holds the transformer.
        prefixes=("base_model.model.", "base_model.model.transformer."),
    ),
    KeyFormat(
        name="lycoris", title="LyCORIS' wrapper, SimpleTuner (lycoris_)", prefixes=("lycoris_",)
    ),
    KeyFormat(name="bare", title="names without a prefix", prefixes=("",)),
    KeyFormat(name="prefixed", title="a whole model's own prefix"),
)
FORMATS: Mapping[str, KeyFormat] = {row.name: row for row in _ROWS}
"""The forms of adapter files, by name; a file's form is the first that fits its keys."""
ADAPTER_FORMS: Mapping[str, KeyFormat] = {row.name: row for row in _ROWS if row.down}
"""The forms that ditkit writes."""
PREFIXES = sorted({prefix for row in _ROWS for prefix in row.prefixes}, key=len, reverse=True)
"""How keys begin, longer prefixes first: `lora_unet_` also begins a key with `lora_unet__`."""


def form_of(prefix: str, ending: str) -> str:
    """The form of a key of A, by its prefix and what follows the module's name."""
    rows = (row for row in FORMATS.values() if prefix in row.prefixes)
    return next((row.name for row in rows if re.search(row.ending, ending)), "prefixed")


def set_forms(forms: Sequence[str]) -> str:
    """How a user asks for other forms, for messages: by the key of a run, or by the export
    command's flag."""
    flags = " or ".join(f"--to {form}" for form in forms)
    return f"set export.forms = {list(forms)} (for the export command: {flags})"


def nearest_form(name: str) -> str:
    """The form that an unknown name most likely means; empty if no form is close."""
    forms = {
        alias: row.name for row in ADAPTER_FORMS.values() for alias in (row.name, *row.aliases)
    }
    close = difflib.get_close_matches(name.lower(), forms, n=1)
    return forms[close[0]] if close else ""
