"""What programs do with the adapter files of each family, form by form and kind by kind."""

import re
from collections.abc import Iterator
from dataclasses import replace

from ditkit_core.adapters.files.identify import layers_of
from ditkit_core.models.adapter_formats import DIFFERENCES, FORMATS, AdapterLayout
from ditkit_core.models.adapter_programs import NOT_TRIED, ProgramRow
from ditkit_core.models.spec import ModelSpec

LORA = AdapterLayout(form="")
KINDS = {
    "DoRA": replace(LORA, use_dora=True),
    "LoKr": replace(LORA, method="lokr"),
    "LoHa": replace(LORA, method="loha"),
    "differences alone": replace(LORA, method=DIFFERENCES),
}
"""Layouts of a form that is added, by what the table calls them."""
FORMS = [form for form in FORMATS if form != "prefixed"]
_UNTRIED, _NONE = "not tried", "none"


def _example(spec: ModelSpec, pattern: str) -> str:
    """A module of the family that a pattern fits."""
    for arch in spec.architecture.presets.values():
        for name in layers_of(spec.architecture.build, arch):
            if re.search(pattern, name):
                return f"`{name}`"
    raise AssertionError(f"{pattern} fits no module of {spec.name}")


def verdict(spec: ModelSpec, program: str, layout: AdapterLayout) -> str:
    """What a program does with files of a layout: `✓` with exceptions, or why it does not load
    them."""
    exceptions, with_alpha = list[str](), list[str]()
    for row in spec.adapters.rules.programs:
        plain = ProgramRow(
            program=program,
            forms=row.forms,
            naming=row.naming,
            kinds=row.kinds,
            misreads=row.misreads,
            unread=row.unread,
            instead=row.instead,
        )
        if row.program != program or not plain.fits(layout, ()):
            continue
        reason = row.misreads.partition(";")[0]
        if row != plain:
            if not reason:
                assert row.alpha, f"{row}: a condition is of files that are not loaded, or of alpha"
                with_alpha = ["loads it with keys of alpha"]
                continue
            if row.forms:  # others are about models that the program lacks
                example = _example(spec, row.present) if "{module}" in reason else ""
                exceptions.append(reason.replace("{module}", example))
        elif reason:
            return _UNTRIED if reason == NOT_TRIED else "; ".join([reason, *with_alpha])
        else:
            left = [f"leaves {_example(spec, row.unread)} and others out"] if row.unread else []
            return "; ".join(["✓", *left, *dict.fromkeys(exceptions)])
    return _UNTRIED


def _of_form(spec: ModelSpec, program: str, kind: AdapterLayout, form: str) -> str:
    """`verdict` of a form; by names, where these make a difference."""
    row, bare = FORMATS[form], spec.architecture.names.bare
    several = (bare,) if row.prefixes == ("",) else ("official", "diffusers")
    layout = replace(kind, form=form, dora_over_base=kind.use_dora and row.dora == "base")
    verdicts = {
        naming: verdict(spec, program, replace(layout, naming=naming))
        for naming in ((row.naming,) if row.naming else several)
    }
    if len(set(verdicts.values())) == 1:
        return next(iter(verdicts.values()))
    return "<br>".join(f"{naming} names: {text}" for naming, text in verdicts.items())


def _loading(spec: ModelSpec, program: str, kind: AdapterLayout) -> str:
    """The forms of a kind that a program loads."""
    verdicts = {form: _of_form(spec, program, kind, form) for form in FORMS}
    loaded = [
        f"`{form}`{' in part' * ('leaves' in text)}"
        for form, text in verdicts.items()
        if "✓" in text
    ]
    is_tried = any(text != _UNTRIED for text in verdicts.values())
    return ", ".join(loaded) or (_NONE if is_tried else _UNTRIED)


def programs(spec: ModelSpec) -> Iterator[str]:
    """A family's table: a row for each form of a LoRA, then one for each other kind."""
    names = list(dict.fromkeys(row.program for row in spec.adapters.rules.programs))
    cells = {name: [_of_form(spec, name, LORA, form) for form in FORMS] for name in names}
    shown = [name for name in names if len(set(cells[name])) > 1]
    yield f"| | {' | '.join(shown)} |"
    yield "|---|" + "---|" * len(shown)
    alike: dict[tuple[str, ...], list[str]] = {}
    for number, form in enumerate(FORMS):
        alike.setdefault(tuple(cells[name][number] for name in shown), []).append(f"`{form}`")
    for texts, forms in alike.items():
        yield f"| LoRA, {', '.join(forms)} | {' | '.join(texts)} |"
    for title, kind in KINDS.items():
        yield f"| {title} | {' | '.join(_loading(spec, name, kind) for name in shown)} |"
    yield ""
    others = {name: cells[name][0] for name in names if name not in shown}
    untried = ", ".join(name for name, text in others.items() if text == _UNTRIED)
    lacking = [f"{name} {text}." for name, text in others.items() if text != _UNTRIED]
    yield " ".join([*lacking, f"Not tried: {untried}."])
