"""Mapping between the parameters of a model and the tensors in its files, for every form of
file."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from ditkit_core.models.other_models import OTHER_MODELS, OtherModel


@dataclass(frozen=True)
class TensorSlice:
    """Some rows of a tensor: number `index` of `of` equal parts along its first dimension; by
    default all rows."""

    name: str
    index: int = 0
    of: int = 1


NameTable = Mapping[str, tuple[TensorSlice, ...]]
"""From names to parts of other tensors; `*` stands for the number of a block, so that one row
serves all blocks of a model of any depth."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def invert_table(table: NameTable) -> dict[str, tuple[TensorSlice, ...]]:
    """The names on the other side, each with the parts of this side's tensors that make up its
    rows, in order."""
    by_name: dict[str, dict[int, TensorSlice]] = {}
    for name, parts in table.items():
        for index, part in enumerate(parts):
            by_name.setdefault(part.name, {})[part.index] = TensorSlice(name, index, len(parts))
    return {name: tuple(parts[index] for index in sorted(parts)) for name, parts in by_name.items()}


def look_up(name: str, table: NameTable) -> tuple[TensorSlice, ...] | None:
    """The parts that a table has for a name; None if it has none."""
    if "*" in name:
        return None
    number = _NUMBER.search(name)
    if name in table or number is None:
        return table.get(name)
    parts = table.get(_NUMBER.sub("*", name, count=1))
    if parts is None:
        return None
    return tuple(
        TensorSlice(part.name.replace("*", number[0], 1), part.index, part.of) for part in parts
    )


def by_table(table: NameTable) -> Callable[[str], tuple[TensorSlice, ...]]:
    """A direction of `StateDictNames.from_native` that looks names up in a table of all names."""

    def parts_of(name: str) -> tuple[TensorSlice, ...]:
        parts = look_up(name, table)
        assert parts is not None, name
        return parts

    return parts_of


@dataclass(frozen=True, kw_only=True)
class StateDictNames:
    """Names of the tensors in a model's files, in every form, and of our parameters.

    Forms differ in names and in how rows are stacked: one file has q, k and v in one tensor,
    another has the two halves of a modulation in the other order. So both directions map a tensor
    to a sequence of slices: it is split into equal parts of rows, and each has its place.
    """

    prefixes: tuple[str, ...]
    """Prefixes that files may have before every name (`model.diffusion_model.`), longest first."""

    to_native: Callable[[str], tuple[TensorSlice, ...] | None]
    """From a tensor's name in a file (in any known form, without prefix) to the slices of our
    parameters that its rows are, in order; none for a constant, which the model makes itself; None
    if the name is unknown."""

    from_native: Mapping[str, Callable[[str], tuple[TensorSlice, ...]]]
    """By form (`official`, `diffusers`): from our parameter's name to the slices of that form's
    tensors that its rows are, in order."""

    stored: Callable[[str, str, Tensor], Mapping[str, Tensor]] = lambda form, name, tensor: {
        name: tensor
    }
    """From a form, a tensor's name there and its values to what a file has for it, by name: the
    tensor, perhaps with other axes of length 1, and constants next to it."""

    flat: str = ""
    """Pattern of names in files whose tensors may have one axis where our parameter has several: a
    table [6, dim] as 6 * dim numbers. Empty for none."""

    others: tuple[OtherModel, ...] = OTHER_MODELS
    """Other models whose files are given by mistake, the likeliest first."""

    shared: OtherModel | None = None
    """Other models that have some names of this one; `keys` are of modules. An adapter of these
    names alone is known by its sizes."""

    bare: str = "official"
    """Form of the names in an adapter file without prefixes, as DiffSynth writes it for this
    family."""

    scaled: str = "official"
    """Form of the names of a transformer in scaled 8 bits, which ComfyUI reads: where it renames
    official ones, it leaves their scales behind."""

    @classmethod
    def renaming(
        cls,
        *,
        prefixes: tuple[str, ...] = (),
        to_native: Callable[[str], str | None],
        from_native: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
        others: tuple[OtherModel, ...] = OTHER_MODELS,
    ) -> "StateDictNames":
        """The mapping for files in which every tensor is exactly one parameter."""

        def native(name: str) -> tuple[TensorSlice, ...] | None:
            renamed = to_native(name)
            return None if renamed is None else (TensorSlice(renamed),)

        def foreign(rename: Callable[[str], str]) -> Callable[[str], tuple[TensorSlice, ...]]:
            return lambda name: (TensorSlice(rename(name)),)

        return cls(
            prefixes=prefixes,
            to_native=native,
            from_native={form: foreign(rename) for form, rename in from_native.items()},
            others=others,
        )
