"""Names in adapter files: the name of each Linear layer of a model in every form, and so the
meaning of a file's keys.

Nothing is guessed from a name: kohya's `blocks_0_self_attn_q` does not tell which of its
underscores were dots, but the model's own names do.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import PREFIXES, AdapterLayout, form_of
from ditkit_core.models.other_models import OtherModel
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.weights.factored import METHOD_OF_PART, are_factors, shape_of_parts
from ditkit_core.weights.fused_tensors import FusedTensors

_PARTS = {
    # `.lora.down` is what older versions of diffusers wrote, and SimpleTuner writes.
    "down": re.compile(r"\.(lora_A|lora[_.]down)(\.[\w-]+)?\.weight$"),
    "up": re.compile(r"\.(lora_B|lora[_.]up)(\.[\w-]+)?\.weight$"),
    "alpha": re.compile(r"\.alpha$"),
    "magnitude": re.compile(r"\.(dora_scale|lora_magnitude_vector(\.[\w-]+)?(\.weight)?)$"),
    **{part: re.compile(rf"\.{part}$") for part in METHOD_OF_PART},
}


@dataclass(frozen=True)
class AdapterKey:
    """The meaning of a file's key."""

    parts: tuple[TensorSlice, ...]
    """The parts of our modules that make up its module's rows."""
    kind: str
    """`down`, `up`, `alpha`, `magnitude`, or a part of a LoKr or LoHa."""
    prefix: str
    module: str
    """The module's name, without prefix."""
    ending: str
    """The rest of the key behind the module's name."""


@dataclass(frozen=True)
class KnownNames:
    """The names of a model's Linear layers in every form, and the modules of ours that each name
    stands for."""

    parts: Mapping[str, tuple[TensorSlice, ...]]
    """The parts of our modules, by name: with dots and with underscores."""
    forms: Mapping[tuple[TensorSlice, ...], list[str]]
    """The dotted names, by the parts that they stand for."""
    prefixes: tuple[str, ...]
    others: tuple[OtherModel, ...]
    naming: Mapping[str, str]
    """By name: the first form of `StateDictNames.from_native` that has it; empty for names that
    only our model has."""

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
                # Two names that differ only in dots would be one name in kohya's form. No model has
                # such names; one that had would fail here.
                for alias in {name, name.replace(".", "_")}:
                    assert parts.setdefault(alias, meant) == meant, (
                        f"{alias} is {parts[alias]} and {meant}"
                    )
                    naming.setdefault(alias, form)
                forms.setdefault(meant, []).append(name)
        return cls(parts, forms, (*names.prefixes, *PREFIXES), names.others, naming)

    def parse(self, key: str) -> AdapterKey | None:
        """Parse a file's key; None if it belongs to no adapter of this model."""
        for kind, pattern in _PARTS.items():
            if match := pattern.search(key):
                stem = key[: match.start()]
                for prefix in self.prefixes:
                    if not stem.startswith(prefix):
                        continue
                    name = stem.removeprefix(prefix)
                    # Some programs write kohya's prefix and only some of its underscores:
                    # `lora_unet_blocks_0.self_attn.q`.
                    for module in (name, name.replace(".", "_")):
                        # A prefix counts only if a known name follows: `transformer.` may begin a
                        # name of the model's own.
                        if parts := self.parts.get(module):
                            return AdapterKey(parts, kind, prefix, module, match[0])
        return None

    def layout(self, keys: Iterable[AdapterKey]) -> AdapterLayout:
        """The layout of most of these keys."""
        # By majority, because one odd key does not make another layout.
        keys = list(keys)
        matrices = [key for key in keys if key.kind not in ("alpha", "magnitude", "up")]
        (prefix, ending), _ = Counter((key.prefix, key.ending) for key in matrices).most_common(1)[
            0
        ]
        ending = ending.replace("lora.", "lora_")
        methods = {METHOD_OF_PART.get(key.kind, "lora") for key in matrices}
        return AdapterLayout(
            form=form_of(prefix, ending),
            naming=Counter(self.naming[key.module] for key in keys).most_common(1)[0][0],
            alpha=any(key.kind == "alpha" for key in keys),
            up_down="lora_down" in ending,
            use_dora=any(key.kind == "magnitude" for key in keys),
            method=" and ".join(sorted(methods)),
        )


def modules_in_form(
    modules: Iterable[str], from_native: Callable[[str], Sequence[TensorSlice]]
) -> FusedTensors:
    """A form's modules, assembled from ours."""

    def theirs(module: str) -> tuple[TensorSlice, ...]:
        weights = from_native(f"{module}.weight")
        return tuple(replace(part, name=part.name.removesuffix(".weight")) for part in weights)

    return tensors_in_form(modules, theirs)


def tensors_in_form(
    names: Iterable[str], from_native: Callable[[str], Sequence[TensorSlice]]
) -> FusedTensors:
    """A form's tensors, assembled from ours."""
    fused = FusedTensors()
    for name in names:
        assert fused.add(name, tuple(from_native(name))), f"{name} shares rows with another"
    return fused


def has_adapter_keys(source: SafetensorsSource) -> bool:
    """Whether a file has a key of a low-rank adapter, for whatever model."""
    return any(
        pattern.search(key)
        for key in source.tensors
        for kind, pattern in _PARTS.items()
        if kind != "alpha"
    )


def another_model(source: SafetensorsSource, likeness: str, remedy: str) -> UserError:
    """The error for a file in which nothing is an adapter of this model; the texts come from
    `looks_like`."""
    description = "a LoRA of another model" if has_adapter_keys(source) else "not a LoRA"
    shown = ", ".join(list(source.tensors)[:3])
    return UserError(
        f"{source.path} is {description}{likeness}: {shown} …; "
        f"{remedy or 'name a LoRA of this model'}"
    )


def shapes_in(source: SafetensorsSource, known_names: KnownNames) -> dict[str, tuple[int, ...]]:
    """Weight shapes [out, in] of the layers that a file adapts, by our name, read off its matrices.

    If one of the two matrices is missing or not a matrix, the size that it would give is 1.
    """
    matrix_shapes: dict[tuple[TensorSlice, ...], dict[str, tuple[int, ...]]] = {}
    for name, stored in source.tensors.items():
        if (key := known_names.parse(name)) is not None:
            matrix_shapes.setdefault(key.parts, {})[key.kind] = stored.shape
    shapes: dict[str, tuple[int, ...]] = {}
    for parts, matrices in matrix_shapes.items():
        factors = {part: shape for part, shape in matrices.items() if part in METHOD_OF_PART}
        if factors:
            num_rows, width = shape_of_parts(factors) if are_factors(factors) else (1, 1)
        else:
            num_rows, width = (
                math.prod(matrices.get("up", ())[:1]),
                math.prod(matrices.get("down", ())[1:]),
            )
        for part in parts:
            shapes.setdefault(part.name, (num_rows // len(parts) * part.of, width))
    return shapes
