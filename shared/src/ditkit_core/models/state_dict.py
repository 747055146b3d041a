"""Names of a model's parameters in every form of its files, as parts of tensors against parts of parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TensorSlice:
    """Some rows of a tensor: number `index` of `of` equal parts along its first dimension; by default all of it."""

    name: str
    index: int = 0
    of: int = 1


@dataclass(frozen=True, kw_only=True)
class StateDictNames:
    """Parameters of a model's files, in every form, against ours.

    Forms differ in names, and in how rows are stacked: one file has q, k and v in a tensor, another has the two halves of a
    modulation in the other order. Both directions therefore say, for a tensor cut into equal pieces of rows, where each lies.
    """

    prefixes: tuple[str, ...]
    """Prefixes that files may put before every name (`model.diffusion_model.`), longest first."""

    to_native: Callable[[str], tuple[TensorSlice, ...] | None]
    """A file's name without prefix, in any known form, to the parts of our parameters that its rows are, from the first on;
    None if no form knows it."""

    from_native: Mapping[str, Callable[[str], tuple[TensorSlice, ...]]]
    """By form (`official`, `diffusers`): our parameter name to the parts of that form's tensors that its rows are."""

    bare: str = "official"
    """The form whose names an adapter file without prefixes has, as DiffSynth writes it for this family."""

    @classmethod
    def renaming(
        cls,
        *,
        prefixes: tuple[str, ...] = (),
        to_native: Callable[[str], str | None],
        from_native: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
    ) -> "StateDictNames":
        """Names where every tensor of a file is one parameter."""

        def native(name: str) -> tuple[TensorSlice, ...] | None:
            renamed = to_native(name)
            return None if renamed is None else (TensorSlice(renamed),)

        def foreign(rename: Callable[[str], str]) -> Callable[[str], tuple[TensorSlice, ...]]:
            return lambda name: (TensorSlice(rename(name)),)

        return cls(
            prefixes=prefixes,
            to_native=native,
            from_native={form: foreign(rename) for form, rename in from_native.items()},
        )
