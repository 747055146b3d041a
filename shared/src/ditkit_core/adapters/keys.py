"""Names in adapter files: what each Linear layer of a model is called in every form, and what a file's keys therefore say.

Nothing is guessed from a name: kohya's `blocks_0_self_attn_q` says not which of its underscores were dots, the model's own
names do.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import FORM_OF_PREFIX, AdapterLayout
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.weights.fused_tensors import FusedTensors

_PARTS = {
    "down": re.compile(r"\.(lora_A|lora_down)(\.[\w-]+)?\.weight$"),
    "up": re.compile(r"\.(lora_B|lora_up)(\.[\w-]+)?\.weight$"),
    "alpha": re.compile(r"\.alpha$"),
    "magnitude": re.compile(r"\.(dora_scale|lora_magnitude_vector(\.[\w-]+)?(\.weight)?)$"),
}


@dataclass(frozen=True)
class AdapterKey:
    """What a file's key says."""

    parts: tuple[TensorSlice, ...]
    """The parts of our modules that the rows of its module are."""
    kind: str
    """`down`, `up`, `alpha` or `magnitude`."""
    prefix: str
    module: str
    """The module's name, without prefix."""
    ending: str
    """What follows the module's name."""


@dataclass(frozen=True)
class KnownNames:
    """What the model's Linear layers are called in every form, and which modules of ours each name is."""

    parts: Mapping[str, tuple[TensorSlice, ...]]
    """By name, dotted and with underscores."""
    forms: Mapping[tuple[TensorSlice, ...], list[str]]
    """The dotted names of these parts."""
    prefixes: tuple[str, ...]
    naming: Mapping[str, str]
    """By name: the first form of `StateDictNames.from_native` that has it; none of names that only our model has."""

    @classmethod
    def of(cls, names: StateDictNames, modules: Collection[str]) -> "KnownNames":
        """The names of these Linear layers."""
        by_form: dict[str, Mapping[str, tuple[TensorSlice, ...]]] = {}
        for form, from_native in names.from_native.items():
            by_form[form] = modules_in_form(modules, from_native).complete
        by_form[""] = {module: (TensorSlice(module),) for module in modules}
        parts: dict[str, tuple[TensorSlice, ...]] = {}
        forms: dict[tuple[TensorSlice, ...], list[str]] = {}
        naming: dict[str, str] = {}
        for form, named in by_form.items():
            for name, meant in named.items():
                # Two names that differ in dots alone would be one in kohya's form: no model has such, and one that had would stop here.
                for alias in {name, name.replace(".", "_")}:
                    assert parts.setdefault(alias, meant) == meant, f"{alias} is {parts[alias]} and {meant}"
                    naming.setdefault(alias, form)
                forms.setdefault(meant, []).append(name)
        return cls(parts, forms, (*names.prefixes, *FORM_OF_PREFIX, ""), naming)

    def parse(self, key: str) -> AdapterKey | None:
        """What a file's key says; None if it speaks of no adapter of this model."""
        for kind, pattern in _PARTS.items():
            if match := pattern.search(key):
                stem = key[: match.start()]
                for prefix in self.prefixes:
                    # A prefix counts only if a known name follows: `transformer.` may begin a name of the model's own.
                    if stem.startswith(prefix) and (parts := self.parts.get(stem.removeprefix(prefix))):
                        return AdapterKey(parts, kind, prefix, stem.removeprefix(prefix), match[0])
        return None

    def layout(self, keys: Iterable[AdapterKey]) -> AdapterLayout:
        """The layout that most keys have."""
        keys = list(keys)
        (prefix, ending), _ = Counter((key.prefix, key.ending) for key in keys if key.kind == "down").most_common(1)[0]
        form = FORM_OF_PREFIX.get(prefix, "prefixed")
        if not prefix:
            form = "diffsynth" if ending.count(".") > 2 else "bare"
        return AdapterLayout(
            form=form,
            naming=Counter(self.naming[key.module] for key in keys).most_common(1)[0][0],
            alpha=any(key.kind == "alpha" for key in keys),
            up_down="lora_down" in ending,
            use_dora=any(key.kind == "magnitude" for key in keys),
        )


def modules_in_form(modules: Iterable[str], from_native: Callable[[str], Sequence[TensorSlice]]) -> FusedTensors:
    """A form's modules put together of ours."""

    def theirs(module: str) -> tuple[TensorSlice, ...]:
        weights = from_native(f"{module}.weight")
        return tuple(replace(part, name=part.name.removesuffix(".weight")) for part in weights)

    return tensors_in_form(modules, theirs)


def tensors_in_form(names: Iterable[str], from_native: Callable[[str], Sequence[TensorSlice]]) -> FusedTensors:
    """A form's tensors put together of ours."""
    assembly = FusedTensors()
    for name in names:
        assert assembly.add(name, tuple(from_native(name))), f"{name} shares rows with another"
    return assembly


def has_adapter_keys(source: SafetensorsSource) -> bool:
    """Whether a key of a file is named as a low-rank adapter's, of whatever model."""
    return any(pattern.search(key) for key in source.tensors for kind, pattern in _PARTS.items() if kind != "alpha")


def shapes_in(source: SafetensorsSource, known: KnownNames) -> dict[str, tuple[int, ...]]:
    """Weight shape [out, in] of the layers that a file's adapters are of, by our name, as its matrices have it.

    Where one of the two matrices is missing, or is none, the side that it would tell is 1 wide.
    """
    found: dict[tuple[TensorSlice, ...], dict[str, tuple[int, ...]]] = {}
    for name, stored in source.tensors.items():
        if (key := known.parse(name)) is not None:
            found.setdefault(key.parts, {})[key.kind] = stored.shape
    shapes: dict[str, tuple[int, ...]] = {}
    for parts, matrices in found.items():
        num_rows, width = matrices.get("up", ())[:1], math.prod(matrices.get("down", ())[1:])
        for part in parts:
            shapes.setdefault(part.name, (math.prod(num_rows) // len(parts) * part.of, width))
    return shapes
