"""How quantized matrices are stored, and converted back: a format is an entry of `LAYOUTS`, or of
`STORED_LAYOUTS` if only files of others have it.

`base.quantize` makes int8, fp8 and nf4. Their values are bitwise identical to torchao's weight-only
quantization (`Int8WeightOnlyConfig`, `Float8WeightOnlyConfig`, NF4 with doubly quantized scales).
ComfyUI's files also have int8 with a rotation, mxfp8 and nvfp4, whose codes and scales are held as
such a file has them; scales are by row here, not in the tiles of cuBLAS, so that rows can be
divided over ranks.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ditkit_core.nn.context import device_kind
from ditkit_core.nn.eight_bit_products import divided
from ditkit_core.nn.lora import AT_ONCE

_FP8 = torch.float8_e4m3fn
BLOCK, _GROUP = 64, 256
"""NF4: the number of weights that share a scale, and of scales that share a scale of their own.
torchao's defaults."""
# Quantiles of a normal distribution, chosen by QLoRA's authors, as torchao rounds them. Seven below
# zero and eight above, so that zero itself is a level.
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
    """An fp32 matrix, which is overwritten, or some of its rows, to the parameters' values: codes
    and scales of these rows, and whole what belongs to no row."""
    dequantize: Callable[[Mapping[str, Tensor], Tensor], None]
    """Writes the matrix of the parameters' values, or some of its rows, into one of any floating
    dtype. The arithmetic is in fp32, or in that dtype if it is wider."""
    fits: Callable[[int, int], bool] = lambda num_out, num_in: True
    """(out, in) to whether such a matrix can be stored so."""
    shared: tuple[str, ...] = ()
    """For formats of files: names of the parameters that all rows share. Pieces of a matrix are
    joined without them (`ParameterReader.packed`)."""
    product: str = ""
    """Format of its codes in products of 8-bit codes (`base.compute`); empty if they are not
    multiplied."""


# int8 and fp8: one scale per row


def _about_rows(dtype: torch.dtype) -> Callable[[int, int], About]:
    return lambda num_out, num_in: {
        "weight": ((num_out, num_in), dtype),
        "weight_scale": ((num_out, 1), torch.float32),
    }


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude of each row, [rows, 1], without a copy of the rows."""
    return torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))


def _quantize_int8(weight: Tensor, gather: Gather) -> dict[str, Tensor]:
    # 127.5 and the product with the reciprocal are torchao's: a division would round some codes the
    # other way.
    scale = divided(_largest(weight), 127.5).clamp_(min=torch.finfo(torch.float32).eps)
    codes = weight.mul_(1.0 / scale).round_().clamp_(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def _quantize_fp8(weight: Tensor, gather: Gather) -> dict[str, Tensor]:
    limit = torch.finfo(_FP8).max
    scale = _nonzero(divided(_largest(weight), limit))
    return {"weight": weight.div_(scale).clamp_(-limit, limit).to(_FP8), "weight_scale": scale}


def _nonzero(scale: Tensor) -> Tensor:
    """The scales, with ones for zeros: a row or block of zeros divided by zero is NaN, as in
    torchao."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _dequantize_rows(values: Mapping[str, Tensor], out: Tensor) -> None:
    codes, scale = values["weight"], values["weight_scale"]
    # Every code is exact in 16 bits. A GPU multiplies in fp32 without a copy; the CPU makes an fp32
    # copy, so it gets a part at a time.
    for rows in _parts(out) if device_kind(out) == "cpu" else [slice(None)]:
        out[rows].copy_(codes[rows]).mul_(scale[rows])


# NF4: two codes per byte; 64 weights share a scale, which is itself quantized


def _about_nf4(num_out: int, num_in: int) -> About:
    num_blocks = num_out * num_in // BLOCK
    return {
        "weight": ((num_out, num_in // 2), torch.uint8),
        "weight_scale": ((num_blocks,), torch.int8),
        "weight_scale_factor": ((math.ceil(num_blocks / _GROUP),), torch.float32),
        "weight_scale_mean": ((1,), torch.float32),
        # The two levels of each byte. A parameter, because a constant would be copied to the device
        # for every product.
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
    scale = (
        (groups * factor[:, None])
        .round_()
        .clamp_(-128, 127)
        .to(torch.int8)
        .flatten()[:num_blocks]
        .clone()
    )
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

    Only the two levels around a value are compared with it. torchao compares all sixteen, with the
    same result.
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


# Formats of files: int8 of rotated columns, and 8 or 4 bits with a scale for each block of a row


def _parts(out: Tensor) -> Iterator[slice]:
    """Some of a matrix's rows at a time: temporary tensors are as large as these."""
    at_once = max(1, AT_ONCE[device_kind(out)] // out.shape[1])
    return (slice(start, start + at_once) for start in range(0, len(out), at_once))


def rotation_signs(size: int) -> Tensor:
    """ConvRot's regular Hadamard matrix, int8 [size, size] on the CPU; `size` is a power of 4. Over
    its root it is symmetric and orthogonal.

    Source: ConvRot, arXiv:2512.03673.
    """
    quarter = torch.tensor(
        [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.int8, device="cpu"
    )
    signs = quarter
    while len(signs) < size:
        signs = torch.kron(signs, quarter)
    return signs


def rotated(x: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """The columns of x [.., in], turned as the matrix of these values is: a product with its codes
    is then one with the matrix.

    The rotation is its own inverse, so it also turns the gradient of such a product back. Without a
    rotation x is returned as it is.
    """
    if (signs := values.get("weight_rotation")) is None:
        return x
    # Powers of two, which every dtype has exactly.
    rotation = signs.to(x.dtype) * len(signs) ** -0.5
    return (x.unflatten(-1, (-1, len(signs))) @ rotation).flatten(-2)


def _rotated_int8(group: int) -> Layout:
    def about(num_out: int, num_in: int) -> About:
        # A parameter, because a constant would be copied to the device for every product.
        return {
            **_about_rows(torch.int8)(num_out, num_in),
            "weight_rotation": ((group, group), torch.int8),
        }

    def quantize(weight: Tensor, gather: Gather) -> dict[str, Tensor]:
        signs = rotation_signs(group).to(weight.device)
        return {
            **_quantize_int8(rotated(weight, {"weight_rotation": signs}), gather),
            "weight_rotation": signs,
        }

    return Layout(
        about,
        quantize,
        _dequantize_rotated,
        fits=lambda num_out, num_in: num_in % group == 0,
        shared=("weight_rotation",),
        product="int8",
    )


def _dequantize_rotated(values: Mapping[str, Tensor], out: Tensor) -> None:
    signs, wide = values["weight_rotation"].float(), torch.promote_types(out.dtype, torch.float32)
    scale = values["weight_scale"] * len(signs) ** -0.5
    for rows in _parts(out):
        # Sums of codes are integers below 2**24, which fp32 has exactly in any order: each value is
        # rounded once, the same on every device.
        sums = values["weight"][rows].float().view(-1, len(signs)) @ signs
        out[rows].copy_(sums.view(-1, out.shape[1]).to(wide).mul_(scale[rows]))


def _about_blocks(
    size: int, codes: torch.dtype, codes_in_byte: int, **scales: torch.dtype
) -> Callable[[int, int], About]:
    """Codes of a matrix, and for each row a scale for each block of columns, or one
    (`weight_scale_2`)."""
    return lambda num_out, num_in: {
        "weight": ((num_out, num_in // codes_in_byte), codes),
        **{
            name: ((num_out, 1 if name.endswith("_2") else num_in // size), dtype)
            for name, dtype in scales.items()
        },
    }


def _scale_blocks(matrix: Tensor, scale: Tensor) -> None:
    """Multiply blocks of the rows of a matrix in place with their scales [rows, blocks], in fp32 or
    wider."""
    rows, blocks = scale.shape
    matrix.view(rows, blocks, matrix.shape[1] // blocks).mul_(scale[..., None])


MXFP8_BLOCK, NVFP4_BLOCK = 32, 16
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the magnitudes of nvfp4's codes."""
_E2M1_LARGEST = 6.0


def _quantize_mxfp8(weight: Tensor, gather: Gather) -> dict[str, Tensor]:
    blocks = weight.view(len(weight), weight.shape[1] // MXFP8_BLOCK, MXFP8_BLOCK)
    # The smallest powers of two with which no code is beyond the largest.
    exponents = torch.frexp(divided(blocks.abs().amax(2), torch.finfo(_FP8).max))[1].clamp_(
        min=-126
    )
    codes = torch.ldexp(blocks, -exponents[..., None]).view_as(weight).to(_FP8)
    return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}


def _dequantize_mxfp8(values: Mapping[str, Tensor], out: Tensor) -> None:
    for rows in _parts(out):
        out[rows].copy_(values["weight"][rows])
        _scale_blocks(out[rows], values["weight_scale"][rows].view(torch.float8_e8m0fnu).float())


def _quantize_nvfp4(weight: Tensor, gather: Gather) -> dict[str, Tensor]:
    blocks = weight.view(len(weight), weight.shape[1] // NVFP4_BLOCK, NVFP4_BLOCK)
    total = _nonzero(divided(_largest(weight), _E2M1_LARGEST * torch.finfo(_FP8).max))
    scale = (divided(blocks.abs().amax(2), _E2M1_LARGEST) / total).to(_FP8)
    blocks.div_(_nonzero(scale.float() * total)[..., None])
    midpoints = torch.tensor(_E2M1_MIDPOINTS, device="cpu").to(weight.device)
    codes = (
        torch.bucketize(weight.abs(), midpoints).to(torch.uint8) | (weight < 0).to(torch.uint8) << 3
    )
    return {
        "weight": codes[:, ::2] << 4 | codes[:, 1::2],
        "weight_scale": scale,
        "weight_scale_2": total,
    }


def _dequantize_nvfp4(values: Mapping[str, Tensor], out: Tensor) -> None:
    for rows in _parts(out):
        codes = values["weight"][rows]
        for first, code in enumerate((codes >> 4, codes & 15)):
            # Sign, exponent and fraction at their places in e4m3 are the number over 2**6.
            out[rows, first::2].copy_(((code & 8) << 4 | (code & 7) << 2).view(_FP8))
        _scale_blocks(
            out[rows],
            values["weight_scale"][rows].float() * (values["weight_scale_2"][rows] * 2**6),
        )


LAYOUTS = {
    "int8": Layout(_about_rows(torch.int8), _quantize_int8, _dequantize_rows, product="int8"),
    "fp8": Layout(_about_rows(_FP8), _quantize_fp8, _dequantize_rows, product="fp8"),
    "nf4": Layout(
        _about_nf4,
        _quantize_nf4,
        _dequantize_nf4,
        fits=lambda num_out, num_in: num_in % 2 == 0 and num_out * num_in % BLOCK == 0,
    ),
}
"""What `base.quantize` makes."""

ROTATED_INT8 = {4**power: f"int8_rotated_{4**power}" for power in range(1, 7)}
"""Names of the formats of int8 with a rotation, by the number of columns that are turned
together."""

STORED_LAYOUTS = {
    **{name: _rotated_int8(group) for group, name in ROTATED_INT8.items()},
    "mxfp8": Layout(
        _about_blocks(MXFP8_BLOCK, _FP8, 1, weight_scale=torch.uint8),
        _quantize_mxfp8,
        _dequantize_mxfp8,
        fits=lambda num_out, num_in: num_in % MXFP8_BLOCK == 0,
    ),
    "nvfp4": Layout(
        _about_blocks(NVFP4_BLOCK, torch.uint8, 2, weight_scale=_FP8, weight_scale_2=torch.float32),
        _quantize_nvfp4,
        _dequantize_nvfp4,
        fits=lambda num_out, num_in: num_in % NVFP4_BLOCK == 0,
    ),
}
"""Formats that only files have; their matrices stay as they are stored."""


def quantized_layout(kind: str) -> Layout:
    """The layout of a format."""
    return LAYOUTS.get(kind) or STORED_LAYOUTS[kind]
