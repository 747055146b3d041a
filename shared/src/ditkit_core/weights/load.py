"""Loads weights from files into parameters: every name and shape is checked first, then one tensor
is read after the other.

A tensor goes from its file to the device and dtype of its parameter before the next one is read. So
the host has at most the tensors that stay there and one more. The rows of a tensor are contiguous
in a file, so a form with fused parameters is read as directly as any other.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.nn.quantized_layouts import BLOCK, of_all_rows, quantized_layout
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.weights.fused_tensors import FusedTensors
from ditkit_core.weights.rows import RowReader

_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Words of `match` about weights that do not fit: what described the model, and how the user
    can fix it; empty: as for a preset."""

    described_by: str = "the preset"
    remedy: str = ""


def match(
    source: SafetensorsSource,
    names: StateDictNames,
    wanted: Mapping[str, tuple[int, ...]],
    *,
    ignore: Callable[[str], bool] = lambda name: False,
    advice: Advice | None = None,
) -> dict[str, tuple[TensorSlice, ...]]:
    """Find each of the model's parameters (`wanted`: shapes by our name) in a file, in whatever
    form the file names and fuses them.

    Leading and trailing ones of a shape are ignored: the weight [C, C, 1, 1] of a convolution
    matches the matrix [C, C]. So are all axes but one of a tensor that `StateDictNames.flat` names.

    Args:
        ignore: Whether a tensor of the file may be left over, by its name there.
        advice: Words for the user; by default those for a transformer that a preset describes.

    Returns:
        By our name: the parts of the file's tensors that make up the parameter's rows, in order.
    """
    # One prefix for the complete file, so that a stray tensor with another one is reported and not
    # taken.
    prefix, _ = known_prefix(source, names, wanted)
    fused = FusedTensors()
    unexpected: list[str] = []
    misshapen: list[str] = []
    for key, stored in source.tensors.items():
        parts = _native_parts(key, prefix, names)
        if not parts and _is_constant(key, prefix, names):
            continue
        if not parts or not all(part.name in wanted for part in parts) or not fused.add(key, parts):
            if not ignore(key):
                unexpected.append(key)
            continue
        # Names first, shapes second: a name that fits with the wrong shape deserves another message
        # than an unknown one.
        expected = _shape_in_file(parts, wanted)
        if _trimmed(stored.shape) != _trimmed(_flattened(expected, stored.shape, key, names)):
            misshapen.append(f"{key} {list(stored.shape)} instead of {list(expected)}")
    mapping = dict(fused.complete)
    missing = [name for name in wanted if name not in mapping]
    if missing or unexpected or misshapen:
        lists = "; ".join(
            f"{len(keys)} {problem}: {first_ten(keys)}"
            for problem, keys in (
                ("missing", missing),
                ("unexpected", unexpected),
                ("mis-shaped", misshapen),
            )
            if keys
        )
        natives = [
            part.name for key in source.tensors for part in _native_parts(key, prefix, names)
        ]
        reason = _likely_reason(wanted, natives, mapping, unexpected, advice or Advice())
        raise UserError(f"{source.path} does not fit the model: {reason}; {lists}")
    return mapping


def _native_parts(key: str, prefix: str, names: StateDictNames) -> tuple[TensorSlice, ...]:
    """The parts of our parameters that make up a file's tensor; none if no form has its name."""
    return (names.to_native(key.removeprefix(prefix)) or ()) if key.startswith(prefix) else ()


def _is_constant(key: str, prefix: str, names: StateDictNames) -> bool:
    """Whether a file's tensor is a constant, which the model makes itself."""
    return key.startswith(prefix) and names.to_native(key.removeprefix(prefix)) == ()


def _shape_in_file(
    parts: tuple[TensorSlice, ...], wanted: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of a file's tensor that is made up of these parts of our parameters."""
    if len(parts) == 1 and parts[0].of == 1:
        return tuple(wanted[parts[0].name])
    shapes = {(wanted[part.name][0] // part.of, *wanted[part.name][1:]) for part in parts}
    assert len(shapes) == 1, f"{parts} are not equally large: {shapes}"
    rows, *rest = shapes.pop()
    return (rows * len(parts), *rest)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its leading and trailing ones."""
    longer = [axis for axis, size in enumerate(shape) if size != 1]
    return tuple(shape[longer[0] : longer[-1] + 1]) if longer else ()


def _flattened(
    shape: tuple[int, ...], stored: tuple[int, ...], key: str, names: StateDictNames
) -> tuple[int, ...]:
    """A parameter's shape, or its one axis in a file that has it so (`StateDictNames.flat`)."""
    is_flat = names.flat and len(stored) == 1 and re.search(names.flat, key)
    return (prod(shape),) if is_flat else shape


def first_ten(items: list[str]) -> str:
    """Up to ten items in one line, and the number of all others."""
    return ", ".join(items[:10]) + (f" and {len(items) - 10} more" if len(items) > 10 else "")


def fits_shapes(
    source: SafetensorsSource, names: StateDictNames, wanted: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether a file's tensors are these parameters, by name and shape. Tensors that no form knows
    are ignored."""
    prefix, _ = known_prefix(source, names)
    shapes: dict[str, tuple[int, ...]] = {}
    for key, stored in source.tensors.items():
        parts = _native_parts(key, prefix, names)
        for part in parts:
            rows, *rest = stored.shape or (1,)
            shape = (rows * part.of // len(parts), *rest)
            expected = wanted.get(part.name, shape)
            is_same = shape == _flattened(expected, stored.shape, key, names)
            shapes[part.name] = _trimmed(expected if is_same else shape)
    return shapes == {name: _trimmed(shape) for name, shape in wanted.items()}


def known_prefix(
    source: SafetensorsSource, names: StateDictNames, wanted: Mapping[str, object] | None = None
) -> tuple[str, int]:
    """The prefix behind which most of a file's names are the model's, and their number; only names
    of `wanted` count, if given."""
    # Files of complete checkpoints put one in front of every name, such as
    # `model.diffusion_model.`.

    def num_known(prefix: str) -> int:
        natives = [_native_parts(key, prefix, names) for key in source.tensors]
        return sum(
            bool(parts) and (wanted is None or all(part.name in wanted for part in parts))
            for parts in natives
        )

    counted = {prefix: num_known(prefix) for prefix in (*names.prefixes, "")}
    return max(counted.items(), key=lambda item: item[1])


def _likely_reason(
    wanted: Mapping[str, object],
    natives: list[str],
    mapping: Mapping[str, object],
    unexpected: list[str],
    advice: Advice,
) -> str:
    if any(key.endswith((".scale_weight", ".weight_scale", "scaled_fp8")) for key in unexpected):
        return "it has scales for 8-bit weights that it lacks; fetch it again"
    # A file of another depth or width still has most names. Where hardly any is found, it is
    # another model.
    if len(mapping) < len(wanted) / 10:
        return f"these are weights of another model, or with unknown names; {advice.remedy or 'name another file or preset'}"
    # The depth is the commonest difference between presets, and the easiest to name.
    ours, theirs = _depths(wanted), _depths(natives)
    for group in ours:
        if ours[group] != theirs[group]:
            return (
                f"{advice.described_by} does not fit the weights, which have {theirs[group]} "
                f"{group} "
                f"where it has {ours[group]}; {advice.remedy or 'choose another model.preset'}"
            )
    remedy = advice.remedy or "choose another model.preset or other weights"
    return f"{advice.described_by} does not fit the weights; {remedy}"


def _depths(names: Iterable[str]) -> Counter[str]:
    """The number of modules in each numbered list of modules: `{"layers": 30}`."""
    numbered = {
        prefix_match[0] for name in names if (prefix_match := re.match(r".*?\.\d+(?=\.)", name))
    }
    return Counter(name.rpartition(".")[0] for name in numbered)


def load_into(
    model: nn.Module | StagedModel,
    source: SafetensorsSource,
    mapping: Mapping[str, tuple[TensorSlice, ...]],
    *,
    device_of: Callable[[str], torch.device],
    dtype_of: Callable[[str], torch.dtype],
    quantize_on: Callable[[str], torch.device] | None = None,
    edits: Mapping[str, Callable[[Tensor], None]] | None = None,
    division: RowReader | None = None,
) -> None:
    """Load a file's tensors into a model's parameters, in the order of the files.

    Parameters that peft moved below a `base_layer` are found by the name that they had before. The
    weight of a quantized layer is quantized before the next one is read.

    Args:
        model: The model, built on `meta`; each loaded parameter keeps its `requires_grad`.
        mapping: Parts of the file's tensors by our name, from `match`.
        dtype_of: The dtype of a parameter on its device, if it is not quantized.
        quantize_on: The device on which the weight of a quantized layer is quantized, in fp32. None
            for the one where it stays, which for streamed blocks is the host: its cores take
            minutes for billions of weights.
        edits: By our name: changes the tensor in place, on the CPU in fp32, before it is converted
            and moved.
        division: Of the rows over ranks: only this rank's are read, except where an edit needs all.
    """
    state = model.state_dict()
    full_names = {name.replace(".base_layer.", "."): name for name in state}
    # One reader for all tensors: its scratch memory is allocated once.
    reader = ParameterReader(source)
    for name in sorted(mapping, key=lambda name: file_position(source, mapping[name][0])):
        device = device_of(name)
        dtype = dtype_of(name)
        parts = mapping[name]
        edit = (edits or {}).get(name)
        owner, _, leaf = full_names[name].rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, QuantizedLinear) and leaf == "weight":
            codes_device = device if quantize_on is None else quantize_on(name)
            _quantize_into(module, reader, parts, device, codes_device, edit, division)
            continue
        shape = state[full_names[name]].shape
        rows = None if division is None else division.rows(module._parameters.get(leaf))
        if edit is not None:
            # A copy even on the CPU in fp32: the next tensor takes the same memory.
            tensor = _part(reader.in_fp32(parts, shape, edit), rows).to(device, dtype, copy=True)
        else:
            shape = shape if rows is None else torch.Size((len(rows), *shape[1:]))
            tensor = torch.empty(shape, device=device, dtype=dtype)
            reader.fill(
                tensor,
                parts,
                rows=rows,
                num_rows=len(state[full_names[name]]) if rows is not None else 0,
            )
        if division is None or rows is None:
            _set(module, leaf, tensor)
        else:
            division.put(module, leaf, tensor)


def file_position(source: SafetensorsSource, part: TensorSlice) -> tuple[Path, int]:
    """A sort key of parts: the order in which a disk reads them fastest."""
    stored = source.tensors[part.name]
    return stored.file, stored.offset + stored.num_bytes * part.index // part.of


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    # Into the dictionaries, because a parameter on `meta` cannot be changed in place: it has no
    # memory.
    if (old := module._parameters.get(name)) is not None:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        module._buffers[name] = tensor


def _stored_codes(
    layer: QuantizedLinear,
    reader: "ParameterReader",
    parts: tuple[TensorSlice, ...],
    device: torch.device,
    edit: Callable[[Tensor], None] | None,
    rows: range | None,
) -> Mapping[str, Tensor] | None:
    """Codes and scales of a layer, or of some of its rows, as the file has them; None if its values
    have to be quantized."""
    # A merge changes the values.
    if edit is not None:
        return None
    if layer.kind == "fp8" and {reader.source.tensors[part.name].dtype for part in parts} == {
        torch.float8_e4m3fn
    }:
        num_rows = layer.out_features if rows is None else len(rows)
        codes = torch.empty((num_rows, layer.in_features), device=device, dtype=torch.float8_e4m3fn)
        reader.fill(codes, parts, codes=True, rows=rows, num_rows=layer.out_features)
        return {
            "weight": codes,
            "weight_scale": reader.scales(parts, layer.out_features).to(device),
        }
    if {reader.source.tensors[part.name].packed_kind for part in parts} == {layer.kind}:
        return {
            name: value.to(device)
            for name, value in reader.packed(parts, layer.out_features, rows).items()
        }
    return None


def _quantize_into(
    layer: QuantizedLinear,
    reader: "ParameterReader",
    parts: tuple[TensorSlice, ...],
    device: torch.device,
    quantize_on: torch.device,
    edit: Callable[[Tensor], None] | None,
    division: RowReader | None,
) -> None:
    """Give a quantized layer the codes and scales of a file's tensors; if it is divided, bitwise
    the rows that a whole layer would have."""
    shape = torch.Size((layer.out_features, layer.in_features))
    rows = None if division is None else division.rows(layer.weight)
    # Unchanged if they can be: other scales would round them a second time.
    values = _stored_codes(layer, reader, parts, device, edit, rows)
    if division is None:
        if values is None:
            weight = reader.in_fp32(parts, shape, edit).to(quantize_on)
            values = quantized_layout(layer.kind).quantize(weight, of_all_rows)
        layer.set_values({name: value.to(device) for name, value in values.items()})
        return
    assert rows is not None
    if values is None:
        # A block of weights that share a scale may begin in one rank's rows and end in another's.
        needs_all_rows = (
            layer.kind == "nf4" and division.rows_each(layer.weight) * shape[1] % BLOCK != 0
        )
        weight = reader.in_fp32(
            parts, shape, edit, None if needs_all_rows or edit is not None else rows
        ).to(device)
        if needs_all_rows:
            gather = of_all_rows
        else:
            weight = weight if len(weight) == len(rows) else _part(weight, rows)
            first, count = rows.start * shape[1] // BLOCK, shape.numel() // BLOCK
            gather = lambda magnitudes: division.gather(magnitudes, first, count)
        values = quantized_layout(layer.kind).quantize(weight, gather)
    for name, parameter in layer.values().items():
        value = values[name]
        division.put(
            layer,
            name,
            _part(value, division.rows(parameter)).clone()
            if len(value) == len(parameter)
            else value,
        )


def _part(tensor: Tensor, rows: range | None) -> Tensor:
    return tensor if rows is None else tensor[rows.start : rows.stop]


@dataclass(frozen=True, kw_only=True)
class StoredParameters:
    """A model's parameters in a file, by our names."""

    source: SafetensorsSource
    mapping: Mapping[str, tuple[TensorSlice, ...]]
    """The parts of the file's tensors that make up a parameter, from `match`."""
    shapes: Mapping[str, tuple[int, ...]]
    edits: Mapping[str, Callable[[Tensor], None]] = field(default_factory=dict)
    """Changes a parameter in place, on the host in fp32."""

    @classmethod
    def of(
        cls, source: SafetensorsSource, names: StateDictNames, shapes: Mapping[str, tuple[int, ...]]
    ) -> Self:
        """The parameters of these shapes; UserError as `match`."""
        return cls(source=source, mapping=match(source, names, shapes), shapes=shapes)

    def read(self, name: str) -> Tensor:
        """Read one parameter to the host in fp32, edited; UserError if the file ends before its
        tensor does."""
        shape = torch.Size(self.shapes[name])
        return ParameterReader(self.source).in_fp32(self.mapping[name], shape, self.edits.get(name))


class ParameterReader:
    """Reads parameters one after the other through the same memory."""

    def __init__(self, source: SafetensorsSource):
        self.source = source
        self._passing, self._editing = Scratch(torch.uint8), Scratch(torch.float32)

    def scales(self, parts: tuple[TensorSlice, ...], num_rows: int) -> Tensor:
        """The scales of a matrix's codes, one per row, fp32 [rows, 1]. Fused layers may share a
        scale, and one layer may have several."""
        scales = torch.ones(len(parts), num_rows // len(parts))
        for part, rows in zip(parts, scales, strict=True):
            if (scale := self.source.scale_of(part.name, index=part.index, of=part.of)) is not None:
                rows.copy_(scale)
        return scales.view(num_rows, 1)

    def packed(
        self, parts: tuple[TensorSlice, ...], num_rows: int, rows: range | None
    ) -> dict[str, Tensor]:
        """Codes and scales of packed parts that make up a matrix of so many rows, or of some of its
        rows, on the CPU."""
        rows = range(num_rows) if rows is None else rows
        pieces: list[Mapping[str, Tensor]] = []
        spans = [
            (part, some)
            for part, _, some in _spans(
                torch.empty(len(rows), 1, device="meta"), parts, rows, num_rows
            )
        ]
        for part, some in spans or [(parts[0], range(0))]:  # none for a rank without rows
            stored = self.source.tensors[part.name]
            assert (
                stored.packing is not None and stored.packing.codes is not None and some is not None
            )
            first = part.index * (stored.shape[0] // part.of)
            pieces.append(stored.packing.codes(range(first + some.start, first + some.stop)))
        if len(pieces) == 1:
            return dict(pieces[0])
        # What belongs to no row is the same in each.
        shared = quantized_layout(self.source.tensors[parts[0].name].packed_kind).shared
        return {
            name: value if name in shared else torch.cat([piece[name] for piece in pieces])
            for name, value in pieces[0].items()
        }

    def fill(
        self,
        tensor: Tensor,
        parts: tuple[TensorSlice, ...],
        *,
        codes: bool = False,
        rows: range | None = None,
        num_rows: int = 0,
    ) -> None:
        """Fill a tensor, on any device and in any dtype, with the values of a file's parts; with
        `codes`, without applying scales.

        If it has only some `rows` of the parameter, the whole parameter has `num_rows`.
        """
        for part, values, some in _spans(tensor, parts, rows, num_rows):
            stored, where = self.source.tensors[part.name], {"index": part.index, "of": part.of}
            if some is not None and stored.shape[0] // part.of != num_rows // len(parts):
                # The file has an axis of one in front that the parameter has not, or the other way
                # round: it has no such rows.
                values.copy_(
                    self.source.read(part.name)
                    .reshape(num_rows, -1)[some.start : some.stop]
                    .reshape(-1)
                )
                continue
            # Read straight into the parameter: no copy in between.
            if tensor.device == _HOST and tensor.dtype == stored.dtype:
                self.source.read(part.name, values.view(torch.uint8), rows=some, **where)
            else:
                # Bytes first, then one copy that converts and moves: the host never has the tensor
                # in two dtypes. The copy blocks, because the next part overwrites the bytes.
                buffer = self._passing.of(values.numel() * stored.dtype.itemsize)
                values.copy_(self.source.read(part.name, buffer, rows=some, **where).view(-1))
            if not codes:
                self.source.apply_scale(values, part.name, rows=some, **where)

    def in_fp32(
        self,
        parts: tuple[TensorSlice, ...],
        shape: torch.Size,
        edit: Callable[[Tensor], None] | None = None,
        rows: range | None = None,
    ) -> Tensor:
        """The values, or some of their rows, in fp32 on the host, edited, in memory that the next
        call overwrites."""
        # Stored in fp32, the values are read straight into the scratch memory; others pass through
        # it and are converted.
        in_place = all(self.source.tensors[part.name].dtype == torch.float32 for part in parts)
        num_rows = 0 if rows is None else shape[0]
        shape = shape if rows is None else torch.Size((len(rows), *shape[1:]))
        num = shape.numel()
        scratch = (
            self._passing.of(4 * num).view(torch.float32) if in_place else self._editing.of(num)
        )
        tensor = scratch.view(shape)
        self.fill(tensor, parts, rows=rows, num_rows=num_rows)
        if edit is not None:
            edit(tensor)
        return tensor


def _spans(
    tensor: Tensor, parts: tuple[TensorSlice, ...], rows: range | None, num_rows: int
) -> Iterator[tuple[TensorSlice, Tensor, range | None]]:
    """Each part, the values of the tensor that come from it, and which of its rows these are; None
    for all."""
    if rows is None:
        for part, values in zip(parts, tensor.view(-1).tensor_split(len(parts)), strict=True):
            yield part, values, None
        return
    per_part = num_rows // len(parts)
    for index, part in enumerate(parts):
        before = index * per_part
        first, last = max(rows.start, before), min(rows.stop, before + per_part)
        if first < last:
            values = tensor[first - rows.start : last - rows.start].view(-1)
            yield part, values, range(first - before, last - before)


class Scratch:
    """Memory that tensors use one after the other.

    Allocated anew for each tensor, the process would grow to twice the model (measured): the
    allocator puts tensors that stay into the freed gaps, and finds none for the next temporary
    tensor.
    """

    def __init__(self, dtype: torch.dtype):
        self._memory = torch.empty(0, dtype=dtype)

    def of(self, num_elements: int) -> Tensor:
        if len(self._memory) < num_elements:
            self._memory = torch.empty(num_elements, dtype=self._memory.dtype)
        return self._memory[:num_elements]
