"""`base.quantize`: which matrices of the frozen base are stored in 8 or 4 bits, and what that
cannot be combined with.

With `base.compute`, those in 8 bits are also multiplied in 8 bits, forward and for the gradient of
their input.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ditkit_core.errors import UserError, argument
from ditkit_core.io.safetensors import SafetensorsSource, StoredTensor
from ditkit_core.models.protocol import StagedModel
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.nn.attention.support import capability_text
from ditkit_core.nn.quantized_layouts import quantized_layout
from ditkit_core.nn.quantized_linear import QuantizedLinear, final_dtype, quantized_weights


class Converted(NamedTuple):
    """Names of the blocks' Linear layers, after a conversion."""

    quantized: list[str]
    too_odd: list[str]
    """Layers whose size does not fit the layout: they stay as they are."""


def check_quantize(kind: str, method: str) -> None:
    """Refuse an `adapter.method` that cannot train on a base of this `base.quantize`."""
    if kind != "none" and method == "full":
        raise UserError(
            f"{argument('base.quantize')} = {kind} stores the base in a form without gradients, "
            f"and {argument('adapter.method')} = full trains the base; "
            f"set {argument('base.quantize')} = none, or {argument('adapter.method')} = lora, "
            f"which works with int8, fp8 and nf4 (DoRA and dropout included)"
        )


def check_scaled(file: str, method: str) -> None:
    """Refuse to train the weights of a base's file that are 8-bit codes."""
    if method == "full":
        raise UserError(
            f"{file} contains quantized weights, and {argument('adapter.method')} = full trains "
            f"the base; get the bf16 file, or set {argument('adapter.method')} = lora"
        )


def check_compute(compute: str, stored: str, method: str) -> None:
    """Refuse `base.compute` in 8 bits of matrices that are not `stored` so: by `base.quantize`, or
    by the base's file where that is `none`."""
    if compute == "dtype":
        return
    if method == "full":
        raise UserError(
            f"{argument('base.compute')} = {compute} is for products with a frozen base, and "
            f"{argument('adapter.method')} = full trains the base; "
            f"leave {argument('base.compute')} out, or set {argument('adapter.method')} = lora"
        )
    if stored == "none" or quantized_layout(stored).product != compute:
        storage = "in model.dtype" if stored == "none" else f"in {stored}"
        raise UserError(
            f"{argument('base.compute')} = {compute} multiplies the {compute} codes of a quantized "
            f"base, and this base is stored {storage}; "
            f"set {argument('base.quantize')} = {compute}, or leave {argument('base.compute')} out"
        )


_CAPABILITY = {"int8": (7, 5), "fp8": (8, 9)}
"""The least compute capability of GPUs whose tensor cores multiply a format."""
_ARCHITECTURES = {"int8": "Turing", "fp8": "Ada"}


def check_compute_on(compute: str, devices: Collection[torch.device]) -> None:
    """Refuse GPUs, of the blocks' devices, that cannot multiply in the 8 bits of `base.compute`."""
    for device in devices if compute in _CAPABILITY else ():
        if (
            device.type == "cuda"
            and (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY[compute]
        ):
            other = ", or base.quantize and base.compute to int8" if (7, 5) <= capability else ""
            raise UserError(
                f"{argument('base.compute')} = {compute} needs a GPU of the generation "
                f"{_ARCHITECTURES[compute]} or later, compute capability "
                f"{capability_text(_CAPABILITY[compute])}, and {device} has "
                f"{capability_text(capability)}; leave {argument('base.compute')} out{other}"
            )


def compute_in_8_bits(model: StagedModel, kind: str) -> str:
    """Have the blocks' matrices of a format multiplied in it; one line for the log says how many
    are, and which are not."""
    layers = {
        name.removesuffix(".weight"): layer
        for name, layer in quantized_weights(model).items()
        if quantized_layout(layer.kind).product == kind
    }
    for layer in layers.values():
        layer.in_8_bits = layer.computes_in_8_bits
    odd = [name for name, layer in layers.items() if not layer.in_8_bits]
    line = f"base.compute = {kind}: {len(layers) - len(odd)} matrices are multiplied in 8 bits, forward and backward"
    if odd:
        line += f"; {len(odd)} in model.dtype, because their sizes are no multiples of 16, {odd[0]} the first"
    return line


def convert(model: StagedModel, kind: str, keep_fp32: Callable[[str], bool]) -> Converted:
    """Replace the blocks' Linear layers of a model on `meta`, without adapters, by quantized ones
    of a format of `nn/quantized_layouts.py`.

    Embedding and head stay as they are. So does everything that is added later: adapters are never
    quantized.
    """
    layout, converted = quantized_layout(kind), Converted([], [])
    for name in linears_of_blocks(model):
        if keep_fp32(f"{name}.weight"):
            continue
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        # Padding would change the layer's shape in every file and plan, for a few small matrices.
        if not layout.fits(layer.out_features, layer.in_features):
            converted.too_odd.append(name)
            continue
        replace_layer(model, name, kind)
        converted.quantized.append(name)
    return converted


def linears_of_blocks(model: StagedModel) -> list[str]:
    """Names of the plain Linear layers in the blocks, in the model's order."""
    inside = {id(module) for block in model.blocks() for module in block.modules()}
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) in inside
    ]


def hold_as_stored(model: nn.Module | StagedModel, formats: Mapping[str, str]) -> None:
    """Replace Linear layers, on `meta`, by quantized ones (of `stored_formats`), which will take a
    file's codes as they are."""
    for name, kind in formats.items():
        replace_layer(model, name, kind)


def stored_formats(
    model: nn.Module | StagedModel,
    source: SafetensorsSource,
    mapping: Mapping[str, tuple[TensorSlice, ...]],
    *,
    layers: Collection[str] | None = None,
) -> dict[str, str]:
    """Formats in which plain Linear layers can hold their matrices as a file has them, by name; of
    all layers, unless some are named."""
    linears = {
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (layers is None or name in layers)
    }
    kinds = {
        name.removesuffix(".weight"): _kind_of([source.tensors[part.name] for part in parts])
        for name, parts in mapping.items()
        if name.removesuffix(".weight") in linears
    }
    return {name: kind for name, kind in kinds.items() if kind}


def stored_bytes(
    tensors: Mapping[str, Tensor], formats: Mapping[str, str], dtype: torch.dtype
) -> int:
    """Bytes of tensors in a dtype, where matrices of some layers are held as they are stored
    (`stored_formats`)."""
    total = 0
    for name, tensor in tensors.items():
        kind = formats.get(name.removesuffix(".weight"))
        about = (
            {"": (tensor.shape, dtype)}
            if kind is None
            else quantized_layout(kind).about(*tensor.shape)
        )
        total += sum(math.prod(shape) * stored.itemsize for shape, stored in about.values())
    return total


def _kind_of(parts: Sequence[StoredTensor]) -> str:
    """The format that the parts of a matrix share; empty if they have several, or values."""
    # A tensor that is fused from codes and full-precision parts is dequantized instead.
    if any(part.scale for part in parts) and all(
        part.dtype == torch.float8_e4m3fn for part in parts
    ):
        return "fp8"
    kinds = {part.packed_kind for part in parts}
    return kinds.pop() if len(kinds) == 1 else ""


def replace_layer(model: nn.Module | StagedModel, name: str, kind: str) -> None:
    """Replace a Linear layer by a quantized one on `meta`."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    with torch.device("meta"):
        quantized = QuantizedLinear(
            layer.in_features, layer.out_features, kind, bias=layer.bias is not None
        )
    owner, _, leaf = name.rpartition(".")
    # Into the dictionary, so that the layer keeps its position among the module's children.
    model.get_submodule(owner)._modules[leaf] = quantized.train(layer.training)


def num_bytes(model: nn.Module | StagedModel, dtype_of: Callable[[str], torch.dtype]) -> int:
    """Bytes of a model without adapters once it is loaded; `dtype_of` gives the dtype of a
    parameter that is not quantized."""
    total = 0
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                total += (
                    parameter.numel()
                    * final_dtype(module, leaf, dtype_of(f"{prefix}.{leaf}")).itemsize
                )
    return total


def describe_quantized(
    kind: str, converted: Converted, num_blocks: int, before: int, after: int
) -> str:
    """One line for the log: what was quantized, and the bytes of the base before and after."""
    line = (
        f"base.quantize = {kind}: {len(converted.quantized)} matrices of {num_blocks} blocks; "
        f"the base takes {quantized_bytes(after)} instead of {quantized_bytes(before)}"
    )
    if converted.too_odd:
        line += f"; {len(converted.too_odd)} whose size does not fit stay as they are, {converted.too_odd[0]} the first"
    return line


def quantized_bytes(num_bytes: int) -> str:
    """A size in GiB, or in MiB below 1 GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
