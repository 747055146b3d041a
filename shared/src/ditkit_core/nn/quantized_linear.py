"""Frozen matrices in 8 or 4 bits, converted to the input's dtype for each product, or multiplied as they are stored (`base.compute`).

The values are bitwise identical to torchao's weight-only quantization (`Int8WeightOnlyConfig`, `Float8WeightOnlyConfig`, NF4 with doubly
quantized scales), but its tensor subclasses are not used. They can neither be sharded (`aten.split` and `new_zeros` are missing) nor be
views into one buffer, which block swap needs. Their own forward also has autograd keep each dequantized weight: 1.5 times the dense
model. Here weight and scales are plain parameters, and nothing is kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.context import device_kind
from ditkit_core.nn.eight_bit_products import LARGEST_CODE, compiled_product, divided, product, transposed_product
from ditkit_core.nn.kernels import ops as kernels
from ditkit_core.nn.kernels.launch import kernels_in_force
from ditkit_core.nn.lora import AT_ONCE, KeepsOnlyItsInput
from ditkit_core.nn.parameters import by_weight, switched

_FP8 = torch.float8_e4m3fn
BLOCK, _GROUP = 64, 256
"""NF4: the number of weights that share a scale, and of scales that share a scale of their own. torchao's defaults."""
# Quantiles of a normal distribution, chosen by QLoRA's authors, as torchao rounds them. Seven below zero and eight above, so that zero
# itself is a level.
_NEGATIVE_LEVELS = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911)
_LEVELS = (*_NEGATIVE_LEVELS, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)

About = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of parameters, by name."""

Gather = Callable[[Tensor], Tensor]
"""From the magnitudes of blocks of some rows to the magnitudes of all blocks of the matrix."""


def of_all_rows(magnitudes: Tensor) -> Tensor:
    """The `Gather` of a matrix that is quantized whole."""
    return magnitudes


@dataclass(frozen=True)
class Layout:
    """How a quantized matrix [out, in] is stored."""

    about: Callable[[int, int], About]
    """(out, in) to shapes and dtypes of its parameters."""
    quantize: Callable[[Tensor, Gather], dict[str, Tensor]]
    """An fp32 matrix, which is overwritten, or some of its rows, to the parameters' values: codes and scales of these rows, and whole what
    belongs to no row."""
    dequantize: Callable[[Mapping[str, Tensor], Tensor], None]
    """Writes the matrix of the parameters' values into one of any floating dtype. The arithmetic is in fp32, or in that dtype if it is wider."""
    fits: Callable[[int, int], bool] = lambda num_out, num_in: True
    """(out, in) to whether such a matrix can be stored so."""


class QuantizedLinear(KeepsOnlyItsInput, nn.Linear):
    """A frozen Linear layer with a quantized weight: `weight` contains the codes, other parameters their scales.

    Built under `torch.device("meta")`, its parameters have their final dtypes and no memory.

    Attributes:
        in_8_bits: Whether products with it and with its transpose are of 8-bit codes; only where `computes_in_8_bits`.
    """

    def __init__(self, num_in: int, num_out: int, kind: str, *, bias: bool):
        """Build a layer without values; `kind` is one of `LAYOUTS`. A bias is not quantized."""
        # Not nn.Linear's: it would allocate and initialise a dense weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = num_in, num_out, kind
        self.in_8_bits = False
        for name, (shape, dtype) in LAYOUTS[kind].about(num_out, num_in).items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None)

    def set_weight(self, weight: Tensor) -> None:
        """Quantize a weight [out, in] in fp32, which is overwritten, on its own device."""
        self.set_values(LAYOUTS[self.kind].quantize(weight, of_all_rows))

    def set_values(self, values: Mapping[str, Tensor]) -> None:
        """Set the parameters' values, without a copy."""
        for name, (shape, dtype) in LAYOUTS[self.kind].about(self.out_features, self.in_features).items():
            assert values[name].shape == shape and values[name].dtype == dtype, name
            self._parameters[name] = nn.Parameter(values[name], requires_grad=False)

    def values(self) -> dict[str, Tensor]:
        """Codes and scales by name."""
        return {
            name: parameter for name, parameter in self._parameters.items() if parameter is not None and name != "bias"
        }

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] of the layer's product."""
        return _dequantized(self.kind, self.values(), (self.out_features, self.in_features), dtype)

    @property
    def W_q(self) -> Tensor:
        """The codes. peft's DoRA calls `dequantize` for the weight of a layer that has an attribute of this name."""
        return self.weight

    @property
    def computes_in_8_bits(self) -> bool:
        """Whether its format and its size allow products of 8-bit codes."""
        sizes = self.in_features, self.out_features
        # Tensor cores take multiples of 16, and a sum of 2**17 products of int8 codes fits int32.
        return self.kind in LARGEST_CODE and all(size % 16 == 0 and size <= 2**17 for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """The product in the input's dtype."""
        # The compiler decides by itself what it keeps for the backward, so compiled code gets operations with plain inputs.
        if torch.compiler.is_compiling():
            if self.in_8_bits:
                of_codes: Tensor = compiled_product(x, self.bias, self.weight, self.weight_scale)
                return of_codes
            return F.linear(x, self.dequantize(x.dtype), self.bias)
        values = self.values()
        stored = _Stored(
            self.kind, (self.out_features, self.in_features), tuple(values), kernels_in_force(x), self.in_8_bits
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
            return product(x, bias, *self._codes(tensors), fused=self.fused)
        return F.linear(x, self._matrix(tensors, x.dtype), bias)

    def transposed(self, gradient: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """gradient · W."""
        if self.in_8_bits:
            return transposed_product(gradient, *self._codes(tensors), fused=self.fused)
        return gradient @ self._matrix(tensors, gradient.dtype)

    def _codes(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        values = dict(zip(self.names, tensors, strict=True))
        return values["weight"], values["weight_scale"]

    def _matrix(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return _dequantized(self.kind, dict(zip(self.names, tensors, strict=True)), self.shape, dtype, self.fused)


class _Product(torch.autograd.Function):
    """x Wᵀ + b with a W that is read here, and again in the backward.

    The node refers to the parameters itself; they are not saved tensors. They are frozen, so no version has to be checked. Block swap
    empties and fills their storage between the two passes, and the backward reads what is there then. And a checkpoint that recomputes up
    to the last saved tensor stops before this product if nothing is saved after it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, stored: _Stored, *tensors: Tensor) -> Tensor:
        ctx.stored, ctx.tensors = stored, tensors
        return stored.product(x, bias, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.stored.transposed(gradient, ctx.tensors), None, None, *[None] * len(ctx.tensors)


_KERNELS = {"int8": kernels.dequantize_rows, "nf4": kernels.dequantize_nf4}
"""Not fp8: Triton converts it from Ada on only."""


def _dequantized(
    kind: str, values: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, fused: bool = False
) -> Tensor:
    if fused and kind in _KERNELS and dtype.itemsize <= 4:
        matrix: Tensor = _KERNELS[kind](*values.values(), dtype)
        return matrix
    out = torch.empty(shape, dtype=dtype, device=values["weight"].device)
    with torch.no_grad():
        LAYOUTS[kind].dequantize(values, out)
    return out


def dense_weight(layer: nn.Linear, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [out, in] of a frozen layer's product, quantized or not."""
    return layer.dequantize(dtype) if isinstance(layer, QuantizedLinear) else layer.weight.detach().to(dtype)


def quantized_weights(model: nn.Module | StagedModel) -> dict[str, QuantizedLinear]:
    """The quantized layers, by their weight's name in files."""
    return by_weight(model, QuantizedLinear)


def products_in_dtype(model: nn.Module | StagedModel) -> AbstractContextManager[None]:
    """Inside the block, quantized weights are dequantized for their products, whatever `base.compute` says."""
    layers = (layer for layer in quantized_weights(model).values() if layer.in_8_bits)
    return switched(layers, "in_8_bits", False)


def without_scales(state: Mapping[str, Tensor], model: nn.Module | StagedModel) -> dict[str, Tensor]:
    """A model's parameters as in files: a quantized weight is a tensor on `meta` with the dense shape, and has no scales.

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
        name: torch.empty(layer.out_features, layer.in_features, device="meta") for name, layer in quantized.items()
    }
    return {name: shapes.get(name, tensor) for name, tensor in state.items() if name not in scales}


# Needed before a layer is loaded: parameters are allocated once, in the dtype that they keep.
def final_dtype(module: nn.Module, leaf: str, default: torch.dtype) -> torch.dtype:
    """The dtype of a module's parameter once it is loaded: codes and scales have their own, all others the default."""
    parameter = module.values().get(leaf) if isinstance(module, QuantizedLinear) else None
    return default if parameter is None else parameter.dtype


# int8 and fp8: one scale per row


def _about_rows(dtype: torch.dtype) -> Callable[[int, int], About]:
    return lambda num_out, num_in: {"weight": ((num_out, num_in), dtype), "weight_scale": ((num_out, 1), torch.float32)}


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude of each row, [rows, 1], without a copy of the rows."""
    return torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))


def _quantize_int8(weight: Tensor, gather: Gather) -> dict[str, Tensor]:
    # 127.5 and the product with the reciprocal are torchao's: a division would round some codes the other way.
    scale = divided(_largest(weight), 127.5).clamp_(min=torch.finfo(torch.float32).eps)
    codes = weight.mul_(1.0 / scale).round_().clamp_(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def _quantize_fp8(weight: Tensor, gather: Gather) -> dict[str, Tensor]:
    limit = torch.finfo(_FP8).max
    scale = _nonzero(divided(_largest(weight), limit))
    return {"weight": weight.div_(scale).clamp_(-limit, limit).to(_FP8), "weight_scale": scale}


def _nonzero(scale: Tensor) -> Tensor:
    """The scales, with ones for zeros: a row or block of zeros divided by zero is NaN, as in torchao."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _dequantize_rows(values: Mapping[str, Tensor], out: Tensor) -> None:
    codes, scale = values["weight"], values["weight_scale"]
    # Every code is exact in 16 bits. A GPU multiplies in fp32 without a copy; the CPU makes an fp32 copy, so it gets a part at a time.
    at_once = max(1, AT_ONCE["cpu"] // out.shape[1]) if device_kind(out) == "cpu" else len(out)
    for start in range(0, len(out), at_once):
        rows = slice(start, start + at_once)
        out[rows].copy_(codes[rows]).mul_(scale[rows])


# NF4: two codes per byte; 64 weights share a scale, which is itself quantized


def _about_nf4(num_out: int, num_in: int) -> About:
    num_blocks = num_out * num_in // BLOCK
    return {
        "weight": ((num_out, num_in // 2), torch.uint8),
        "weight_scale": ((num_blocks,), torch.int8),
        "weight_scale_factor": ((math.ceil(num_blocks / _GROUP),), torch.float32),
        "weight_scale_mean": ((1,), torch.float32),
        # The two levels of each byte. A parameter, because a constant would be copied to the device for every product.
        "weight_levels": ((256, 2), torch.float32),
    }


def _quantize_nf4(weight: Tensor, gather: Gather) -> dict[str, Tensor]:
    shape, blocks = weight.shape, weight.view(-1, BLOCK)
    largest = _largest(blocks)
    of_all = gather(largest)
    mean = of_all.cpu().mean().to(of_all.device)  # a GPU sums in another order
    num_blocks = len(of_all)
    groups = F.pad(of_all.flatten() - mean, (0, -num_blocks % _GROUP)).view(-1, _GROUP)
    # Scales are stored as int8 differences from their mean, with one factor per group of 256.
    factor = 256 / (2 * _nonzero(groups.abs().amax(1)))
    scale = (groups * factor[:, None]).round_().clamp_(-128, 127).to(torch.int8).flatten()[:num_blocks].clone()
    blocks.div_(_nonzero(largest))
    levels = torch.tensor(_LEVELS, device="cpu").to(weight.device)
    codes = torch.empty(len(blocks), BLOCK // 2, dtype=torch.uint8, device=weight.device)
    at_once = AT_ONCE[device_kind(weight)] // BLOCK
    for start in range(0, len(blocks), at_once):
        part = slice(start, start + at_once)
        nearest = _nearest(blocks[part], levels)
        # torchao's order: the first weight of a pair is in the upper half of the byte.
        codes[part] = nearest[:, ::2] << 4 | nearest[:, 1::2]
    pairs = torch.cartesian_prod(levels, levels)
    return {
        "weight": codes.view(shape[0], shape[1] // 2),
        "weight_scale": scale,
        "weight_scale_factor": factor,
        "weight_scale_mean": mean[None],
        "weight_levels": pairs,
    }


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """The index of the nearest level, uint8; of two that are equally near, the lower.

    Only the two levels around a value are compared with it. torchao compares all sixteen, with the same result.
    """
    low = torch.bucketize(values, levels[1:-1], out_int32=True)
    nearer_high = levels[low + 1].sub_(values).abs_() < levels[low].sub_(values).abs_()
    return low.add_(nearer_high).to(torch.uint8)


def _dequantize_nf4(values: Mapping[str, Tensor], out: Tensor) -> None:
    codes, blocks = values["weight"].view(-1), out.view(-1, BLOCK)
    factor = values["weight_scale_factor"].repeat_interleave(_GROUP)[: len(blocks)]
    scale = (values["weight_scale"] / factor + values["weight_scale_mean"])[:, None]
    at_once = AT_ONCE[device_kind(out)] // BLOCK
    for start in range(0, len(blocks), at_once):
        part = slice(start, start + at_once)
        # index_select takes int32 at least, and one look-up gives both weights of a byte.
        some = codes[start * BLOCK // 2 : (start + at_once) * BLOCK // 2].int()
        wide = values["weight_levels"].index_select(0, some).view(-1, BLOCK)
        blocks[part].copy_(wide.mul_(scale[part]))


LAYOUTS = {
    "int8": Layout(_about_rows(torch.int8), _quantize_int8, _dequantize_rows),
    "fp8": Layout(_about_rows(_FP8), _quantize_fp8, _dequantize_rows),
    "nf4": Layout(
        _about_nf4,
        _quantize_nf4,
        _dequantize_nf4,
        fits=lambda num_out, num_in: num_in % 2 == 0 and num_out * num_in % BLOCK == 0,
    ),
}
