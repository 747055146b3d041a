"""Matrices in formats with scales by blocks or with a rotation, as ComfyUI's files have them: int8, mxfp8, nvfp4.

A layer `X` of such a file says its format in the JSON of `X.comfy_quant`. Its values are computed when they are read, in fp32:

| `format` | `X.weight` | scales |
|---|---|---|
| `int8_tensorwise` | int8 [out, in] | `X.weight_scale`, one number or one per row. With `convrot`, groups of `convrot_groupsize` columns were rotated before |
| `mxfp8` | float8_e4m3fn [out, in] | `X.weight_scale`: a power of two (e8m0) for each 32 columns of a row, in the tiles of cuBLAS |
| `nvfp4` | two e2m1 codes in a byte, the first in its upper half: uint8 [out, in / 2] | `X.weight_scale`: e4m3 for each 16 columns of a row, in these tiles; times the one number `X.weight_scale_2` |

With `X.pre_quant_scale` [in] (AWQ), the layer's input is multiplied by it, which is the same as multiplying the matrix's columns.

Sources: comfy_kitchen (tensor/ and backends/eager/) at 7d86acf, and its reader in ai-toolkit, both read in November 2026; ConvRot,
arXiv:2512.03673; cuBLAS's documentation, "1D Block Scaling Factors Layout".
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import Packing, SafetensorsSource, StoredTensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TILE_ROWS, _TILE_COLUMNS = 128, 4
"""cuBLAS keeps the scales of 128 rows and 4 blocks of columns together."""
_MXFP8_BLOCK, _NVFP4_BLOCK = 32, 16
_LARGEST_GROUP = 4**6

Parts = Mapping[str, StoredTensor]
"""The tensors of a layer by what follows its name: `weight`, `weight_scale`, …."""


def packed_weight(layer: str, about: Mapping[str, Any], parts: Parts) -> StoredTensor | None:
    """The matrix of a layer as one tensor with its values in fp32; None if its format is not one of these.

    Args:
        layer: Its name, for messages.
        about: What `comfy_quant` says of it.
        parts: Its tensors.

    Raises:
        UserError: If its tensors do not fit the format.
    """
    unpack_of = _FORMATS.get(str(about.get("format")))
    if unpack_of is None:
        return None
    try:
        shape, unpack = unpack_of(about, parts)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{layer} in the format {about['format']} cannot be read ({error}); fetch the file again"
        ) from error
    if (columns := parts.get("pre_quant_scale")) is not None:
        if columns.shape != shape[1:]:
            raise UserError(
                f"{layer} has a pre_quant_scale {list(columns.shape)} for {shape[1]} columns; fetch the file again"
            )
        unpack = partial(_with_scaled_columns, unpack, columns)
    num_bytes = shape[0] * shape[1] * torch.float32.itemsize
    packing = Packing(tuple(parts.values()), unpack)
    return replace(parts["weight"], shape=shape, num_bytes=num_bytes, dtype=torch.float32, packing=packing)


Unpack = Callable[[range], Tensor]
"""From some of a matrix's rows to their values [rows, in], fp32."""


def _int8(about: Mapping[str, Any], parts: Parts) -> tuple[tuple[int, int], Unpack]:
    weight, scale = parts["weight"], parts["weight_scale"]
    num_out, num_in = _matrix_of(weight, torch.int8)
    if scale.shape not in ((), (1,), (num_out,), (num_out, 1), (1, 1)):
        raise ValueError(f"scales {list(scale.shape)} for {num_out} rows")
    group = int(about.get("convrot_groupsize", 256)) if about.get("convrot") else 1
    if group != 1 and (group not in (4**power for power in range(1, 7)) or num_in % group):
        raise ValueError(f"groups of {group} in {num_in} columns")

    def unpack(rows: range) -> Tensor:
        scales = _read(scale).float().reshape(-1, 1)
        values = _read(weight, rows).float().mul_(scales if len(scales) == 1 else scales[rows.start : rows.stop])
        if group == 1:
            return values
        # Symmetric and orthogonal, so the rotation is its own inverse.
        return (values.view(-1, group) @ rotation(group)).view(len(rows), num_in)

    return (num_out, num_in), unpack


@cache
def rotation(size: int) -> Tensor:
    """The regular Hadamard matrix of ConvRot over its root, fp32 [size, size]; `size` is a power of 4. Its entries are exact."""
    quarter = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], device="cpu")
    matrix = quarter
    while len(matrix) < size:
        matrix = torch.kron(matrix, quarter)
    return matrix / size**0.5


def _mxfp8(about: Mapping[str, Any], parts: Parts) -> tuple[tuple[int, int], Unpack]:
    weight, scale = parts["weight"], parts["weight_scale"]
    num_out, num_in = _matrix_of(weight, torch.float8_e4m3fn)
    blocks = _blocks_of(num_out, num_in, _MXFP8_BLOCK, scale)

    def unpack(rows: range) -> Tensor:
        # A biased exponent; ldexp is exact for all that a float32 can hold.
        exponents = _block_scales(scale, rows, blocks).int() - 127
        values = _read(weight, rows).float().view(len(rows), blocks, _MXFP8_BLOCK)
        return torch.ldexp(values, exponents[..., None]).view(len(rows), num_in)

    return (num_out, num_in), unpack


def _nvfp4(about: Mapping[str, Any], parts: Parts) -> tuple[tuple[int, int], Unpack]:
    weight, scale, total = parts["weight"], parts["weight_scale"], parts["weight_scale_2"]
    num_out, num_bytes = _matrix_of(weight, torch.uint8)
    num_in = 2 * num_bytes
    blocks = _blocks_of(num_out, num_in, _NVFP4_BLOCK, scale)
    if torch.Size(total.shape).numel() != 1:
        raise ValueError(f"weight_scale_2 {list(total.shape)} is not one number")

    def unpack(rows: range) -> Tensor:
        codes = _read(weight, rows)
        values = _levels()[torch.stack([codes >> 4, codes & 15], -1).view(len(rows), num_in).int()]
        scales = _block_scales(scale, rows, blocks)
        factors = scales.view(torch.float8_e4m3fn).float() * _read(total).float().reshape(())
        return values.view(len(rows), blocks, _NVFP4_BLOCK).mul_(factors[..., None]).view(len(rows), num_in)

    return (num_out, num_in), unpack


@cache
def _levels() -> Tensor:
    return torch.tensor([*_E2M1, *(-level for level in _E2M1)], device="cpu")


_FORMATS: Mapping[str, Callable[[Mapping[str, Any], Parts], tuple[tuple[int, int], Unpack]]] = {
    "int8_tensorwise": _int8,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def _block_scales(scale: StoredTensor, rows: range, num_blocks: int) -> Tensor:
    """The bytes of the scales of some rows, [rows, blocks]. Only the tiles that have them are read, because a matrix is unpacked in many parts."""
    width = -(-num_blocks // _TILE_COLUMNS) * _TILE_COLUMNS
    stored = replace(scale, shape=(scale.num_bytes // width, width), dtype=torch.uint8)
    first = rows.start // _TILE_ROWS * _TILE_ROWS
    tiles = range(first, -(-rows.stop // _TILE_ROWS) * _TILE_ROWS)
    return from_tiles(_read(stored, tiles), len(tiles), num_blocks)[rows.start - first : rows.stop - first]


def from_tiles(tiles: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Scales [rows, columns] from the tiles in which cuBLAS keeps them, padded to whole tiles: 32 × 16 numbers for 128 rows and 4 columns."""
    down, across = -(-num_rows // _TILE_ROWS), -(-num_columns // _TILE_COLUMNS)
    in_rows = tiles.reshape(down, across, 32, 4, 4).transpose(2, 3).reshape(down, across, _TILE_ROWS, _TILE_COLUMNS)
    return in_rows.transpose(1, 2).reshape(down * _TILE_ROWS, across * _TILE_COLUMNS)[:num_rows, :num_columns]


def _matrix_of(weight: StoredTensor, dtype: torch.dtype) -> tuple[int, int]:
    if weight.dtype != dtype or len(weight.shape) != 2:
        raise ValueError(f"a weight {list(weight.shape)} in {str(weight.dtype).removeprefix('torch.')}")
    return weight.shape[0], weight.shape[1]


def _blocks_of(num_out: int, num_in: int, size: int, scale: StoredTensor) -> int:
    """Number of blocks of a row; ValueError if there are not as many scales."""
    blocks = num_in // size
    tiles = -(-num_out // _TILE_ROWS) * -(-blocks // _TILE_COLUMNS)
    if num_in % size or scale.num_bytes != tiles * _TILE_ROWS * _TILE_COLUMNS:
        raise ValueError(f"{scale.num_bytes} bytes of scales for {num_out} rows of {num_in} columns")
    return blocks


def _read(stored: StoredTensor, rows: range | None = None) -> Tensor:
    return SafetensorsSource(stored.file, {"": stored}, {}).read("", rows=rows)


def _with_scaled_columns(unpack: Unpack, columns: StoredTensor, rows: range) -> Tensor:
    return unpack(rows).mul_(_read(columns).float())
