"""`base.quantize`: which matrices of the frozen base are held in 8 or 4 bits, and what that cannot be combined with.

Only weights are quantized. A scheme that quantizes activations too has no gradient for its input, or drops it without a word
(torchao's int8 dynamic: the output does not require grad), so there is none here.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.nn.quantized_linear import LAYOUTS, QuantizedLinear, final_dtype


class Converted(NamedTuple):
    """Linear layers of the blocks, by name."""

    quantized: list[str]
    too_odd: list[str]
    """Whose size the layout cannot hold: they stay as they are."""


def check_quantize(kind: str, method: str) -> None:
    """Refuse what cannot be trained on a quantized base.

    Args:
        kind: `base.quantize`.
        method: `adapter.method`.

    Raises:
        UserError: If the base's own weights are to be trained.
    """
    if kind != "none" and method == "full":
        raise UserError(
            f"base.quantize = {kind} holds the base in a form that has no gradient, and adapter.method = full trains it; "
            "set base.quantize = none, or adapter.method = lora, which works with int8, fp8 and nf4 (DoRA and dropout included)"
        )


def check_scaled(file: str, method: str) -> None:
    """Refuse to train weights that are 8-bit codes.

    Args:
        file: The base's.
        method: `adapter.method`.

    Raises:
        UserError: If the base's own weights are to be trained.
    """
    if method == "full":
        raise UserError(
            f"{file} holds scaled 8-bit weights, and adapter.method = full trains the base; "
            "get the bf16 file, or set adapter.method = lora"
        )


def convert(model: StagedModel, kind: str, keep_fp32: Callable[[str], bool]) -> Converted:
    """Make the blocks' Linear layers quantized ones.

    Embedding and head stay as they are, and so does whatever is added later: an adapter is never quantized.

    Args:
        model: The staged model, on `meta`, without adapters.
        kind: One of `LAYOUTS`.
        keep_fp32: Names of parameters that stay in fp32.
    """
    layout, converted = LAYOUTS[kind], Converted([], [])
    for name in linears_of_blocks(model):
        if keep_fp32(f"{name}.weight"):
            continue
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if not layout.fits(layer.out_features, layer.in_features):
            converted.too_odd.append(name)
            continue
        replace_layer(model, name, kind)
        converted.quantized.append(name)
    return converted


def linears_of_blocks(model: StagedModel) -> list[str]:
    """Names of the plain Linear layers in the blocks, in the model's order."""
    inside = {id(module) for block in model.blocks() for module in block.modules()}
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and id(module) in inside]


def hold_as_stored(
    model: nn.Module | StagedModel,
    source: SafetensorsSource,
    mapping: Mapping[str, tuple[TensorSlice, ...]],
    *,
    layers: Collection[str] | None = None,
) -> list[str]:
    """Make those Linear layers quantized ones that `scaled_layers` finds: they will take the file's codes as they are.

    Args:
        model: The model, on `meta`.
        source: The file.
        mapping: Parts of the file's tensors by our name, from `match`.
        layers: Names of layers that may be; by default all.

    Returns:
        Their names.
    """
    held = [name for name in scaled_layers(model, source, mapping) if layers is None or name in layers]
    for name in held:
        replace_layer(model, name, "fp8")
    return held


def scaled_layers(
    model: nn.Module | StagedModel, source: SafetensorsSource, mapping: Mapping[str, tuple[TensorSlice, ...]]
) -> list[str]:
    """Names of the plain Linear layers whose weights a file has as 8-bit codes with a scale, one or several."""

    def is_scaled(name: str) -> bool:
        stored = [source.tensors[part.name] for part in mapping.get(f"{name}.weight", ())]
        return any(each.scale for each in stored) and all(each.dtype == torch.float8_e4m3fn for each in stored)

    return [name for name, module in model.named_modules() if type(module) is nn.Linear and is_scaled(name)]


def replace_layer(model: nn.Module | StagedModel, name: str, kind: str) -> None:
    """Put a quantized layer, on `meta`, in the place of a Linear one."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    with torch.device("meta"):
        quantized = QuantizedLinear(layer.in_features, layer.out_features, kind, bias=layer.bias is not None)
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._modules[leaf] = quantized.train(layer.training)


def num_bytes(model: nn.Module | StagedModel, dtype_of: Callable[[str], torch.dtype]) -> int:
    """Bytes that a model without adapters takes once it is loaded.

    Args:
        model: The model; `meta` will do.
        dtype_of: The dtype of a parameter that is not quantized, by its name.
    """
    total = 0
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                total += parameter.numel() * final_dtype(module, leaf, dtype_of(f"{prefix}.{leaf}")).itemsize
    return total


def describe_quantized(kind: str, converted: Converted, num_blocks: int, before: int, after: int) -> str:
    """One line that says what was quantized, and what the base takes now.

    Args:
        kind: `base.quantize`.
        converted: What `convert` did.
        num_blocks: Blocks of the model.
        before: Bytes of the base without quantization.
        after: Bytes now.
    """
    line = (
        f"base.quantize = {kind}: {len(converted.quantized)} matrices of {num_blocks} blocks; "
        f"the base takes {quantized_bytes(after)} instead of {quantized_bytes(before)}"
    )
    if converted.too_odd:
        line += f"; {len(converted.too_odd)} whose size does not fit stay as they are, {converted.too_odd[0]} the first"
    return line


def quantized_bytes(num_bytes: int) -> str:
    """Bytes in a unit that suits them."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
