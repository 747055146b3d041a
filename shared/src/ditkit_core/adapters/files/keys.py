"""Names in adapter files: the name of each Linear layer of a model in every form, and so the
meaning of a file's keys.

Nothing is guessed from a name: kohya's `blocks_0_self_attn_q` does not tell which of its
underscores were dots, but the model's own names do.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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


DIFFERENCE_ENDINGS = {
    re.compile(r"\.(diff|w_norm)$"): ("weight", ""),
    re.compile(r"\.(diff_b|b_norm)$"): ("bias",),
    re.compile(r"\.diff_m$"): ("modulation",),
    re.compile(r"\.lora_B(\.[\w-]+)?\.bias$"): ("bias",),
}
"""By the ending of a key of a difference: how the parameter's name may end."""


_OTHER_METHODS = {
    "a LoKr or LoHa of convolutions": re.compile(r"\.(lokr_t2|hada_t[12])$"),
    "OFT": re.compile(r"\.oft_(embedding_)?R\b"),
    "BOFT": re.compile(r"\.boft_"),
    # kohya's and LyCORIS' key, of both
    "OFT or BOFT": re.compile(r"\.oft_(blocks|diag)"),
    "IA3": re.compile(r"\.(ia3_l|on_input)\b"),
    "VeRA": re.compile(r"\.vera_"),
    "GLoRA": re.compile(r"\.[ab][12]\.weight$"),
    "a LoRA of convolutions": re.compile(r"\.lora_mid\."),
    "a LoRA of an embedding": re.compile(r"\.lora_embedding_[AB]\b"),
    "whole weights": re.compile(r"\.(set_weight|reshape_weight)$"),
}
"""Other methods, by the keys that they have besides or in place of low-rank matrices."""


@dataclass(frozen=True)
class AdapterKey:
    """The meaning of a file's key."""

    text: str
    """The whole key."""
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
class FileKeys:
    """The keys of a file."""

    modules: Mapping[tuple[TensorSlice, ...], Mapping[str, AdapterKey]]
    """By the parts of our modules that a module of the file is, and by kind."""
    unmatched: Sequence[str]
    """Keys that belong to no adapter of this model, or to one that has such a key already."""

    @property
    def kinds(self) -> set[str]:
        """The kinds of keys (`AdapterKey.kind`)."""
        return {kind for keys in self.modules.values() for kind in keys}


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
            by_form[form] = FusedTensors.of(modules, from_native, ".weight").complete
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
                            return AdapterKey(key, parts, kind, prefix, module, match[0])
        return None

    def keys_of(self, source: SafetensorsSource) -> FileKeys:
        """Parse all keys of a file."""
        modules: dict[tuple[TensorSlice, ...], dict[str, AdapterKey]] = {}
        unmatched = []
        for text in source.tensors:
            key = self.parse(text)
            # A second key of one kind, as in a file that has a module in two forms: which of them
            # counts is unknown.
            if key is None or key.kind in modules.get(key.parts, {}):
                unmatched.append(text)
            else:
                modules.setdefault(key.parts, {})[key.kind] = key
        return FileKeys(modules, unmatched)

    def layout(self, file_keys: FileKeys) -> AdapterLayout:
        """The layout of most of a file's keys."""
        # By majority, because one odd key does not make another layout.
        keys = [key for module in file_keys.modules.values() for key in module.values()]
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


def split_differences(source: SafetensorsSource) -> tuple[SafetensorsSource, tuple[str, ...]]:
    """A file without its differences, and their keys."""
    keys = tuple(
        key for key in source.tensors if any(pattern.search(key) for pattern in DIFFERENCE_ENDINGS)
    )
    rest = (
        {key: stored for key, stored in source.tensors.items() if key not in keys}
        if keys
        else source.tensors
    )
    return replace(source, tensors=rest), keys


def other_methods(names: Collection[str]) -> dict[str, list[str]]:
    """The other methods that a file's names belong to, each with these names."""
    names_by_method = {
        method: [name for name in names if pattern.search(name)]
        for method, pattern in _OTHER_METHODS.items()
    }
    return {method: named for method, named in names_by_method.items() if named}


def shapes_in(source: SafetensorsSource, keys: FileKeys) -> dict[str, tuple[int, ...]]:
    """Weight shapes [out, in] of the layers that a file adapts, by our name, read off its matrices.

    If one of the two matrices is missing or not a matrix, the size that it would give is 1.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for parts, by_kind in keys.modules.items():
        matrices = {kind: source.tensors[key.text].shape for kind, key in by_kind.items()}
        factors = {part: shape for part, shape in matrices.items() if part in METHOD_OF_PART}
        if factors:
            num_rows, width = shape_of_parts(factors) if are_factors(factors) else (1, 1)
        else:
            num_rows = math.prod(matrices.get("up", ())[:1])
            width = math.prod(matrices.get("down", ())[1:])
        for part in parts:
            shapes.setdefault(part.name, (num_rows // len(parts) * part.of, width))
    return shapes
