"""Programs that read adapter files, and what each does with a file: a family's table of rows."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from ditkit_core.models.adapter_formats import DIFFERENCES, AdapterLayout

NO_FACTORED = "has no reader of LoKr or LoHa; merge it"
"""What diffusers does with these."""
NO_MODEL = "has no such model"
"""What is said of a program that lacks the family."""
NOT_TRIED = "was not tried"
"""What is said of a program that nobody ran with such a file."""

DORAS = ("dora", "dora_merged")
"""Kinds of DoRA: over the norm of the base's rows, and of the merged rows."""
KINDS = ("lora", *DORAS, "lokr", "loha")
"""Kinds of low-rank adapters."""
ALL_KINDS = (*KINDS, DIFFERENCES)
"""Also files that only have differences of whole parameters."""


@dataclass(frozen=True, kw_only=True)
class ProgramRow:
    """A row of a family's table of programs: what a program does with adapter files that fit the
    row.

    rsLoRA and patterns of ranks are the kind `lora`: their files differ from a LoRA's in nothing
    that a reader sees.
    """

    program: str
    forms: Collection[str] = ()
    """As in `AdapterLayout.form`; empty for any."""
    naming: Collection[str] = ()
    """As in `AdapterLayout.naming`; empty for any."""
    kinds: Collection[str] = KINDS
    """A file fits that has no other kind."""
    alpha: bool | None = None
    """As in `AdapterLayout.alpha`; None for either."""
    up_down: bool | None = None
    """As in `AdapterLayout.up_down`; None for either."""
    present: str = ""
    """Pattern of modules, by our names: the file has one."""
    absent: str = ""
    """Pattern of modules: the file has none."""
    when: Callable[[Collection[str]], bool] = lambda modules: True
    """Whether a file with these modules fits, where patterns cannot say it."""
    misreads: str = ""
    """Why the program does not load such a file, as the predicate of a sentence about it; empty if
    it does. `{module}` is the first module that `present` fits."""
    unread: str = ""
    """Pattern of the modules that it leaves out; empty if it knows all."""
    instead: str = "merge it"
    """What to do where something is left out."""

    def fits(self, layout: AdapterLayout, modules: Collection[str]) -> bool:
        """Whether a file with this layout and adapters of these modules is one of the row's."""
        return (
            (not self.forms or layout.form in self.forms)
            and (not self.naming or layout.naming in self.naming)
            and kinds_of(layout) <= set(self.kinds)
            and self.alpha in (None, layout.alpha)
            and self.up_down in (None, layout.up_down)
            and (not self.present or any(re.search(self.present, name) for name in modules))
            and not (self.absent and any(re.search(self.absent, name) for name in modules))
            and self.when(modules)
        )

    def problem(self, modules: Collection[str]) -> str:
        """What the program ignores or misreads of a file that fits; empty if it loads all of it."""
        if self.misreads:
            first = next((name for name in modules if re.search(self.present, name)), "")
            return self.misreads.replace("{module}", first)
        left = [name for name in modules if self.unread and re.search(self.unread, name)]
        if not left:
            return ""
        if len(left) == len(modules):
            return f"loads nothing of it, and only warns; {self.instead}"
        return (
            f"loads a part of it: leaves {len(left)} of {len(modules)} modules out "
            f"({left[0]} …), and only warns; {self.instead}"
        )


def kinds_of(layout: AdapterLayout) -> set[str]:
    """The kinds of adapters in a file, of `ALL_KINDS`."""
    dora = "dora" if layout.dora_over_base else "dora_merged"
    kinds = set(layout.method.split(" and "))
    return (kinds - {"lora"}) | {dora} if layout.use_dora else kinds


UNTRIED = tuple(
    ProgramRow(program=program, kinds=ALL_KINDS, misreads=NOT_TRIED)
    for program in ("OneTrainer", "ai-toolkit")
)
"""Rows of programs that nobody ran with a family's files."""

LYCORIS = (
    ProgramRow(
        program="LyCORIS",
        forms=("lycoris",),
        alpha=False,
        misreads="rejects a file without keys of alpha; merge it",
    ),
    ProgramRow(
        program="LyCORIS", forms=("lycoris",), kinds=("lora", "dora_merged", "lokr", "loha")
    ),
    ProgramRow(program="LyCORIS", misreads="loads nothing of it; merge it"),
)
"""LyCORIS' rows: it reads the keys that it writes, with the names of any model that it is applied
to."""
SD_SCRIPTS = ProgramRow(program="sd-scripts", kinds=ALL_KINDS, misreads=NO_MODEL)
"""The row of kohya's scripts (as of February 2026), for a family that they lack."""

DIFFERENCES_IN_DIFFUSERS = ProgramRow(
    program="diffusers",
    kinds=(DIFFERENCES,),
    misreads="loads no file of differences alone; merge it",
)
"""diffusers 0.42 rejects such a file in some forms, and changes nothing in the others."""

DIFFUSERS_ALONE = (
    ProgramRow(program="diffusers", kinds=KINDS, misreads=NO_FACTORED),
    DIFFERENCES_IN_DIFFUSERS,
    *(
        ProgramRow(program=program, kinds=ALL_KINDS, misreads=NOT_TRIED)
        for program in ("ComfyUI", "DiffSynth", "musubi-tuner", "LyCORIS")
    ),
    SD_SCRIPTS,
    *UNTRIED,
)
"""The last rows of a family whose files were tried with diffusers alone, which reads no LoKr and no
LoHa of it."""

_OFFICIAL = "write it with --to official"
_DIFFUSERS = partial(ProgramRow, program="diffusers", kinds=("lora",))
DIFFUSERS_BY_CONVERTER = (
    _DIFFUSERS(forms=("bare",), alpha=True),
    _DIFFUSERS(forms=("official", "diffsynth", "musubi")),
    _DIFFUSERS(forms=("diffusers",), alpha=True, misreads=f"rejects keys of alpha; {_OFFICIAL}"),
    _DIFFUSERS(
        forms=("diffusers",), up_down=True, misreads=f"rejects lora_up and lora_down; {_OFFICIAL}"
    ),
    _DIFFUSERS(forms=("diffusers",), kinds=("lora", *DORAS)),
    _DIFFUSERS(
        forms=("official",),
        kinds=DORAS,
        misreads="drops DoRA magnitudes; write it with --to diffusers",
    ),
    _DIFFUSERS(kinds=("lora", *DORAS), misreads=f"loads nothing of it; {_OFFICIAL}"),
    *DIFFUSERS_ALONE,
)
"""All rows of a family that was tried with diffusers alone, whose loader has a converter, which
runs where a key begins with `diffusion_model.` or `lora_unet_`, or a file has `default.` or alpha.
Measured with diffusers 0.42 by loading an adapter of every layer in each form."""


def differences_in_comfyui(
    untried: str, *, unread: str = "", instead: str = "merge it"
) -> tuple[ProgramRow, ...]:
    """ComfyUI's rows for files of differences alone.

    Args:
        untried: Pattern of modules and parameters that nobody tried.
        unread: Pattern of those that it leaves out in the `musubi` form.
        instead: What to do with these.
    """
    row = partial(ProgramRow, program="ComfyUI", naming=("official",), kinds=(DIFFERENCES,))
    return (
        row(present=untried, misreads=f"{NOT_TRIED} with differences of {{module}}"),
        row(forms=("official",)),
        row(forms=("musubi",), unread=unread, instead=instead),
    )


def diffsynth_rows(naming: str) -> tuple[ProgramRow, ...]:
    """DiffSynth's rows, for a family whose modules have the names of the form `naming` there."""
    row = partial(ProgramRow, program="DiffSynth")
    readable = partial(row, forms=("official", "diffsynth", "bare"), naming=(naming,))
    return (
        readable(kinds=("lora",)),
        readable(kinds=DORAS, misreads="leaves DoRA magnitudes out; merge it"),
        row(kinds=("lora",), misreads="loads nothing of it; write it with --to diffsynth"),
        row(kinds=DORAS, misreads="loads nothing of it; merge it"),
        row(misreads="has no LoKr or LoHa; merge it"),
    )


def musubi_rows(*, unread: str = "") -> tuple[ProgramRow, ...]:
    """musubi-tuner's rows; its model of the family lacks the modules that match `unread`."""
    row = partial(ProgramRow, program="musubi-tuner")
    return (
        row(forms=("musubi",), naming=("official",), kinds=("lora", "lokr", "loha"), unread=unread),
        row(kinds=DORAS, misreads="has no DoRA; merge it"),
        row(misreads="wants --to musubi"),
    )


@dataclass(frozen=True, kw_only=True)
class AdapterRules:
    """What a family knows about its adapter files besides the names of tensors."""

    programs: Sequence[ProgramRow] = ()
    """What programs do with the files. A program's first row that fits a file counts."""
    fillers: Callable[[str, Collection[str]], Collection[str]] = lambda form, modules: ()
    """(form to write, adapted modules by our names) to further modules that readers of the form
    require; they are written as zeros."""
    one_to_one: str = "official"
    """The form for ComfyUI whose names are each for one of our layers, as a LoKr or LoHa needs
    it."""

    def readers(self, layout: AdapterLayout, modules: Collection[str]) -> dict[str, str]:
        """What is wrong with a file, by program: what it ignores or misreads, empty if it loads
        all, or `NOT_TRIED`.

        Args:
            layout: The file's layout.
            modules: The adapted modules, by our names.
        """
        problems: dict[str, str] = {}
        for row in self.programs:
            if row.program not in problems and row.fits(layout, modules):
                problems[row.program] = row.problem(modules)
        return {row.program: problems.get(row.program, NOT_TRIED) for row in self.programs}
