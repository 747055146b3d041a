"""Matrices in formats with scales by blocks or with a rotation, as ComfyUI's files have them: int8,
mxfp8, nvfp4.

A layer `X` of such a file says its format in the JSON of `X.comfy_quant`. Blocks of a model hold it
as it is stored (`quantize.py: hold_as_stored`); all else has its values, which are computed in fp32
when they are read:

| `format` | `X.weight` | scales |
|---|---|---|
| `int8_tensorwise` | int8 [out, in] | `X.weight_scale`, one number or one per row. With `convrot`, groups of `convrot_groupsize` columns were rotated before |
| `mxfp8` | float8_e4m3fn [out, in] | `X.weight_scale`: a power of two (e8m0) for each 32 columns of a row, in the tiles of cuBLAS |
| `nvfp4` | two e2m1 codes in a byte, the first in its upper half: uint8 [out, in / 2] | `X.weight_scale`: e4m3 for each 16 columns of a row, in these tiles; times the one number `X.weight_scale_2` |

With `X.pre_quant_scale` [in] (AWQ), the layer's input is multiplied by it, which is the same as
multiplying the matrix's columns. Such a matrix is always unpacked.

Sources: comfy_kitchen (tensor/ and backends/eager/) at 7d86acf, and its reader in ai-toolkit, both
read in November 2026; ConvRot, arXiv:2512.03673; cuBLAS's documentation, "1D Block Scaling Factors
Layout".
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import Packing, SafetensorsSource, StoredTensor
from ditkit_core.nn.quantized_layouts import (
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    ROTATED_INT8,
    quantized_layout,
    rotation_signs,
)

_TILE_ROWS, _TILE_COLUMNS = 128, 4
"""cuBLAS keeps the scales of 128 rows and 4 blocks of columns together."""

Parts = Mapping[str, StoredTensor]
"""The tensors of a layer by what follows its name: `weight`, `weight_scale`, …."""


class _Packed(NamedTuple):
    """A matrix in one of the formats."""

    kind: str
    """As in `nn/quantized_layouts.py`."""
    shape: tuple[int, int]
    codes: Callable[[range], dict[str, Tensor]]
    """From some of its rows to codes and scales, by the names of that layout."""


def packed_weight(layer: str, about: Mapping[str, Any], parts: Parts) -> StoredTensor | None:
    """The matrix of a layer as one tensor with its values in fp32; None if its format is not one of
    these.

    `about` is what `comfy_quant` says of the layer.
    """
    read_format = _FORMATS.get(str(about.get("format")))
    if read_format is None:
        return None
    try:
        packed = read_format(about, parts)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{layer} in the format {about['format']} cannot be read ({error}); fetch the file "
            f"again"
        ) from error
    shape, unpack = packed.shape, partial(_unpacked, packed)
    packing = Packing(tuple(parts.values()), unpack, packed.kind, packed.codes)
    if (columns := parts.get("pre_quant_scale")) is not None:
        if columns.shape != shape[1:]:
            raise UserError(
                f"{layer} has a pre_quant_scale {list(columns.shape)} for {shape[1]} columns; "
                f"fetch the file again"
            )
        packing = Packing(tuple(parts.values()), partial(_with_scaled_columns, unpack, columns))
    num_bytes = shape[0] * shape[1] * torch.float32.itemsize
    return replace(
        parts["weight"], shape=shape, num_bytes=num_bytes, dtype=torch.float32, packing=packing
    )


def _unpacked(packed: _Packed, rows: range) -> Tensor:
    values = torch.empty(len(rows), packed.shape[1])
    quantized_layout(packed.kind).dequantize(packed.codes(rows), values)
    return values


def _int8(about: Mapping[str, Any], parts: Parts) -> _Packed:
    weight, scale = parts["weight"], parts["weight_scale"]
    num_out, num_in = _matrix_of(weight, torch.int8)
    if scale.shape not in ((), (1,), (num_out,), (num_out, 1), (1, 1)):
        raise ValueError(f"scales {list(scale.shape)} for {num_out} rows")
    group = int(about.get("convrot_groupsize", 256)) if about.get("convrot") else 1
    if group != 1 and (group not in ROTATED_INT8 or num_in % group):
        raise ValueError(f"groups of {group} in {num_in} columns")

    def codes(rows: range) -> dict[str, Tensor]:
        scales = (
            _read(scale)
            .float()
            .reshape(-1, 1)
            .expand(num_out, 1)[rows.start : rows.stop]
            .contiguous()
        )
        stored = {"weight": _read(weight, rows), "weight_scale": scales}
        return stored if group == 1 else {**stored, "weight_rotation": rotation_signs(group)}

    return _Packed(ROTATED_INT8.get(group, "int8"), (num_out, num_in), codes)


def _mxfp8(about: Mapping[str, Any], parts: Parts) -> _Packed:
    weight, scale = parts["weight"], parts["weight_scale"]
    num_out, num_in = _matrix_of(weight, torch.float8_e4m3fn)
    blocks = _blocks_of(num_out, num_in, MXFP8_BLOCK, scale)
    return _Packed(
        "mxfp8",
        (num_out, num_in),
        lambda rows: {
            "weight": _read(weight, rows),
            "weight_scale": _block_scales(scale, rows, blocks),
        },
    )


def _nvfp4(about: Mapping[str, Any], parts: Parts) -> _Packed:
    weight, scale, total = parts["weight"], parts["weight_scale"], parts["weight_scale_2"]
    num_out, num_bytes = _matrix_of(weight, torch.uint8)
    blocks = _blocks_of(num_out, 2 * num_bytes, NVFP4_BLOCK, scale)
    if torch.Size(total.shape).numel() != 1:
        raise ValueError(f"weight_scale_2 {list(total.shape)} is not one number")

    def codes(rows: range) -> dict[str, Tensor]:
        return {
            "weight": _read(weight, rows),
            "weight_scale": _block_scales(scale, rows, blocks).view(torch.float8_e4m3fn),
            "weight_scale_2": _read(total).float().reshape(1, 1).repeat(len(rows), 1),
        }

    return _Packed("nvfp4", (num_out, 2 * num_bytes), codes)


_FORMATS: Mapping[str, Callable[[Mapping[str, Any], Parts], _Packed]] = {
    "int8_tensorwise": _int8,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def _block_scales(scale: StoredTensor, rows: range, num_blocks: int) -> Tensor:
    """The bytes of the scales of some rows, [rows, blocks]. Only the tiles that have them are read,
    because a matrix is unpacked in many parts."""
    width = -(-num_blocks // _TILE_COLUMNS) * _TILE_COLUMNS
    stored = replace(scale, shape=(scale.num_bytes // width, width), dtype=torch.uint8)
    first = rows.start // _TILE_ROWS * _TILE_ROWS
    tiles = range(first, -(-rows.stop // _TILE_ROWS) * _TILE_ROWS)
    scales = from_tiles(_read(stored, tiles), len(tiles), num_blocks)
    return scales[rows.start - first : rows.stop - first].contiguous()


def from_tiles(tiles: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Scales [rows, columns] from the tiles in which cuBLAS keeps them, padded to whole tiles: 32 ×
    16 numbers for 128 rows and 4 columns."""
    down, across = -(-num_rows // _TILE_ROWS), -(-num_columns // _TILE_COLUMNS)
    in_rows = (
        tiles.reshape(down, across, 32, 4, 4)
        .transpose(2, 3)
        .reshape(down, across, _TILE_ROWS, _TILE_COLUMNS)
    )
    return in_rows.transpose(1, 2).reshape(down * _TILE_ROWS, across * _TILE_COLUMNS)[
        :num_rows, :num_columns
    ]


def _matrix_of(weight: StoredTensor, dtype: torch.dtype) -> tuple[int, int]:
    if weight.dtype != dtype or len(weight.shape) != 2:
        raise ValueError(
            f"a weight {list(weight.shape)} in {str(weight.dtype).removeprefix('torch.')}"
        )
    return weight.shape[0], weight.shape[1]


def _blocks_of(num_out: int, num_in: int, size: int, scale: StoredTensor) -> int:
    """Number of blocks of a row; ValueError if there are not as many scales."""
    blocks = num_in // size
    tiles = -(-num_out // _TILE_ROWS) * -(-blocks // _TILE_COLUMNS)
    if num_in % size or scale.num_bytes != tiles * _TILE_ROWS * _TILE_COLUMNS:
        raise ValueError(
            f"{scale.num_bytes} bytes of scales for {num_out} rows of {num_in} columns"
        )
    return blocks


def _read(stored: StoredTensor, rows: range | None = None) -> Tensor:
    return SafetensorsSource(stored.file, {"": stored}, {}).read("", rows=rows)


def _with_scaled_columns(
    unpack: Callable[[range], Tensor], columns: StoredTensor, rows: range
) -> Tensor:
    return unpack(rows).mul_(_read(columns).float())
