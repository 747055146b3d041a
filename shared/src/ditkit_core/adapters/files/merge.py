"""Merging adapter files into a base while it is loaded."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ditkit_core.adapters.files.read import AdapterFile


def merge_into(files: Sequence[tuple[AdapterFile, float]]) -> dict[str, Callable[[Tensor], None]]:
    """The `edits` of `load_into` that merge adapter files, each at a strength, into the base's
    weights; none for a strength of 0.

    Parameters that a file has differences for are changed by these too.
    """
    merged = [(file, strength) for file, strength in files if strength]
    changed = {
        name
        for file, _ in merged
        for name in (*(f"{module}.weight" for module in file.modules), *file.differences)
    }

    def edit(name: str) -> Callable[[Tensor], None]:
        module, _, leaf = name.rpartition(".")

        def change(parameter: Tensor) -> None:
            for file, strength in merged:
                if leaf == "weight" and module in file.modules:
                    file.change(module, parameter, strength)
                file.add_differences(name, parameter, strength)

        return change

    return {name: edit(name) for name in changed}
