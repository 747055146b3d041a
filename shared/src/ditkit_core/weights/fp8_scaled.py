"""Files whose matrices are 8-bit codes with a scale, as ComfyUI writes them (`fp8_scaled`): which tensor is what.

A matrix `X.weight` is float8_e4m3fn there, and stands for that times a scale in fp32: one number, or one to each row. The first files
(October 2024 on) name it `X.scale_weight`, have an empty or two-element float8 tensor `scaled_fp8` as their mark, and perhaps
`X.scale_input`; two elements say that products are to be made in the full dtype. Later ones (November 2025 on) name it
`X.weight_scale`, have `X.input_scale`, and say the format of each layer in JSON: in a uint8 tensor `X.comfy_quant`, or for all layers in the
header's `_quantization_metadata`. The scale of the input is for products of 8-bit numbers, which are not made here. A mark without a
scale says that the scale is one.

Source: `convert_old_quants` in comfy/utils.py and QUANTIZATION.md of ComfyUI, read in November 2026.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource

MARK = "scaled_fp8"
SCALE = "scale_weight"
"""What a matrix's scale is called beside its `weight`, in files that every version of ComfyUI reads."""

About = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

_SCALES = (f".{SCALE}", ".weight_scale")
_OF_INPUTS = (".scale_input", ".input_scale")
_FORMAT = ".comfy_quant"
_HEADER = "_quantization_metadata"
_OTHER_FORMS = (".weight_scale_2", ".weight_scale_inv", ".pre_quant_scale")
_READ = "float8_e4m3fn"
_GET = "get the bf16 or the fp8_scaled file"


def open_weights(path: Path) -> SafetensorsSource:
    """A file or folder of weights, as `SafetensorsSource.open`, with the scales of 8-bit matrices put where they belong.

    Raises:
        UserError: Also if the weights are quantized in a form that is not read.
    """
    return understood(SafetensorsSource.open(path))


def understood(source: SafetensorsSource) -> SafetensorsSource:
    """The weights alone, each with its scale if it has one; marks and scales are no tensors of their own any more.

    Raises:
        UserError: If they are quantized in a form that is not read.
    """
    if problem := next(_problems(source), None):
        raise UserError(f"{source.path} holds {problem}, which is not read; {_GET}")
    tensors = dict(source.tensors)
    for key in source.tensors:
        of_input = key.endswith(_OF_INPUTS) and f"{key.rpartition('.')[0]}.weight" in source.tensors
        if of_input or key == MARK or key.endswith((f".{MARK}", _FORMAT)):
            del tensors[key]
        elif (weight := _weight_of(key)) in source.tensors:
            tensors[weight] = replace(source.tensors[weight], scale=tensors.pop(key))
    return replace(source, tensors=tensors)


def num_scaled(source: SafetensorsSource) -> int:
    """How many of the tensors are codes with a scale."""
    return sum(stored.scale is not None for stored in source.tensors.values())


def in_scaled_8_bits(
    shapes: Mapping[str, About], tensor_of: Callable[[str], Tensor], scaled: Collection[str]
) -> tuple[dict[str, About], Callable[[str], Tensor]]:
    """What `write_safetensors` is given, changed so that some matrices are written as codes with a scale to each.

    Args:
        shapes: Shape and dtype by name.
        tensor_of: The tensor of a name, of those matrices in fp32.
        scaled: Names of the matrices, each `X.weight`.

    Returns:
        The same of the file: a scale comes after its matrix, and the mark first.
    """
    scales: dict[str, Tensor] = {}
    # Two elements: products are to be made in the full dtype. With one of 8-bit numbers, inputs would be cut off at 448.
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
        codes, scales[_scale_of(key)] = quantize_whole(tensor_of(key))
        return codes

    return about, written


def quantize_whole(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and the one scale of a matrix in fp32: its largest magnitude becomes the largest code."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = torch.maximum(weight.amax(), -weight.amin()) / limit
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (weight / scale).clamp_(-limit, limit).to(torch.float8_e4m3fn), scale


def _scale_of(key: str) -> str:
    return f"{key.removesuffix('weight')}{SCALE}"


def _weight_of(key: str) -> str:
    """The name of the matrix whose scale this would be; empty if it is no scale's name."""
    return f"{key.rpartition('.')[0]}.weight" if key.endswith(_SCALES) else ""


def _problems(source: SafetensorsSource) -> Iterator[str]:
    """What is quantized in another form, in words."""
    tensors = source.tensors
    for layer, form in _formats(source):
        if form != _READ:
            yield f"{layer} in the format {form}"
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
            yield f"{key} {list(stored.shape)}, a scale to a block of {owner}"
        if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            yield f"{key} in {str(stored.dtype).removeprefix('torch.')}"


def _formats(source: SafetensorsSource) -> Iterator[tuple[str, object]]:
    """The format of each layer that the file names one of."""
    try:
        for layer, about in json.loads(source.metadata.get(_HEADER, "{}")).get("layers", {}).items():
            yield layer, about["format"]
        for key in source.tensors:
            if key.endswith(_FORMAT):
                yield key.removesuffix(_FORMAT), json.loads(bytes(source.read(key).tolist()))["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{source.path}: what it says of its 8-bit layers cannot be read ({error!r}); fetch it again"
        ) from error
