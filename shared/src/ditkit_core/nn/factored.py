"""LoKr and LoHa over a frozen layer: parameters, names and options are peft's; the product is ours.

The change of a LoKr's weight is a Kronecker product, a LoHa's an elementwise product of two
low-rank matrices. In every forward peft makes the whole change in fp32, and autograd keeps it
together with an fp32 copy of the input. Ours saves the input in its own dtype and the factors. A
LoKr's change is never made: x, seen as a matrix, is multiplied with one factor from each side. A
LoHa's has no such form, so it is made once in the forward and once in the backward, and is the more
expensive of the two: an fp32 product of the layer's size.

The arithmetic is peft's: the change in the factors' dtype (fp32), one rounding after the sum with
the frozen layer's result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.nn.context import device_kind
from ditkit_core.nn.lora import AT_ONCE

PARTS = {
    "lokr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
}
"""By method the parts that a layer may have, by peft's names, which files use too."""

Named = Mapping[str, Tensor]


class Factors(NamedTuple):
    """Which parts a layer has, in their order, and the factor of their product."""

    parts: tuple[str, ...]
    scaling: float

    def matrices(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The matrices that an input is multiplied with: of a LoKr w1, then w2 or its two factors;
        of a LoHa the weight's change."""
        named = dict(zip(self.parts, tensors, strict=True))
        if "hada_w1_a" in named:
            first, second = _hadamard(named)
            return (first.mul(second).mul(self.scaling),)
        w1 = named["lokr_w1"] if "lokr_w1" in named else named["lokr_w1_a"] @ named["lokr_w1_b"]
        w2 = (named["lokr_w2"],) if "lokr_w2" in named else (named["lokr_w2_b"], named["lokr_w2_a"])
        return (w1 * self.scaling, *w2)

    def gradients(self, tensors: Sequence[Tensor], of_matrices: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the parts from the gradients of `matrices`."""
        named = dict(zip(self.parts, tensors, strict=True))
        gradients: dict[str, Tensor] = {}
        if "hada_w1_a" in named:
            (change,) = of_matrices
            first, second = _hadamard(named)
            for number, other in ((1, second), (2, first)):
                product_gradient = change.mul(other).mul_(self.scaling)
                gradients[f"hada_w{number}_a"] = product_gradient @ named[f"hada_w{number}_b"].T
                gradients[f"hada_w{number}_b"] = named[f"hada_w{number}_a"].T @ product_gradient
            return [gradients[part] for part in self.parts]
        w1, *w2 = of_matrices
        w1 = w1 * self.scaling
        if "lokr_w1" in named:
            gradients["lokr_w1"] = w1
        else:
            gradients["lokr_w1_a"], gradients["lokr_w1_b"] = (
                w1 @ named["lokr_w1_b"].T,
                named["lokr_w1_a"].T @ w1,
            )
        gradients |= zip(
            ("lokr_w2",) if len(w2) == 1 else ("lokr_w2_b", "lokr_w2_a"), w2, strict=True
        )
        return [gradients[part] for part in self.parts]

    @property
    def is_kronecker(self) -> bool:
        """Whether this is a LoKr."""
        return "hada_w1_a" not in self.parts


@dataclass(frozen=True)
class Piece:
    """A part of equal parts of the rows of a LoKr's or LoHa's change."""

    named: Named
    """Its tensors, by part."""
    scaling: float
    index: int = 0
    of: int = 1


def _hadamard(named: Named) -> tuple[Tensor, Tensor]:
    return named["hada_w1_a"] @ named["hada_w1_b"], named["hada_w2_a"] @ named["hada_w2_b"]


def weight_change(named: Named, scaling: float = 1.0) -> Float[Tensor, "out in"]:
    """The change of the weight that a LoKr or LoHa stands for, from its parts by name."""
    factors = Factors(tuple(named), scaling)
    first, *rest = factors.matrices(list(named.values()))
    if not factors.is_kronecker:
        return first
    return torch.kron(first, rest[0] if len(rest) == 1 else rest[1] @ rest[0])


def add_products(
    out: Float[Tensor, "*batch out"], x: Float[Tensor, "*batch in"], pieces: Sequence[Piece]
) -> None:
    """Add x · changeᵀ to a layer's result in place, without gradients, each row rounded once to its
    dtype.

    Args:
        x: Input of the layer.
        pieces: The change, in pieces of equal numbers of rows.
    """
    factors = [Factors(tuple(piece.named), piece.scaling) for piece in pieces]
    matrices = [
        piece_factors.matrices(list(piece.named.values()))
        for piece_factors, piece in zip(factors, pieces, strict=True)
    ]
    rows, sums = x.flatten(0, -2), out.view(-1, out.shape[-1])
    for span in _spans(rows, sums):
        inputs = rows[span].to(matrices[0][0].dtype)
        products = [
            _product(inputs, piece_matrices, piece_factors.is_kronecker)
            for piece_factors, piece_matrices in zip(factors, matrices, strict=True)
        ]
        parts = [
            product.chunk(piece.of, 1)[piece.index]
            for product, piece in zip(products, pieces, strict=True)
        ]
        sums[span] += parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _product(rows: Tensor, matrices: Sequence[Tensor], is_kronecker: bool) -> Tensor:
    """Rows times the transposed change of the weight."""
    if not is_kronecker:
        return rows @ matrices[0].T
    w1, *chain = matrices
    # A row is a matrix X [c, d], and its product w1 · X · w2ᵀ.
    inner = rows.reshape(-1, chain[0].shape[1])
    for matrix in chain:
        inner = inner @ matrix.T
    turned = _turned(inner, len(rows)) @ w1.T
    # of one row, it is a view that is transposed
    return _turned(turned, len(rows)).reshape(len(rows), -1)


def _turned(matrices: Tensor, count: int) -> Tensor:
    """Each of `count` matrices, stacked by rows, transposed."""
    stacked = matrices.reshape(count, -1, matrices.shape[1])
    return stacked.transpose(1, 2).reshape(-1, stacked.shape[1])


def _product_gradients(
    rows: Tensor, matrices: Sequence[Tensor], gradient: Tensor, is_kronecker: bool
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the rows and of the matrices of `_product`."""
    if not is_kronecker:
        return gradient @ matrices[0], [gradient.T @ rows]
    w1, *chain = matrices
    inner = [rows.reshape(-1, chain[0].shape[1])]
    for matrix in chain:
        inner.append(inner[-1] @ matrix.T)
    # The gradient of a row is a matrix too: w1ᵀ · G · w2.
    outer = _turned(gradient.reshape(-1, matrices[-1].shape[0]), len(rows))
    of_matrices = [outer.T @ _turned(inner[-1], len(rows))]
    d_rows, of_chain = _turned(outer @ w1, len(rows)), []
    for matrix, before in zip(reversed(chain), reversed(inner[:-1]), strict=True):
        of_chain.append(d_rows.T @ before)
        d_rows = d_rows @ matrix
    return d_rows.view(len(rows), -1), [*of_matrices, *reversed(of_chain)]


def changed(
    x: Float[Tensor, "*batch in"],
    tensors: Sequence[Tensor],
    factors: Factors,
    num_out: int,
    base: Callable[[Tensor], Float[Tensor, "*batch out"]],
) -> Float[Tensor, "*batch out"]:
    """base(x) + x · changeᵀ, summed in the wider dtype and rounded once to the dtype of `base(x)`.

    Everything that the backward needs is saved before `base` runs, and nothing after it, as in
    `nn/lora.py: low_rank_sum`.

    Args:
        x: Input of the layer.
        tensors: The parts.
        factors: What they are.
        num_out: Width of the result.
        base: Calls the frozen layer.
    """
    placeholder = _Inputs.apply(x, factors, num_out, *tensors)
    out: Tensor = _Sum.apply(
        base(x), placeholder, x.detach(), factors, *(tensor.detach() for tensor in tensors)
    )
    return out


class _Inputs(torch.autograd.Function):
    """Keeps input and parts for the backward; a placeholder, without memory, receives the gradient
    of the layer's result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Factors, num_out: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(x, *tensors)
        ctx.factors = factors
        return x.new_empty(()).expand(*x.shape[:-1], num_out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        rows, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
        matrices, dtype = ctx.factors.matrices(tensors), tensors[0].dtype
        d_x, sums = torch.empty_like(rows), [torch.zeros_like(matrix) for matrix in matrices]
        for span in _spans(rows, gradient):
            pieces = rows[span].to(dtype), matrices, gradient[span].to(dtype)
            d_rows, d_matrices = _product_gradients(*pieces, ctx.factors.is_kronecker)
            d_x[span] = d_rows
            for total, one in zip(sums, d_matrices, strict=True):
                total += one
        return d_x.view_as(x), None, None, *ctx.factors.gradients(tensors, sums)


class _Sum(torch.autograd.Function):
    """result + x · changeᵀ; keeps nothing for its backward."""

    @staticmethod
    def forward(
        ctx: Any, result: Tensor, placeholder: Tensor, x: Tensor, factors: Factors, *tensors: Tensor
    ) -> Tensor:
        ctx.num_parts = len(tensors)
        base, rows = result.flatten(0, -2), x.flatten(0, -2)
        matrices, dtype = factors.matrices(tensors), tensors[0].dtype
        out = torch.empty_like(base, memory_format=torch.contiguous_format)
        for span in _spans(rows, base):
            out[span] = _product(rows[span].to(dtype), matrices, factors.is_kronecker) + base[span]
        return out.view(result.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, gradient, None, None, *[None] * ctx.num_parts


def _spans(one: Tensor, other: Tensor) -> Iterator[slice]:
    """Spans of rows of two matrices; only one span is in the factors' wider dtype at once."""
    step = max(1, AT_ONCE[device_kind(one)] // max(one.shape[1], other.shape[1]))
    return (slice(start, start + step) for start in range(0, len(one), step))


def parts_of(layer: Any, method: str) -> dict[str, nn.Parameter]:
    """The parameters of a layer's adapter, by part."""
    return {
        part: getattr(layer, part)["default"]
        for part in PARTS[method]
        if "default" in getattr(layer, part)
    }
