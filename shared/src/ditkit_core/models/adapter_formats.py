"""Forms of adapter files: how each form names a module's matrices, and what a family knows about
programs that read them.

| form | key | scale |
|---|---|---|
| `official` | `diffusion_model.` + official name + `.lora_A.weight` | in B |
| `diffusers` | `transformer.` + diffusers name + `.lora_A.weight` | in B, and ranks in the header |
| `diffsynth` | name without a prefix + `.lora_A.default.weight` | in B |
| `musubi` | `lora_unet_` + official name with underscores + `.lora_down.weight` | `.alpha` |
"""

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

DIFFERENCES = "differences"
"""`AdapterLayout.method` of a file that only adds to whole parameters."""


@dataclass(frozen=True, kw_only=True)
class AdapterLayout:
    """The layout of an adapter file that was read."""

    form: str
    """One of `ADAPTER_FORMS`, or `videox`, `onetrainer`, `peft`, `lycoris`; `bare` has no prefix
    and no `.default`, `prefixed` has a model's own prefix."""
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
class AdapterForm:
    """The keys of a form that ditkit writes."""

    prefix: str
    down: str
    """End of the key of A, after the module's name."""
    up: str
    """End of the key of B, after the module's name."""
    naming: str = ""
    """Form of the module names, a key of `StateDictNames.from_native`; empty for the names in the
    family's files without a prefix."""
    underscores: bool = False
    """Whether underscores replace the dots of a module's name."""
    alpha: bool = False
    """Whether a key `.alpha` stores the scale; otherwise the scale is multiplied into B, and alpha
    = rank."""
    dora: Literal["", "merged", "base"] = ""
    """The norm of a row that the form's readers divide DoRA's magnitudes by: of the merged weight,
    or of the base's; empty if they do neither."""

    lora_only: bool = False
    """Whether programs that read the form have no LoKr or LoHa."""

    def stem(self, module: str) -> str:
        """How the keys of a module begin, whose name is given in this form."""
        return self.prefix + (module.replace(".", "_") if self.underscores else module)

    def keys(self, module: str) -> dict[str, str]:
        """The keys of a module, whose name is given in this form: `down`, `up`, `alpha`,
        `magnitude`."""
        stem = self.stem(module)
        # peft's name without its last component, or ComfyUI's
        magnitude = ".dora_scale" if self.dora == "base" else ".lora_magnitude_vector"
        parts = {"down": self.down, "up": self.up, "alpha": ".alpha", "magnitude": magnitude}
        return {part: stem + ending for part, ending in parts.items()}

    def layout(
        self, form: str, bare: str, *, use_dora: bool, method: str = "lora"
    ) -> AdapterLayout:
        """The layout of a file in this form, whose name is `form`; `bare` is the form of names in
        the family's files without a prefix."""
        return AdapterLayout(
            form=form,
            naming=self.naming or bare,
            alpha=self.alpha,
            up_down="lora_down" in self.down,
            use_dora=use_dora,
            method=method,
            dora_over_base=use_dora and self.dora == "base",
        )


ADAPTER_FORMS: Mapping[str, AdapterForm] = {
    "official": AdapterForm(
        prefix="diffusion_model.",
        naming="official",
        down=".lora_A.weight",
        up=".lora_B.weight",
        dora="base",
    ),
    "diffusers": AdapterForm(
        prefix="transformer.",
        naming="diffusers",
        down=".lora_A.weight",
        up=".lora_B.weight",
        dora="merged",
    ),
    "diffsynth": AdapterForm(
        prefix="", down=".lora_A.default.weight", up=".lora_B.default.weight", lora_only=True
    ),
    "musubi": AdapterForm(
        prefix="lora_unet_",
        naming="official",
        down=".lora_down.weight",
        up=".lora_up.weight",
        underscores=True,
        alpha=True,
    ),
}

FORM_OF_PREFIX: Mapping[str, str] = {
    "diffusion_model.": "official",
    "transformer.": "diffusers",
    "lora_unet__": "videox",
    "lora_unet_": "musubi",
    "lora_transformer_": "onetrainer",
    "base_model.model.transformer.": "peft",  # of a module that holds the transformer
    "base_model.model.": "peft",
    "lycoris_": "lycoris",
}
"""The forms that ditkit reads, by the prefix of their keys; longer prefixes first, because
`lora_unet_` also matches `lora_unet__`."""

_ALSO_CALLED = {
    "comfyui": "official",
    "comfy": "official",
    "original": "official",
    "ai-toolkit": "official",
    "peft": "diffusers",
    "kohya": "musubi",
    "musubi-tuner": "musubi",
    "sd-scripts": "musubi",
    "diffsynth-studio": "diffsynth",
}
"""Names that people use for a form: mostly the program that reads it."""


def set_forms(forms: Sequence[str]) -> str:
    """How a user asks for other forms, for messages: by the key of a run, or by the export
    command's flag."""
    flags = " or ".join(f"--to {form}" for form in forms)
    return f"set export.forms = {list(forms)} (for the export command: {flags})"


def nearest_form(name: str) -> str:
    """The form that an unknown name most likely means; empty if no form is close."""
    forms_by_name = {**_ALSO_CALLED, **{form: form for form in ADAPTER_FORMS}}
    close = difflib.get_close_matches(name.lower(), forms_by_name, n=1)
    return forms_by_name[close[0]] if close else ""


NO_FACTORED = "has no reader of LoKr or LoHa; merge it"
"""What diffusers does with these."""

KINDS = ("lora", "dora", "dora_merged", "lokr", "loha")
"""Kinds of adapters, for `ProgramRow`: `dora` over the norm of the base, `dora_merged` over the
norm of the merged rows."""


@dataclass(frozen=True, kw_only=True)
class ProgramRow:
    """A row of a family's table of programs: what a program does with adapter files of some forms
    and kinds.

    rsLoRA and patterns of ranks are the kind `lora`: their files differ from a LoRA's in nothing
    that a reader sees.
    """

    program: str
    forms: Collection[str] = ()
    """As in `AdapterLayout.form`; empty for any."""
    naming: Collection[str] = ()
    """As in `AdapterLayout.naming`; empty for any."""
    kinds: Collection[str] = KINDS
    misreads: str = ""
    """Why it does not load such a file, as the predicate of a sentence about it; empty if it
    does."""
    unread: str = ""
    """Pattern of the modules, by our names, that it leaves out; empty if it knows all."""
    required: str = ""
    """Pattern of a module without which it loads nothing of the file; empty if it needs none."""
    instead: str = "merge it"
    """What to do where something is left out."""


Readers = Callable[[AdapterLayout, Collection[str]], Mapping[str, str]]


def kinds_of(layout: AdapterLayout) -> set[str]:
    """The kinds of adapters in a file, of `KINDS`."""
    dora = "dora" if layout.dora_over_base else "dora_merged"
    kinds = set(layout.method.split(" and "))
    return (kinds - {"lora"}) | {dora} if layout.use_dora else kinds


def readers_by_program(
    rows: Sequence[ProgramRow], diffusers: Callable[[AdapterLayout, Collection[str]], str]
) -> Readers:
    """What is wrong with a family's files, by program (`AdapterRules.readers`).

    Args:
        rows: The table. A program's first row with the file's form, names and kinds counts.
        diffusers: What diffusers ignores or misreads, empty if it loads all: it depends on more
            than a row can say.
    """

    def readers(layout: AdapterLayout, modules: Collection[str]) -> dict[str, str]:
        by_program = {"diffusers": diffusers(layout, modules)}
        for program in dict.fromkeys(row.program for row in rows):
            by_program[program] = _read_by(
                [row for row in rows if row.program == program], layout, modules
            )
        return by_program

    return readers


def _read_by(rows: Sequence[ProgramRow], layout: AdapterLayout, modules: Collection[str]) -> str:
    """What a program, whose rows these are, ignores or misreads in a file; empty if it loads all of
    it."""
    kinds = kinds_of(layout)
    for row in rows:
        is_form = not row.forms or layout.form in row.forms
        is_naming = not row.naming or layout.naming in row.naming
        if not (is_form and is_naming and kinds <= set(row.kinds)):
            continue
        if row.misreads:
            return row.misreads
        if row.required and not any(re.search(row.required, name) for name in modules):
            return f"loads nothing of it, and only warns; {row.instead}"
        left = [name for name in modules if row.unread and re.search(row.unread, name)]
        if not left:
            return ""
        if len(left) == len(modules):
            return f"loads nothing of it, and only warns; {row.instead}"
        return (
            f"loads a part of it: leaves {len(left)} of {len(modules)} modules out "
            f"({left[0]} …), and only warns; {row.instead}"
        )
    return "is not known to load it"


def diffsynth_rows(naming: str) -> tuple[ProgramRow, ...]:
    """DiffSynth's rows, for a family whose modules have the names of the form `naming` there."""
    row = partial(ProgramRow, program="DiffSynth")
    readable = partial(row, forms=("official", "diffsynth", "bare"), naming=(naming,))
    return (
        readable(kinds=("lora",)),
        readable(kinds=("dora", "dora_merged"), misreads="leaves DoRA magnitudes out; merge it"),
        row(kinds=("lora",), misreads="loads nothing of it; write it with --to diffsynth"),
        row(kinds=("dora", "dora_merged"), misreads="loads nothing of it; merge it"),
        row(misreads="has no LoKr or LoHa; merge it"),
    )


def musubi_rows(*, unread: str = "") -> tuple[ProgramRow, ...]:
    """musubi-tuner's rows; its model of the family lacks the modules that match `unread`."""
    row = partial(ProgramRow, program="musubi-tuner")
    return (
        row(forms=("musubi",), naming=("official",), kinds=("lora", "lokr", "loha"), unread=unread),
        row(kinds=("dora", "dora_merged"), misreads="has no DoRA; merge it"),
        row(misreads="wants --to musubi"),
    )


@dataclass(frozen=True, kw_only=True)
class AdapterRules:
    """What a family knows about its adapter files besides the names of tensors."""

    readers: Readers = lambda layout, modules: {}
    """(layout of a file, adapted modules by our names) to, by program, what that program ignores or
    misreads; empty text if it loads all."""
    fillers: Callable[[str, Collection[str]], Collection[str]] = lambda form, modules: ()
    """(form to write, adapted modules by our names) to further modules that readers of the form
    require; they are written as zeros."""
    one_to_one: str = "official"
    """The form for ComfyUI whose names are each for one of our layers, as a LoKr or LoHa needs
    it."""
