"""Which of the adapter files that ditkit writes each program loads, by family and kind."""

from collections.abc import Iterator, Sequence
from typing import Any

from ditkit_core.adapters.files.identify import layers_of
from ditkit_core.adapters.files.write import check_form, check_one_to_one
from ditkit_core.adapters.inject import chosen_of
from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import ADAPTER_FORMS
from ditkit_core.models.adapter_programs import NO_MODEL, NOT_TRIED
from ditkit_core.models.spec import ModelSpec

KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"use_dora": False},
    "DoRA": {"use_dora": True},
    "LoKr": {"use_dora": False, "method": "lokr"},
    "LoHa": {"use_dora": False, "method": "loha"},
}
"""Arguments of `KeyFormat.layout`, by what the table calls a kind of adapter."""
_UNTRIED, _NONE = "not tried", "none"
# two bare asterisks in a cell are emphasis, and neither would be seen
_IN_PART = r"\*"


def files(spec: ModelSpec, arch: Any) -> list[list[str]]:
    """Layers that adapters of a model have: the default targets, and all."""
    layers, sets = list(layers_of(spec.architecture.build, arch)), spec.adapters.targets
    return [list(chosen_of(layers, (), sets)), layers]


def is_written(spec: ModelSpec, kind: str, form: str, modules: Sequence[str]) -> bool:
    """Whether the export command writes such an adapter of these modules in a form."""
    names, options = spec.architecture.names, KINDS[kind]
    try:
        check_form(form, names, use_dora=options["use_dora"])
        if "method" in options:
            check_one_to_one(form, names, modules)
    except UserError:
        return False
    return True


def loaded(spec: ModelSpec, kind: str, modules: Sequence[Sequence[str]]) -> dict[str, str]:
    """By program: the written forms of a kind that it loads, or `none`, or that nobody tried.

    Args:
        spec: The family.
        kind: Of `KINDS`.
        modules: Layers of some files. A form that the program does not load all of them in, where
            it has the model, has an escaped `*`.
    """
    answers: dict[str, dict[str, list[str]]] = {}
    for form, row in ADAPTER_FORMS.items():
        if not is_written(spec, kind, form, modules[0]):
            continue
        layout = row.layout(spec.architecture.names.bare, **KINDS[kind])
        for layers in modules:
            for program, problem in spec.adapters.rules.readers(layout, layers).items():
                of_form = answers.setdefault(program, {}).setdefault(form, [])
                if not problem.startswith(NO_MODEL):
                    of_form.append(problem)
    cells = dict[str, str]()
    for program, forms in answers.items():
        names = [f"`{form}`{_IN_PART * any(found)}" for form, found in forms.items() if "" in found]
        is_tried = any(set(found) != {NOT_TRIED} for found in forms.values())
        cells[program] = ", ".join(names) or (_NONE if is_tried else _UNTRIED)
    return cells


def programs(specs: Sequence[ModelSpec], names: dict[str, str]) -> Iterator[str]:
    """A table with a row for families that are alike in a kind of adapter.

    Args:
        specs: The families.
        names: What the page calls them, by name.
    """
    modules = {
        spec.name: [
            layers for arch in spec.architecture.presets.values() for layers in files(spec, arch)
        ]
        for spec in specs
    }
    cells = {
        (kind, spec.name): loaded(spec, kind, modules[spec.name])
        for kind in KINDS
        for spec in specs
    }
    readers = dict.fromkeys(
        program
        for of_family in cells.values()
        for program, forms in of_family.items()
        if forms not in (_NONE, _UNTRIED)
    )
    yield f"| | of | {' | '.join(readers)} |"
    yield "|---|---|" + "---|" * len(readers)
    for kind in KINDS:
        alike: dict[tuple[str, ...], list[str]] = {}
        for spec in specs:
            of_family = cells[kind, spec.name]
            alike.setdefault(tuple(of_family[name] for name in readers), []).append(
                names[spec.name]
            )
        for forms, families in alike.items():
            yield f"| {kind} | {', '.join(families)} | {' | '.join(forms)} |"
