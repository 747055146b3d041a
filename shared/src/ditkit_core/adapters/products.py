"""Low-rank products: their norm, their difference, and the ones nearest to a matrix or to another
product.

A product B·A of rank r is never formed. With B = Qb·Rb and Aᵀ = Qa·Ra it is Qb·(Rb·Raᵀ)·Qaᵀ, and
the r by r matrix in the middle has its norm and its singular values. All of this is computed in
fp64, because the factors are small.

Source: Halko, Martinsson, Tropp, "Finding structure with randomness", 2011.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.io.rng import generator

# More than the 5 to 10 and 1 to 2 of the literature, for matrices whose singular values fall
# slowly.
_OVERSAMPLING, _POWER_ITERATIONS = 32, 4
_LARGEST = 256
"""Maximum rank where only the energy to keep is given."""
_FULL = 1024
"""Matrices whose smaller side is at most this get a full decomposition, which takes seconds."""


@dataclass(frozen=True)
class LowRank:
    """A product of two factors."""

    down: Float[Tensor, "rank in"]
    up: Float[Tensor, "out rank"]
    energy_share: float
    """Share of the original's energy (sum of squared singular values), 0 to 1; 1 if that was
    zero."""


def product_norm(down: Float[Tensor, "rank in"], up: Float[Tensor, "out rank"]) -> float:
    """The Frobenius norm of B·A."""
    return float(torch.linalg.matrix_norm(_middle(down, up)))


def relative_difference(
    one: tuple[Float[Tensor, "rank in"], Float[Tensor, "out rank"]],
    other: tuple[Float[Tensor, "rank2 in"], Float[Tensor, "out rank2"]],
) -> float:
    """Norm of the difference of two products, each of A and B, relative to the norm of the first;
    infinite if only the first is zero."""
    # B1·A1 - B2·A2 is itself a product: [B1, -B2] times A1 above A2.
    down = torch.cat([one[0].double(), other[0].double()])
    up = torch.cat([one[1].double(), -other[1].double()], 1)
    difference, size = product_norm(down, up), product_norm(*one)
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size


def _middle(down: Tensor, up: Tensor) -> Tensor:
    """A matrix with the singular values of B·A, of at most rank by rank."""
    right = torch.linalg.qr(down.double().T, mode="r").R
    left = torch.linalg.qr(up.double(), mode="r").R
    return left @ right.T


def reduce_product(
    down: Float[Tensor, "rank in"],
    up: Float[Tensor, "out rank"],
    *,
    rank: int | None = None,
    energy: float = 1.0,
) -> LowRank:
    """The product nearest to B·A of a rank, or of the lowest rank that keeps the share `energy` of
    its squared singular values.

    Its factors have equal norms and are fp32; their rank is at least 1 and at most the rank of B·A.
    """
    (q_down, r_down), (q_up, r_up) = torch.linalg.qr(down.double().T), torch.linalg.qr(up.double())
    u, s, vh = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
    # Share of the energy that the first singular values keep, for every rank at once.
    shares = s.square().cumsum(0) / s.square().sum() if s.any() else torch.ones_like(s)
    wanted = int((shares < energy - 1e-12).sum()) + 1 if rank is None else rank
    # The tolerance above absorbs rounding in the sum: energy = 1 must not ask for one value more
    # than there are.
    wanted = min(wanted, len(s))
    # Each factor gets the square root of the singular values: factors of equal norm lose least when
    # they are rounded.
    root = s[:wanted].sqrt()
    return LowRank(
        (root[:, None] * (vh[:wanted] @ q_down.T)).float(),
        (q_up @ u[:, :wanted] * root).float(),
        float(shares[wanted - 1]),
    )


def low_rank(
    matrix: Float[Tensor, "out in"], rank: int | None, energy: float, name: str
) -> LowRank:
    """Find a low-rank product near to a matrix; the matrix is not changed.

    Small matrices get a full decomposition. For others, a range finder with power iterations gives
    the subspace in which the nearest product is searched. The share that it keeps is measured, not
    estimated.

    Args:
        rank: Rank of the product; None: the lowest, up to `_LARGEST`, that keeps `energy`.
        energy: Share of the sum of squared singular values, above 0 and at most 1.
        name: Seeds the random numbers: equal names and matrices give equal products.

    Source: Halko, Martinsson, Tropp, "Finding structure with randomness", 2011, algorithm 4.4.
    """
    wide = matrix.float()
    # of the complete matrix: energy that the range finder misses counts as lost
    total = float(wide.double().square().sum())
    if total == 0:
        return LowRank(torch.zeros(1, matrix.shape[1]), torch.zeros(matrix.shape[0], 1), 1.0)
    if min(wide.shape) <= _FULL:
        u, s, vh = torch.linalg.svd(wide.double(), full_matrices=False)
    else:
        basis = _range(wide, min(min(wide.shape), (rank or _LARGEST) + _OVERSAMPLING), name)
        u, s, vh = torch.linalg.svd((basis.T @ wide).double(), full_matrices=False)
        u = basis.double() @ u
    shares = s.square().cumsum(0) / total
    wanted = int((shares < energy - 1e-12).sum()) + 1 if rank is None else rank
    wanted = min(wanted, rank or _LARGEST, len(s))
    root = s[:wanted].sqrt()
    return LowRank(
        (root[:, None] * vh[:wanted]).float(),
        (u[:, :wanted] * root).float(),
        float(shares[wanted - 1]),
    )


def _range(matrix: Tensor, width: int, name: str) -> Tensor:
    """An orthonormal basis [out, width] that nearly spans the leading left singular vectors."""
    samples = torch.randn(matrix.shape[1], width, generator=generator("low rank", name))
    basis = torch.linalg.qr(matrix @ samples).Q
    # Orthonormal again after each product: in fp32 the columns would otherwise become parallel to
    # the first singular vector.
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    return basis
