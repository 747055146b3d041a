"""Files whose matrices are 8-bit codes with a scale, as ComfyUI writes them (`fp8_scaled`).

A matrix `X.weight` is float8_e4m3fn in such a file. Its values are the codes times an fp32 scale:
one number, or one per row. The first files (from October 2024) name the scale `X.scale_weight`, are
marked by an empty or two-element float8 tensor `scaled_fp8`, and may have `X.scale_input`; two
elements ask for products in the full dtype. Later files (from November 2025) name it
`X.weight_scale`, may have `X.input_scale`, and give the format of each layer in JSON: in a uint8
tensor `X.comfy_quant`, or for all layers in the header's `_quantization_metadata`. The scale of the
input is for products of 8-bit numbers, which ditkit does not make. A mark without a scale means
that the scale is one.

Layers in other formats (int8, mxfp8, nvfp4) are read with their values (`packed_formats.py`).

Source: `convert_old_quants` in comfy/utils.py and QUANTIZATION.md of ComfyUI, read in November
2026.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.files import parse_json_object
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.weights.packed_formats import packed_weight

MARK = "scaled_fp8"
SCALE = "scale_weight"
"""Name of a matrix's scale, next to its `weight`, in files that every version of ComfyUI reads."""

About = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

_SCALES = (f".{SCALE}", ".weight_scale")
_INPUT_SCALES = (".scale_input", ".input_scale")
_FORMAT = ".comfy_quant"
_MAX_FORMAT_BYTES = 2**16
_HEADER = "_quantization_metadata"
# Scales of other formats (NVFP4, scales per block, AWQ), which are recognised only to be refused by
# name.
_OTHER_FORMS = (".weight_scale_2", ".weight_scale_inv", ".pre_quant_scale")
_READ = "float8_e4m3fn"
_OF_A_LAYER = ("weight", "weight_scale", "weight_scale_2", "pre_quant_scale")
_GET = "get the bf16 or the fp8_scaled file"


def open_weights(path: Path) -> SafetensorsSource:
    """Open a file or folder of weights, and attach the scales of 8-bit matrices to their
    weights."""
    return attach_scales(SafetensorsSource.open(path))


def attach_scales(source: SafetensorsSource) -> SafetensorsSource:
    """The weights of a source, each with its scale if it has one, without marks and scales as
    tensors of their own."""
    source = _unpacked(source)
    if problem := next(_problems(source), None):
        raise UserError(f"{source.path} contains {problem}, which is not supported; {_GET}")
    tensors = dict(source.tensors)
    for key in source.tensors:
        # Dropped: scales of inputs are for products in 8 bits. A name like theirs without a weight
        # stays, for `match` to report.
        of_input = (
            key.endswith(_INPUT_SCALES) and f"{key.rpartition('.')[0]}.weight" in source.tensors
        )
        if of_input or key == MARK or key.endswith((f".{MARK}", _FORMAT)):
            del tensors[key]
        elif (weight := _weight_of(key)) in source.tensors:
            # From here on a scale travels with its weight, and readers that ignore scales do not
            # exist.
            tensors[weight] = replace(source.tensors[weight], scale=tensors.pop(key))
    return replace(source, tensors=tensors)


def _unpacked(source: SafetensorsSource) -> SafetensorsSource:
    """The weights of a source, where each layer in a packed format has its values instead of codes
    and scales."""
    tensors = dict(source.tensors)
    for layer, about in _described(source):
        names = {
            suffix: f"{layer}.{suffix}"
            for suffix in _OF_A_LAYER
            if f"{layer}.{suffix}" in source.tensors
        }
        weight = packed_weight(
            layer, about, {suffix: source.tensors[name] for suffix, name in names.items()}
        )
        if weight is not None:
            for name in (*names.values(), f"{layer}{_FORMAT}"):
                tensors.pop(name, None)
            tensors[names["weight"]] = weight
    return replace(source, tensors=tensors)


def num_packed(source: SafetensorsSource) -> int:
    """Number of matrices whose values are computed when they are read."""
    return sum(stored.packing is not None for stored in source.tensors.values())


def num_scaled(source: SafetensorsSource) -> int:
    """Number of tensors that are codes with a scale."""
    return sum(stored.scale is not None for stored in source.tensors.values())


def in_scaled_8_bits(
    shapes: Mapping[str, About], tensor_of: Callable[[str], Tensor], scaled: Collection[str]
) -> tuple[dict[str, About], Callable[[str], Tensor]]:
    """Change the arguments of `write_safetensors` so that some matrices (`scaled`, each `X.weight`)
    are written as codes with one scale each.

    `tensor_of` has these matrices in fp32. The file has the mark first, and each scale after its
    matrix.
    """
    scales: dict[str, Tensor] = {}
    # Two elements ask for products in the full dtype. In products of 8-bit numbers, inputs would be
    # clipped at 448.
    about: dict[str, About] = {MARK: ((2,), torch.float8_e4m3fn)}
    for key, (shape, dtype) in shapes.items():
        about[key] = (shape, torch.float8_e4m3fn if key in scaled else dtype)
        if key in scaled:
            about[_scale_of(key)] = ((), torch.float32)

    def written(key: str) -> Tensor:
        if key == MARK:
            return torch.zeros(2).to(torch.float8_e4m3fn)
        if key in scales:
            return scales.pop(key)
        if key not in scaled:
            return tensor_of(key)
        # The scale is asked for next, because the file's names are written in this order: no matrix
        # is quantized twice.
        codes, scales[_scale_of(key)] = quantize_whole(tensor_of(key))
        return codes

    return about, written


def quantize_whole(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and the single scale of a matrix in fp32: its largest magnitude becomes the largest
    code."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = torch.maximum(weight.amax(), -weight.amin()) / limit
    # A matrix of zeros: divided by a scale of zero it would be NaN.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (weight / scale).clamp_(-limit, limit).to(torch.float8_e4m3fn), scale


def _scale_of(key: str) -> str:
    return f"{key.removesuffix('weight')}{SCALE}"


def _weight_of(key: str) -> str:
    """Name of the matrix that a scale belongs to; empty if this is not a scale's name."""
    return f"{key.rpartition('.')[0]}.weight" if key.endswith(_SCALES) else ""


def _problems(source: SafetensorsSource) -> Iterator[str]:
    """Describe each weight that is quantized in another form."""
    tensors = source.tensors
    for layer, about in _described(source):
        is_unpacked = (
            weight := tensors.get(f"{layer}.weight")
        ) is not None and weight.packing is not None
        if about["format"] != _READ and not is_unpacked:
            yield f"{layer} in the format {about['format']}"
    for key, stored in tensors.items():
        owner = f"{key.rpartition('.')[0]}.weight"
        if key.endswith(_OTHER_FORMS) and owner in tensors:
            yield f"{owner} with {key}"
        if (weight := tensors.get(_weight_of(key))) is None:
            continue
        if weight.dtype != torch.float8_e4m3fn:
            yield f"{owner} in {str(weight.dtype).removeprefix('torch.')} with {key}"
        rows = weight.shape[:1]
        if torch.Size(stored.shape).numel() != 1 and stored.shape not in (rows, (*rows, 1)):
            yield f"{key} {list(stored.shape)}, scales for blocks of {owner}"
        if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            yield f"{key} in {str(stored.dtype).removeprefix('torch.')}"


def _described(source: SafetensorsSource) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each layer whose format the file gives, with what it says of it."""
    where = f"{source.path}: its description of 8-bit layers cannot be read:"
    try:
        described = parse_json_object(source.metadata.get(_HEADER, "{}"), f"{where} {_HEADER}")
        for layer, about in described.get("layers", {}).items():
            yield layer, {**about, "format": about["format"]}
        for key, stored in source.tensors.items():
            if key.endswith(_FORMAT):
                if stored.num_bytes > _MAX_FORMAT_BYTES:
                    raise ValueError(f"{stored.num_bytes} bytes")
                about = parse_json_object(bytes(source.read(key).tolist()), f"{where} {key}")
                yield key.removesuffix(_FORMAT), {**about, "format": about["format"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where} {error!r}; fetch it again") from error
