"""Differences that are added to whole parameters: some files have them next to low-rank matrices,
for biases, norms and modulations.

| key | parameter | written by |
|---|---|---|
| `NAME.diff`, `NAME.w_norm` | `NAME.weight` | ComfyUI's and Kijai's extractions, LyCORIS |
| `NAME.diff_b`, `NAME.b_norm` | `NAME.bias` | the same |
| `NAME.diff_m` | `NAME.modulation` | Kijai's extractions |
| `NAME.lora_B.bias` | `NAME.bias`, times the scale of its LoRA | peft with `lora_bias` |
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ditkit_core.adapters.files.keys import DIFFERENCE_ENDINGS
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import PREFIXES
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.weights.load import first_ten


@dataclass(frozen=True)
class Difference:
    """A part of a file's tensor that is added to rows of a parameter of ours."""

    key: str
    rows: TensorSlice
    """The part of the file's tensor."""
    part: TensorSlice
    """The rows of the parameter."""
    scale: float = 1.0


def find_differences(
    source: SafetensorsSource,
    keys: Sequence[str],
    names: StateDictNames,
    parameters: Mapping[str, tuple[int, ...]],
    scale_of: Callable[[str], float],
) -> dict[str, tuple[Difference, ...]]:
    """The differences by our parameter, from their keys in a file; `scale_of` gives the scale of a
    module's LoRA."""
    by_parameter: dict[str, list[Difference]] = {}
    aliases = _underscored(names, parameters)
    unmatched = []
    for key in keys:
        parts = _parts_of(key, names, parameters, aliases)
        shape = source.tensors[key].shape
        # As many numbers, because files differ in trailing ones; each of several parts has equally
        # many rows.
        sizes = [math.prod(parameters[part.name]) // part.of for part in parts]
        if not parts or math.prod(shape) != sum(sizes) or len(set(sizes)) > 1:
            unmatched.append(f"{key} {list(shape)}")
            continue
        for index, part in enumerate(parts):
            scale = scale_of(part.name.removesuffix(".bias")) if ".lora_B" in key else 1.0
            by_parameter.setdefault(part.name, []).append(
                Difference(key, TensorSlice(part.name, index, len(parts)), part, scale)
            )
    if unmatched:
        raise UserError(
            f"{source.path}: {len(unmatched)} differences fit no parameter of this model: "
            f"{first_ten(unmatched)}; name a LoRA of this model"
        )
    return {name: tuple(differences) for name, differences in by_parameter.items()}


def _parts_of(
    key: str, names: StateDictNames, parameters: Mapping[str, object], aliases: Mapping[str, str]
) -> tuple[TensorSlice, ...]:
    """The parts of our parameters that a key's tensor is added to; empty if there are none."""
    pattern, endings = next(
        (pattern, endings) for pattern, endings in DIFFERENCE_ENDINGS.items() if pattern.search(key)
    )
    stem = pattern.sub("", key)
    for prefix in (*names.prefixes, *PREFIXES):
        for ending in endings if stem.startswith(prefix) else ():
            name = f"{stem.removeprefix(prefix)}{ending and '.'}{ending}"
            parts = names.to_native(aliases.get(name, name)) or ()
            if parts and all(part.name in parameters for part in parts):
                return parts
    return ()


def naming_of_differences(
    keys: Sequence[str], parameters: Collection[str], names: StateDictNames
) -> str:
    """The form of `StateDictNames.from_native` that has the names of all these keys, which are of
    these parameters; empty if none has."""
    prefixes = (*names.prefixes, *PREFIXES)
    stems = [
        ending.sub("", key) for key in keys for ending in DIFFERENCE_ENDINGS if ending.search(key)
    ]
    for form, from_native in names.from_native.items():
        modules = {
            part.name.rpartition(".")[0] for name in parameters for part in from_native(name)
        }
        modules |= {module.replace(".", "_") for module in modules}
        if all(any(stem.removeprefix(prefix) in modules for prefix in prefixes) for stem in stems):
            return form
    return ""


def _underscored(names: StateDictNames, parameters: Mapping[str, object]) -> dict[str, str]:
    """Names of parameters in every form, by the same with underscores in their module:
    `blocks_0_norm.weight`."""
    aliases = {}
    for from_native in names.from_native.values():
        for parameter in parameters:
            for part in from_native(parameter):
                module, dot, leaf = part.name.rpartition(".")
                aliases[f"{module.replace('.', '_')}{dot}{leaf}"] = part.name
    return aliases


def add_difference(
    source: SafetensorsSource, differences: Sequence[Difference], parameter: Tensor, strength: float
) -> None:
    """Add a file's differences at a strength to an fp32 parameter, in place."""
    for difference in differences:
        values = (
            source.read(difference.key)
            .float()
            .reshape(-1)
            .chunk(difference.rows.of)[difference.rows.index]
        )
        rows = parameter.view(-1).chunk(difference.part.of)[difference.part.index]
        rows.add_(values, alpha=strength * difference.scale)


def described(parameters: Sequence[str]) -> str:
    """How many parameters of each kind have a difference: `40 weights, 80 biases`."""
    words = {
        "weight": ("weight", "weights"),
        "bias": ("bias", "biases"),
        "modulation": ("modulation", "modulations"),
    }
    counts = Counter(name.rpartition(".")[2] for name in parameters)
    return ", ".join(
        f"{count} {words.get(leaf, (leaf, leaf))[count > 1]}" for leaf, count in counts.items()
    )


def not_applied(path: Path, keys: Sequence[str]) -> UserError:
    """The error where differences cannot be used."""
    return UserError(
        f"{path} also adds differences to whole weights, biases or norms ({len(keys)} keys: "
        f"{first_ten(list(keys))}), which only merging can use: set base.merge, or merge it into a "
        f"transformer with the export command: --adapter {path} --merge --base BASE"
    )
