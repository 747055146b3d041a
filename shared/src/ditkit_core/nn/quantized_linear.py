"""Frozen matrices in 8 or 4 bits, converted to the input's dtype for each product, or multiplied as
they are stored (`base.compute`).

torchao's tensor subclasses are not used. They can neither be sharded (`aten.split` and `new_zeros`
are missing) nor be views into one buffer, which block swap needs. Their own forward also has
autograd keep each dequantized weight: 1.5 times the dense model. Here weight and scales are plain
parameters, and nothing is kept.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.eight_bit_products import product, transposed_product
from ditkit_core.nn.kernels import ops as kernels
from ditkit_core.nn.kernels.launch import kernels_in_force
from ditkit_core.nn.lora import KeepsOnlyItsInput
from ditkit_core.nn.parameters import by_weight, switched
from ditkit_core.nn.quantized_layouts import of_all_rows, quantized_layout, rotated


class QuantizedLinear(KeepsOnlyItsInput, nn.Linear):
    """A frozen Linear layer with a quantized weight: `weight` contains the codes, other parameters
    their scales.

    Built under `torch.device("meta")`, its parameters have their final dtypes and no memory.

    Attributes:
        in_8_bits: Whether products with it and with its transpose are of 8-bit codes; only where
            `computes_in_8_bits`.
    """

    def __init__(self, num_in: int, num_out: int, kind: str, *, bias: bool):
        """Build a layer without values; `kind` is a format of `quantized_layouts.py`. A bias is not
        quantized."""
        # Not nn.Linear's: it would allocate and initialise a dense weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = num_in, num_out, kind
        self.in_8_bits = False
        for name, (shape, dtype) in quantized_layout(kind).about(num_out, num_in).items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None
        )

    def set_weight(self, weight: Tensor) -> None:
        """Quantize a weight [out, in] in fp32, which is overwritten, on its own device."""
        self.set_values(quantized_layout(self.kind).quantize(weight, of_all_rows))

    def set_values(self, values: Mapping[str, Tensor]) -> None:
        """Set the parameters' values, without a copy."""
        for name, (shape, dtype) in (
            quantized_layout(self.kind).about(self.out_features, self.in_features).items()
        ):
            assert values[name].shape == shape and values[name].dtype == dtype, name
            self._parameters[name] = nn.Parameter(values[name], requires_grad=False)

    def values(self) -> dict[str, Tensor]:
        """Codes and scales by name."""
        return {
            name: parameter
            for name, parameter in self._parameters.items()
            if parameter is not None and name != "bias"
        }

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] of the layer's product."""
        return _dequantized(self.kind, self.values(), (self.out_features, self.in_features), dtype)

    @property
    def W_q(self) -> Tensor:
        """The codes. peft's DoRA calls `dequantize` for the weight of a layer that has an attribute
        of this name."""
        return self.weight

    @property
    def computes_in_8_bits(self) -> bool:
        """Whether its format and its size allow products of 8-bit codes."""
        sizes = self.in_features, self.out_features
        # Tensor cores take multiples of 16, and a sum of 2**17 products of int8 codes fits int32.
        return bool(quantized_layout(self.kind).product) and all(
            size % 16 == 0 and size <= 2**17 for size in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        """The product in the input's dtype."""
        values = self.values()
        stored = _Stored(
            self.kind,
            (self.out_features, self.in_features),
            tuple(values),
            kernels_in_force(x),
            self.in_8_bits,
        )
        if torch.is_grad_enabled() and x.requires_grad:
            product: Tensor = _Product.apply(x, self.bias, stored, *values.values())
            return product
        return stored.product(x, self.bias, tuple(values.values()))

    def extra_repr(self) -> str:
        """The layer's arguments in its printed form."""
        return f"{super().extra_repr()}, kind={self.kind}"


class _Stored(NamedTuple):
    """How a layer's parameters are multiplied."""

    kind: str
    shape: tuple[int, int]
    names: tuple[str, ...]
    """Of the parameters, in the order in which the functions get them."""
    fused: bool
    in_8_bits: bool

    def product(self, x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
        """x Wᵀ + b."""
        if self.in_8_bits:
            values = self._values(tensors)
            return product(
                rotated(x, values), bias, values["weight"], values["weight_scale"], fused=self.fused
            )
        return F.linear(x, self._matrix(tensors, x.dtype), bias)

    def transposed(self, gradient: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """gradient · W."""
        if self.in_8_bits:
            values = self._values(tensors)
            turned = transposed_product(
                gradient, values["weight"], values["weight_scale"], fused=self.fused
            )
            return rotated(turned, values)
        return gradient @ self._matrix(tensors, gradient.dtype)

    def _values(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.names, tensors, strict=True))

    def _matrix(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return _dequantized(self.kind, self._values(tensors), self.shape, dtype, self.fused)


class _Product(torch.autograd.Function):
    """x Wᵀ + b with a W that is read here, and again in the backward.

    The node refers to the parameters itself; they are not saved tensors. They are frozen, so no
    version has to be checked. Block swap empties and fills their storage between the two passes,
    and the backward reads what is there then. And a checkpoint that recomputes up to the last saved
    tensor stops before this product if nothing is saved after it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, stored: _Stored, *tensors: Tensor
    ) -> Tensor:
        ctx.stored, ctx.tensors = stored, tensors
        return stored.product(x, bias, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.stored.transposed(gradient, ctx.tensors), None, None, *[None] * len(ctx.tensors)


_KERNELS = {"int8": kernels.dequantize_rows, "nf4": kernels.dequantize_nf4}
"""Not fp8: Triton converts it from Ada on only."""


def _dequantized(
    kind: str,
    values: Mapping[str, Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    fused: bool = False,
) -> Tensor:
    if fused and kind in _KERNELS and dtype.itemsize <= 4:
        matrix: Tensor = _KERNELS[kind](*values.values(), dtype)
        return matrix
    out = torch.empty(shape, dtype=dtype, device=values["weight"].device)
    with torch.no_grad():
        quantized_layout(kind).dequantize(values, out)
    return out


def dense_weight(layer: nn.Linear, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [out, in] of a frozen layer's product, quantized or not."""
    return (
        layer.dequantize(dtype)
        if isinstance(layer, QuantizedLinear)
        else layer.weight.detach().to(dtype)
    )


def quantized_weights(model: nn.Module | StagedModel) -> dict[str, QuantizedLinear]:
    """The quantized layers, by their weight's name in files."""
    return by_weight(model, QuantizedLinear)


def products_in_dtype(model: nn.Module | StagedModel) -> AbstractContextManager[None]:
    """Inside the block, quantized weights are dequantized for their products, whatever
    `base.compute` says."""
    layers = (layer for layer in quantized_weights(model).values() if layer.in_8_bits)
    return switched(layers, "in_8_bits", False)


def without_scales(
    state: Mapping[str, Tensor], model: nn.Module | StagedModel
) -> dict[str, Tensor]:
    """A model's parameters as in files: a quantized weight is a tensor on `meta` with the dense
    shape, and has no scales.

    `state` has the parameters and buffers by their names in files.
    """
    quantized = quantized_weights(model)
    scales = {
        f"{name.removesuffix('weight')}{leaf}"
        for name, layer in quantized.items()
        for leaf in layer.values()
        if leaf != "weight"
    }
    shapes = {
        name: torch.empty(layer.out_features, layer.in_features, device="meta")
        for name, layer in quantized.items()
    }
    return {name: shapes.get(name, tensor) for name, tensor in state.items() if name not in scales}


# Needed before a layer is loaded: parameters are allocated once, in the dtype that they keep.
def final_dtype(module: nn.Module, leaf: str, default: torch.dtype) -> torch.dtype:
    """The dtype of a module's parameter once it is loaded: codes and scales have their own, all
    others the default."""
    parameter = module.values().get(leaf) if isinstance(module, QuantizedLinear) else None
    return default if parameter is None else parameter.dtype
