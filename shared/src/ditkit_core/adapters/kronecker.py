"""The Kronecker product nearest to a matrix: what a LoKr can represent of a difference.

A matrix of a times c blocks, each [b, d], becomes one with a row for each block. Of that, w1 ⊗ w2 is the product of a column and a row, so
the nearest one has the leading singular vectors. A second factor of a low rank has no such formula: it is fitted in turns with the first.

Source: Van Loan and Pitsianis, "Approximation with Kronecker products", 1993.
"""

from collections.abc import Mapping

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ditkit_core.adapters.svd import low_rank

_ROUNDS = 4
"""In tests on random matrices, later rounds gain less than a thousandth of what is kept."""


def nearest_kronecker(
    matrix: Float[Tensor, "out in"], shapes: Mapping[str, tuple[int, ...]], name: str
) -> tuple[dict[str, Tensor], float]:
    """Find factors of a Kronecker product near to a matrix.

    Args:
        matrix: The matrix; it is not changed.
        shapes: Shapes of the factors: `lokr_w1`, and `lokr_w2`, or `lokr_w2_a` and `lokr_w2_b` for a second factor of a low rank.
        name: Seeds the random numbers: equal names and matrices give equal factors.

    Returns:
        The factors in fp32, and the share of the matrix's energy (sum of squares) that their product keeps, 0 to 1. Of whole factors no
        product keeps more.
    """
    height, width = shapes["lokr_w1"]
    blocks = rearrange(matrix.float(), "(a b) (c d) -> (a c) (b d)", a=height, c=width)
    product = low_rank(blocks, 1, 1.0, name)
    first, second, energy_share = product.up.flatten(), product.down.flatten(), product.energy_share
    parts = {}
    if "lokr_w2" in shapes:
        parts["lokr_w2"] = second.view(shapes["lokr_w2"])
    else:
        for _ in range(_ROUNDS):
            # The nearest second factor for this first one, its nearest matrix of the rank, and the nearest first factor for that.
            second_factor = (first @ blocks / first.square().sum()).view(matrix.shape[0] // height, -1)
            low = low_rank(second_factor, shapes["lokr_w2_a"][1], 1.0, name)
            second = (low.up @ low.down).flatten()
            first = blocks @ second / second.square().sum()
        parts = _padded({"lokr_w2_a": low.up, "lokr_w2_b": low.down}, shapes)
        # By Pythagoras: the first factor is the nearest for the second.
        energy_share = float(
            first.double().square().sum() * second.double().square().sum() / blocks.double().square().sum()
        )
    return {"lokr_w1": first.view(height, width), **parts}, energy_share


def _padded(parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Matrices with columns and rows of zeros up to these shapes: a small layer's factor has less than the asked rank."""
    padded = {part: torch.zeros(shapes[part]) for part in parts}
    for part, tensor in parts.items():
        padded[part][: len(tensor), : tensor.shape[1]] = tensor
    return padded
