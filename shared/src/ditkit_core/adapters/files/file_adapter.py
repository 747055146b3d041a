"""The adapter of one module in a file: its keys, and the tensors behind them.

| key of a LoKr or LoHa behind a module's name | meaning |
|---|---|
| `.lokr_w1`, or `.lokr_w1_a` and `.lokr_w1_b` | the first factor of the Kronecker product, whole or as a low-rank product |
| `.lokr_w2`, or `.lokr_w2_a` and `.lokr_w2_b` | the second factor |
| `.hada_w1_a`, `.hada_w1_b`, `.hada_w2_a`, `.hada_w2_b` | the two low-rank products whose elementwise product is the change |
| `.alpha` | as ComfyUI and LyCORIS have it: over the rank of the last low-rank factor, and without effect where none is |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ditkit_core.adapters.dora import is_over_base
from ditkit_core.adapters.files.alpha import AlphaHeader
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.weights.factored import (
    METHOD_OF_PART,
    FactoredMatrices,
    are_factors,
    low_rank_of,
    rank_of_parts,
    shape_of_parts,
)
from ditkit_core.weights.fused_tensors import LoraMatrices

_MOST_WEIGHTS = 2**29
"""Weights of a layer, above the largest of known models (340 million): a small file may stand for a change of any size."""


@dataclass(frozen=True)
class FileAdapter:
    """The adapter of one module in the file, which may be several modules of ours."""

    name: str
    """The module's name in the file."""
    keys: Mapping[str, str]
    """The file's key by part: `down`, `up`, perhaps `magnitude`, or the parts in `nn/factored.py: PARTS`; perhaps `alpha`."""
    parts: tuple[TensorSlice, ...]
    """The parts of our modules that make up its rows."""
    rank: int
    scale: float
    """The factor of the change."""
    method: str = "lora"
    """`lora`, `lokr` or `loha`."""

    @classmethod
    def of(
        cls,
        source: SafetensorsSource,
        keys: Mapping[str, str],
        parts: tuple[TensorSlice, ...],
        modules: Mapping[str, tuple[int, ...]],
        header: AlphaHeader,
        names: Sequence[str],
    ) -> "FileAdapter":
        """Understand the keys of one module of a file (`FileAdapter.keys`); of its tensors only alpha is read.

        Args:
            parts: Its rows, as parts of our modules.
            modules: Weight shapes [out, in] of our modules.
            header: For a file without keys of alpha.
            names: The module's names in all forms.
        """
        # The layer's shape in the file's form: fused modules have one A and the rows of all.
        layer = (sum(modules[part.name][0] // part.of for part in parts), modules[parts[0].name][1])
        shapes = {part: tuple(source.tensors[key].shape) for part, key in keys.items()}
        factors = {part: shape for part, shape in shapes.items() if part in METHOD_OF_PART}
        has_number = shapes.get("alpha", ()) in ((), (1,))
        if factors:
            _check_factors(source, keys, factors, layer, has_number=has_number)
            rank, low_rank, method = rank_of_parts(factors), low_rank_of(factors), METHOD_OF_PART[next(iter(factors))]
            scale = float(source.read(keys["alpha"])) / low_rank if "alpha" in keys and low_rank is not None else 1.0
            return cls(names[0], keys, parts, rank, scale, method)
        _check_lora(source, keys, parts, shapes, layer, has_number=has_number)
        rank = shapes["down"][0]
        # Without any alpha the scale is 1, as for every reader of such files.
        scale = float(source.read(keys["alpha"])) / rank if "alpha" in keys else header.scale(rank, names)
        return cls(names[0], keys, parts, rank, scale)

    def lora(self, source: SafetensorsSource, index: int, columns: Tensor | None = None) -> LoraMatrices:
        """Read the LoRA of one of its parts; of the rank only `columns` (of B, and rows of A) unless they are None."""

        def read(part: str) -> Tensor:
            return source.read(self.keys[part], index=index, of=len(self.parts)).float()

        down, up = source.read(self.keys["down"]).float().flatten(1), read("up").flatten(1)
        if columns is not None:
            down, up = down[columns], up[:, columns]
        magnitude = read("magnitude").flatten() if "magnitude" in self.keys else None
        return LoraMatrices(down, up, magnitude, magnitude is not None and is_over_base(source.metadata))

    def factored(self, source: SafetensorsSource, index: int) -> FactoredMatrices:
        """Read the LoKr or LoHa of one of its parts."""
        tensors = {part: source.read(key).float() for part, key in self.keys.items() if part in METHOD_OF_PART}
        return FactoredMatrices(tensors, index, len(self.parts))


def _check_lora(
    source: SafetensorsSource,
    keys: Mapping[str, str],
    parts: tuple[TensorSlice, ...],
    shapes: Mapping[str, tuple[int, ...]],
    layer: tuple[int, int],
    *,
    has_number: bool,
) -> None:
    for kind in ("down", "up"):
        if kind not in keys:
            there, ours = ", ".join(keys.values()), ", ".join(dict.fromkeys(part.name for part in parts))
            raise UserError(f"{source.path} has {there} but no {kind} matrix for {ours}; fetch the file again")
    down, up = shapes["down"], shapes["up"]
    rank = down[0] if down else 0
    fits = rank > 0 and (*up[:1], math.prod(up[1:]), math.prod(down[1:])) == (layer[0], rank, layer[1])
    if not fits or not has_number:
        raise UserError(
            f"{source.path}: {keys['down']} {list(down)} and {keys['up']} {list(up)} do not fit the layer's "
            f"{list(layer)}; name a LoRA of this model"
        )
    if "magnitude" in keys and shapes["magnitude"] not in ((layer[0],), (layer[0], 1)):
        raise UserError(
            f"{source.path}: {keys['magnitude']} is not one norm per output of the layer; "
            "merge that file with the program that made it"
        )


def _check_factors(
    source: SafetensorsSource,
    keys: Mapping[str, str],
    factors: Mapping[str, tuple[int, ...]],
    layer: tuple[int, int],
    *,
    has_number: bool,
) -> None:
    first = keys[next(iter(factors))]
    if others := keys.keys() - METHOD_OF_PART.keys() - {"alpha"}:
        raise UserError(
            f"{source.path}: {keys[min(others)]} next to {first} is of another method; merge that file with the program that made it"
        )
    fits = are_factors(factors) and shape_of_parts(factors) == layer and math.prod(layer) <= _MOST_WEIGHTS
    if not fits or not has_number:
        shown = ", ".join(f"{part} {list(shape)}" for part, shape in factors.items())
        raise UserError(
            f"{source.path}: {first}: {shown} are not a LoKr or LoHa of the layer's {list(layer)}; name an adapter of this model"
        )
    if any(key.startswith("base_model.model.") for key in keys.values()):
        raise UserError(
            f"{source.path}: {first} has peft's own names, whose scale depends on a rank that is not in the file; merge it with peft"
        )
