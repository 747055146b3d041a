"""Reads adapter files in every supported form of names.

A file's modules are found by listing the names of each Linear layer of the model in each form, and
looking up the file's names in that list (`keys.py`).

| form | key |
|---|---|
| official (ComfyUI) | `diffusion_model.` + official name + `.lora_A.weight` or `.lora_down.weight`, perhaps `.alpha` |
| diffusers | `transformer.` + diffusers name + `.lora_A.weight`, alpha in the header |
| older diffusers, SimpleTuner | the same with `.lora.down.weight` |
| kohya, musubi | `lora_unet_` + official name with underscores + `.lora_down.weight`, `.alpha` |
| OneTrainer | as kohya, or `lora_transformer_` + diffusers name with underscores |
| LyCORIS' wrapper | `lycoris_` + name with underscores |
| peft | `base_model.model.` + official or diffusers name + `.lora_A.weight`, alpha in `adapter_config.json` next to the file |
| DiffSynth | official name + `.lora_A.default.weight` |

| key of a LoKr or LoHa behind a module's name | meaning |
|---|---|
| `.lokr_w1`, or `.lokr_w1_a` and `.lokr_w1_b` | the first factor of the Kronecker product, whole or as a low-rank product |
| `.lokr_w2`, or `.lokr_w2_a` and `.lokr_w2_b` | the second factor |
| `.hada_w1_a`, `.hada_w1_b`, `.hada_w2_a`, `.hada_w2_b` | the two low-rank products whose elementwise product is the change |
| `.alpha` | as ComfyUI and LyCORIS have it: over the rank of the last low-rank factor, and without effect where none is |

A form may have several of our modules in one tensor, or one of ours in several:
`weights/fused_tensors.py` converts adapters between them.

The scale alpha / rank belongs to a module here, never to a file: `scale`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ditkit_core.adapters.dora import is_over_base, row_factors
from ditkit_core.adapters.files.alpha import AlphaHeader
from ditkit_core.adapters.files.differences import (
    Difference,
    add_difference,
    find_differences,
    not_applied,
)
from ditkit_core.adapters.files.keys import (
    AdapterKey,
    FileKeys,
    KnownNames,
    another_model,
    split_differences,
)
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.adapter_formats import FORMATS
from ditkit_core.models.other_models import looks_like
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.weights.factored import (
    METHOD_OF_PART,
    FactoredMatrices,
    are_factors,
    low_rank_of,
    rank_of_parts,
    shape_of_parts,
)
from ditkit_core.weights.fused_tensors import FusedTensors, LoraMatrices, columns_of_owners, join
from ditkit_core.weights.load import first_ten, known_prefix

_MOST_WEIGHTS = 2**29
"""Weights of a layer, above the largest of known models (340 million): a small file may stand for a
change of any size."""


@dataclass(frozen=True)
class FileAdapter:
    """The adapter of one module in the file, which may be several modules of ours."""

    name: str
    keys: Mapping[str, str]
    """The file's key by part: `down`, `up`, perhaps `magnitude`, or the parts in `nn/factored.py:
    PARTS`; perhaps `alpha`."""
    parts: tuple[TensorSlice, ...]
    """The parts of our modules that make up its rows."""
    rank: int
    scale: float
    """The factor of the change."""
    method: str = "lora"

    @classmethod
    def of(
        cls,
        source: SafetensorsSource,
        module_keys: Mapping[str, AdapterKey],
        parts: tuple[TensorSlice, ...],
        modules: Mapping[str, tuple[int, ...]],
        header: AlphaHeader,
        names: Sequence[str],
    ) -> "FileAdapter":
        """Understand the keys of one module of a file; of its tensors only alpha is read.

        Args:
            module_keys: Its keys, by kind.
            parts: Its rows, as parts of our modules.
            modules: Weight shapes [out, in] of our modules.
            header: For a file without keys of alpha.
            names: The module's names in all forms.
        """
        keys = {kind: key.text for kind, key in module_keys.items()}
        # The layer's shape in the file's form: fused modules have one A and the rows of all.
        layer = (sum(modules[part.name][0] // part.of for part in parts), modules[parts[0].name][1])
        shapes = {part: tuple(source.tensors[key].shape) for part, key in keys.items()}
        factors = {part: shape for part, shape in shapes.items() if part in METHOD_OF_PART}
        has_number = shapes.get("alpha", ()) in ((), (1,))
        if factors:
            _check_factors(source, keys, factors, layer, has_number=has_number)
            rank = rank_of_parts(factors)
            low_rank = low_rank_of(factors)
            method = METHOD_OF_PART[next(iter(factors))]
            scale = (
                float(source.read(keys["alpha"])) / low_rank
                if "alpha" in keys and low_rank is not None
                else 1.0
            )
            return cls(names[0], keys, parts, rank, scale, method)
        _check_lora(source, keys, parts, shapes, layer, has_number=has_number)
        rank = shapes["down"][0]
        # Without any alpha the scale is 1, as for every reader of such files.
        scale = (
            float(source.read(keys["alpha"])) / rank
            if "alpha" in keys
            else header.scale(rank, names)
        )
        return cls(names[0], keys, parts, rank, scale)

    def lora(
        self, source: SafetensorsSource, index: int, columns: Tensor | None = None
    ) -> LoraMatrices:
        """Read the LoRA of one of its parts; of the rank only `columns` (of B, and rows of A)
        unless they are None."""

        def read(part: str) -> Tensor:
            return source.read(self.keys[part], index=index, of=len(self.parts)).float()

        down, up = source.read(self.keys["down"]).float().flatten(1), read("up").flatten(1)
        if columns is not None:
            down, up = down[columns], up[:, columns]
        magnitude = read("magnitude").flatten() if "magnitude" in self.keys else None
        return LoraMatrices(
            down, up, magnitude, magnitude is not None and is_over_base(source.metadata)
        )

    def factored(self, source: SafetensorsSource, index: int) -> FactoredMatrices:
        """Read the LoKr or LoHa of one of its parts."""
        tensors = {
            part: source.read(key).float()
            for part, key in self.keys.items()
            if part in METHOD_OF_PART
        }
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
            there = ", ".join(keys.values())
            ours = ", ".join(dict.fromkeys(part.name for part in parts))
            raise UserError(
                f"{source.path} has {there} but no {kind} matrix for {ours}; fetch the file again"
            )
    down, up = shapes["down"], shapes["up"]
    rank = down[0] if down else 0
    fits = rank > 0 and (*up[:1], math.prod(up[1:]), math.prod(down[1:])) == (
        layer[0],
        rank,
        layer[1],
    )
    if not fits or not has_number:
        raise UserError(
            f"{source.path}: {keys['down']} {list(down)} and {keys['up']} {list(up)} do not fit "
            f"the layer's {list(layer)}; name a LoRA of this model"
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
            f"{source.path}: {keys[min(others)]} next to {first} is of another method; merge that "
            f"file with the program that made it"
        )
    fits = (
        are_factors(factors)
        and shape_of_parts(factors) == layer
        and math.prod(layer) <= _MOST_WEIGHTS
    )
    if not fits or not has_number:
        shown = ", ".join(f"{part} {list(shape)}" for part, shape in factors.items())
        raise UserError(
            f"{source.path}: {first}: {shown} are not a LoKr or LoHa of the layer's {list(layer)}; "
            f"name an adapter of this model"
        )
    if any(key.startswith(FORMATS["peft"].prefixes) for key in keys.values()):
        raise UserError(
            f"{source.path}: {first} has peft's own names, whose scale depends on a rank that is "
            f"not in the file; merge it with peft"
        )


@dataclass(frozen=True)
class FilePiece:
    """Some rows of a module of ours in a file."""

    adapter: FileAdapter
    index: int
    columns: Tensor | None
    """The columns of the adapter's B that belong to our module; None for all."""


@dataclass(frozen=True)
class FileModule:
    """A file's adapter of one module of ours."""

    pieces: tuple[FilePiece | None, ...]
    """Pieces of equal size, from the first row on; None where the file has no adapter."""
    rank: int
    scale: float
    """The factor of up·down."""
    use_dora: bool
    method: str = "lora"

    def num_factors(self, source: SafetensorsSource) -> int:
        """Numbers in the tensors of its LoKr or LoHa."""
        adapters = [piece.adapter for piece in self.pieces if piece is not None]
        return sum(
            math.prod(source.tensors[key].shape)
            for adapter in adapters
            for part, key in adapter.keys.items()
            if part in METHOD_OF_PART
        )


@dataclass(frozen=True)
class AdapterFile:
    """An adapter file whose names are understood, but whose matrices are not read yet."""

    source: SafetensorsSource
    modules: Mapping[str, FileModule]
    differences: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    """What is added to whole parameters, by our name."""

    def add_differences(self, name: str, parameter: Tensor, strength: float) -> None:
        """Add the differences of a parameter at a strength to its fp32 values, in place; nothing
        where the file has none."""
        add_difference(self.source, self.differences.get(name, ()), parameter, strength)

    def read_factored(self, module: str) -> FactoredMatrices:
        """Read a module's LoKr or LoHa."""
        pieces = self.modules[module].pieces
        adapter = pieces[0].adapter if pieces[0] is not None and len(pieces) == 1 else None
        if adapter is None or adapter.method == "lora":
            raise UserError(
                f"{self.source.path}: {module} is in {len(pieces)} pieces, which a LoKr or LoHa of "
                f"one layer is not; merge it"
            )
        assert pieces[0] is not None
        return adapter.factored(self.source, pieces[0].index)

    def read(self, module: str) -> LoraMatrices:
        """Read a module's A, B and perhaps magnitudes."""
        file_module = self.modules[module]
        return _read_pieces(self.source, file_module.pieces, file_module.scale)

    def change(self, module: str, weight: Tensor, strength: float) -> None:
        """Merge the adapter at a strength into the fp32 weight [out, in] of a module, in place."""
        if self.modules[module].method != "lora":
            weight.add_(self.change_of(module), alpha=strength)
            return
        scale, read = self.modules[module].scale, self.read(module)
        if read.magnitude is None:
            weight.addmm_(read.up, read.down, alpha=strength * scale)
            return
        # DoRA's result is not linear in the scale, so a strength blends the weight with the merged
        # one instead.
        factors = row_factors(weight, read, scale)
        weight.mul_((1 + strength * (factors - 1))[:, None])
        weight.addmm_(read.up * (strength * scale * factors)[:, None], read.down)

    def change_of(self, module: str) -> Tensor:
        """The change of a module's weight by a LoKr or LoHa, with its scale. A tensor of the file
        may be several modules of ours, or some rows of one."""
        changes = [matrices.change() * scale for matrices, scale in self.factored(module)]
        return torch.cat(changes) if len(changes) > 1 else changes[0]

    def factored(self, module: str) -> Iterator[tuple[FactoredMatrices, float]]:
        """A module's LoKr or LoHa, and its scale; in several pieces, in order, where the file has
        its rows apart."""
        for piece in self.modules[module].pieces:
            assert piece is not None, "`_assemble_factored` refuses it"
            yield piece.adapter.factored(self.source, piece.index), piece.adapter.scale


def _read_pieces(
    source: SafetensorsSource, pieces: Sequence[FilePiece | None], scale: float
) -> LoraMatrices:
    def read(piece: FilePiece) -> tuple[str, LoraMatrices]:
        read = piece.adapter.lora(source, piece.index, piece.columns)
        if piece.adapter.scale != scale:
            read = replace(read, up=read.up * (piece.adapter.scale / scale))
        return piece.adapter.name, read

    return join([None if piece is None else read(piece) for piece in pieces])


def refuse_damaged(path: Path, modules: Iterable[tuple[str, Sequence[Tensor]]]) -> None:
    """Refuse a file with values that are not finite, from its modules with the tensors to
    examine."""
    finite = {
        name: all(bool(tensor.isfinite().all()) for tensor in tensors) for name, tensors in modules
    }
    if broken := [name for name, is_finite in finite.items() if not is_finite]:
        raise UserError(
            f"{path}: values of {len(broken)} of {len(finite)} modules are not finite (NaN or "
            f"infinite): {first_ten(broken)}; it was damaged in training, take an earlier save"
        )


def open_adapter(
    path: Path,
    names: StateDictNames,
    modules: Mapping[str, tuple[int, ...]],
    *,
    parameters: Mapping[str, tuple[int, ...]] | None = None,
) -> AdapterFile:
    """Open an adapter file and find each of its keys in the model, with rank and scale.

    Matrices are read only where the form fuses modules that the model has apart: their columns of
    zeros in B tell modules apart.

    Args:
        modules: Weight shapes [out, in] of the model's Linear layers, by our name.
        parameters: Shapes of all its parameters, by our name, for what is merged: only merging can
            use a file's differences.
    """
    source = SafetensorsSource.open(path)
    plain, differences = split_differences(source)
    known_names = KnownNames.of(names, modules)
    keys = known_names.keys_of(plain)
    if keys.unmatched:
        _refuse_whole(source, names, modules)
    if differences and parameters is None:
        raise not_applied(path, differences)
    if differences and not plain.tensors:  # LyCORIS' `full`, or an extraction
        file = AdapterFile(plain, {})
    else:
        file = understand_adapter(plain, known_names, keys, modules)
    if parameters is None:
        return file
    return with_differences(file, source, differences, names, parameters)


def _refuse_whole(
    source: SafetensorsSource, names: StateDictNames, modules: Mapping[str, object]
) -> None:
    """Refuse the file of a whole transformer; arguments as of `open_adapter`."""
    # Weights of whole layers, which no adapter has: many of a transformer's other tensors are
    # biases and norms.
    weights = {f"{module}.weight": shape for module, shape in modules.items()}
    if known_prefix(source, names, weights)[1] > len(source.tensors) / 4:
        raise UserError(
            f"{source.path} is a whole transformer, not an adapter; name the file that the export "
            f"command's --extract {source.path} --base BASE --rank 64 "
            "makes of its difference to the base"
        )


def with_differences(
    file: AdapterFile,
    source: SafetensorsSource,
    keys: Sequence[str],
    names: StateDictNames,
    parameters: Mapping[str, tuple[int, ...]],
) -> AdapterFile:
    """A file with its differences; arguments and errors as of `find_differences`."""

    def scale_of(module: str) -> float:
        pieces = file.modules[module].pieces if module in file.modules else ()
        return next((piece.adapter.scale for piece in pieces if piece is not None), 1.0)

    return replace(
        file, source=source, differences=find_differences(source, keys, names, parameters, scale_of)
    )


def understand_adapter(
    source: SafetensorsSource,
    known_names: KnownNames,
    keys: FileKeys,
    modules: Mapping[str, tuple[int, ...]],
) -> AdapterFile:
    """`open_adapter` for a file that is open; `known_names` may be of more layers than those that
    the file adapts, `modules`."""
    path = source.path
    if not source.tensors:
        raise UserError(f"{path} is empty; name a LoRA file")
    fused, unmatched = FusedTensors(), list(keys.unmatched)
    names = {parts: known_names.forms[parts] for parts in keys.modules}
    for parts, by_kind in keys.modules.items():
        if not fused.add(names[parts][0], parts):
            unmatched += [key.text for key in by_kind.values()]
    if unmatched:
        likeness, remedy = looks_like(unmatched, known_names.others, source.metadata)
        if len(unmatched) == len(source.tensors):
            raise another_model(source, likeness, remedy)
        raise UserError(
            f"{path}: {len(unmatched)} of {len(source.tensors)} keys fit no adapter of this "
            f"model{likeness}: {first_ten(unmatched)}; {remedy or 'name a LoRA of this model'}"
        )
    # Only now, because an unreadable header of a file of another model is not the problem to
    # report.
    header = AlphaHeader.of(source)
    adapters = {
        names[parts][0]: FileAdapter.of(source, by_kind, parts, modules, header, names[parts])
        for parts, by_kind in keys.modules.items()
    }
    # Fused tensors tell their modules apart only by values, so these are the only matrices that are
    # read here.
    columns = {name: _columns(source, adapter) for name, adapter in adapters.items()}
    file_modules: dict[str, FileModule] = {}
    for module in modules:
        pieces: list[FilePiece | None] = []
        for part in fused.parts.get(module, ()):
            if part is None or module not in columns[part.name]:
                pieces.append(None)
            else:
                pieces.append(
                    FilePiece(adapters[part.name], part.index, columns[part.name][module])
                )
        if any(pieces):
            file_modules[module] = _assemble_module(source, module, tuple(pieces))
    return AdapterFile(source, file_modules)


def _columns(source: SafetensorsSource, adapter: FileAdapter) -> dict[str, Tensor | None]:
    """The columns of an adapter's B that belong to each of our modules; None for all."""
    owners = [part.name for part in adapter.parts]
    if len(set(owners)) == 1 or adapter.method != "lora":
        return dict.fromkeys(owners)
    up = source.read(adapter.keys["up"]).float().flatten(1)
    columns: dict[str, Tensor | None] = dict(columns_of_owners(up, owners))
    if "magnitude" in adapter.keys:  # a magnitude changes its rows even if B is zero there
        columns = {owner: columns.get(owner) for owner in owners}
    return columns


def _assemble_module(
    source: SafetensorsSource, module: str, pieces: tuple[FilePiece | None, ...]
) -> FileModule:
    adapted_pieces = [piece for piece in pieces if piece is not None]
    if any(piece.adapter.method != "lora" for piece in adapted_pieces):
        return _assemble_factored(source, module, pieces)
    with_magnitude = [piece for piece in adapted_pieces if "magnitude" in piece.adapter.keys]
    if with_magnitude and len(with_magnitude) < len(pieces):
        raise UserError(
            f"{source.path}: {with_magnitude[0].adapter.keys['magnitude']} is a norm of some "
            f"outputs of {module}, but the "
            "other outputs have none; merge that file with the program that made it"
        )
    scales = {piece.adapter.scale for piece in adapted_pieces}
    # Pieces with different scales are read with their scale in B, so that the module has a single
    # scale: 1.
    scale = scales.pop() if len(scales) == 1 else 1.0
    one = (
        len({piece.adapter.name for piece in adapted_pieces}) == 1
        and adapted_pieces[0].columns is None
    )
    rank = adapted_pieces[0].adapter.rank if one else len(_read_pieces(source, pieces, scale).down)
    return FileModule(pieces, rank, scale, bool(with_magnitude))


def _assemble_factored(
    source: SafetensorsSource, module: str, pieces: tuple[FilePiece | None, ...]
) -> FileModule:
    adapters = [None if piece is None else piece.adapter for piece in pieces]
    methods = {adapter.method for adapter in adapters if adapter is not None}
    first = adapters[0]
    if len(methods) > 1 or None in adapters or first is None:
        raise UserError(
            f"{source.path}: some rows of {module} have a {' or '.join(sorted(methods))}, and "
            "others another or none; merge that file with the program that made it"
        )
    return FileModule(pieces, first.rank, first.scale, False, methods.pop())
