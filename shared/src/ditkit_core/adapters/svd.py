"""Low-rank products: their size, their difference, and the nearest product of a lower rank.

A product B·A of rank r is never formed: with B = Qb·Rb and Aᵀ = Qa·Ra it is Qb·(Rb·Raᵀ)·Qaᵀ, and everything that is asked of it stands
in the r by r matrix in the middle. All of it is computed in fp64: factors are small.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.io.rng import generator

_OVERSAMPLING, _POWER_ITERATIONS = 32, 4
_FULL = 1024
"""Matrices whose smaller side is at most this are decomposed whole: seconds."""


@dataclass(frozen=True)
class LowRank:
    """A product of two factors."""

    down: Float[Tensor, "rank in"]
    up: Float[Tensor, "out rank"]
    kept: float
    """Share of the energy (sum of squared singular values) of what it stands for, 0 to 1; 1 where that was zero."""


def product_norm(down: Float[Tensor, "rank in"], up: Float[Tensor, "out rank"]) -> float:
    """The Frobenius norm of B·A."""
    return float(torch.linalg.matrix_norm(_middle(down, up)))


def relative_difference(
    one: tuple[Float[Tensor, "rank in"], Float[Tensor, "out rank"]],
    other: tuple[Float[Tensor, "rank2 in"], Float[Tensor, "out rank2"]],
) -> float:
    """Norm of the difference of two products (each: A, B) in units of the first one's; infinite where only the first is zero."""
    down = torch.cat([one[0].double(), other[0].double()])
    up = torch.cat([one[1].double(), -other[1].double()], 1)
    difference, size = product_norm(down, up), product_norm(*one)
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def _middle(down: Tensor, up: Tensor) -> Tensor:
    """A matrix, at most rank by rank, with the singular values of B·A."""
    right = torch.linalg.qr(down.double().T, mode="r").R
    left = torch.linalg.qr(up.double(), mode="r").R
    return left @ right.T


def reduce_product(
    down: Float[Tensor, "rank in"], up: Float[Tensor, "out rank"], *, rank: int | None = None, energy: float = 1.0
) -> LowRank:
    """The product nearest to B·A of a rank, or of the least rank that keeps a share of its energy.

    Args:
        down: A.
        up: B.
        rank: The rank; None: the least for `energy`.
        energy: Share of the sum of squared singular values, above 0 and at most 1.

    Returns:
        Factors of equal size in fp32; their rank is at least 1, and no more than what B·A has.
    """
    (q_down, r_down), (q_up, r_up) = torch.linalg.qr(down.double().T), torch.linalg.qr(up.double())
    u, s, vh = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
    shares = s.square().cumsum(0) / s.square().sum() if s.any() else torch.ones_like(s)
    wanted = int((shares < energy - 1e-12).sum()) + 1 if rank is None else rank
    wanted = min(wanted, len(s))
    # The square root goes into both factors: of equal size they lose least when they are rounded.
    root = s[:wanted].sqrt()
    return LowRank(
        (root[:, None] * (vh[:wanted] @ q_down.T)).float(),
        (q_up @ u[:, :wanted] * root).float(),
        float(shares[wanted - 1]),
    )


def low_rank(
    matrix: Float[Tensor, "out in"], rank: int | None, energy: float, name: str, *, largest: int = 256
) -> LowRank:
    """A low-rank product near to a matrix.

    Small matrices are decomposed whole. Of others a range finder with power iterations (Halko, Martinsson, Tropp 2011, algorithm 4.4)
    gives the subspace that the nearest product is looked for in; the share that it keeps is measured, not estimated.

    Args:
        matrix: The matrix; it is not changed.
        rank: Of the product; None: the least, up to `largest`, that keeps `energy`.
        energy: Share of the sum of squared singular values.
        name: Seeds what is drawn: equal names and matrices give equal products.
        largest: Most columns that are looked at where no rank is given.

    Returns:
        Factors in fp32, of a rank no larger than the matrix has.
    """
    wide = matrix.float()
    total = float(wide.double().square().sum())  # of the whole matrix: what the range finder misses counts as lost
    if total == 0:
        return LowRank(torch.zeros(1, matrix.shape[1]), torch.zeros(matrix.shape[0], 1), 1.0)
    if min(wide.shape) <= _FULL:
        u, s, vh = torch.linalg.svd(wide.double(), full_matrices=False)
    else:
        basis = _range(wide, min(min(wide.shape), (rank or largest) + _OVERSAMPLING), name)
        u, s, vh = torch.linalg.svd((basis.T @ wide).double(), full_matrices=False)
        u = basis.double() @ u
    shares = s.square().cumsum(0) / total
    wanted = int((shares < energy - 1e-12).sum()) + 1 if rank is None else rank
    wanted = min(wanted, rank or largest, len(s))
    root = s[:wanted].sqrt()
    return LowRank((root[:, None] * vh[:wanted]).float(), (u[:, :wanted] * root).float(), float(shares[wanted - 1]))


def _range(matrix: Tensor, width: int, name: str) -> Tensor:
    """An orthonormal basis [out, width] of nearly the span of the leading left singular vectors."""
    drawn = torch.randn(matrix.shape[1], width, generator=generator("low rank", name))
    basis = torch.linalg.qr(matrix @ drawn).Q
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    return basis
