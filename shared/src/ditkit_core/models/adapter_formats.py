"""Forms of adapter files, a row for each (`FORMATS`), and what a family knows about programs that
read them."""

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
