"""Merging adapter files into a base while it is loaded."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ditkit_core.adapters.files.read import AdapterFile
from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path

MAX_STRENGTH = 100
"""Largest magnitude of a strength in `base.merge`. Beyond it no adapter makes sense; it is a typing error."""


def parse_merge(entry: str, key: str = "base.merge") -> tuple[Path, float]:
    """Parse `FILE@strength`, or `FILE` with a strength of 1, of a setting."""
    # A file whose own name has an @ counts as a file.
    file, at, strength = entry.rpartition("@")
    if not at or Path(entry).is_file():
        return local_path(entry), 1.0
    try:
        value = float(strength)
    except ValueError as error:
        raise UserError(f"{key}: {entry!r} is not FILE@strength; write a number after the @") from error
    if not abs(value) <= MAX_STRENGTH:
        raise UserError(f"{key}: the strength of {entry!r} is not between -{MAX_STRENGTH} and {MAX_STRENGTH}")
    return local_path(file), value


def merge_into(files: Sequence[tuple[AdapterFile, float]]) -> dict[str, Callable[[Tensor], None]]:
    """The `edits` of `load_into` that merge adapter files, each at a strength, into the base's weights; none for a strength of 0.

    Parameters that a file has differences for are changed by these too.
    """
    merged = [(file, strength) for file, strength in files if strength]
    changed = {
        name for file, _ in merged for name in (*(f"{module}.weight" for module in file.modules), *file.differences)
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
