"""Low-rank products, measured and reduced without being formed."""

import math

import pytest
import torch

from ditkit_core.adapters import products
from ditkit_core.adapters.products import (
    low_rank,
    product_norm,
    reduce_product,
    relative_difference,
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("out", "rank", "width"), [(20, 4, 30), (3, 8, 30), (20, 8, 3), (1, 1, 1)])
def test_norms_and_differences_are_those_of_the_products(out: int, rank: int, width: int) -> None:
    down, up, other = drawn(rank, width), drawn(out, rank, seed=1), drawn(out, rank, seed=2)
    assert product_norm(down, up) == pytest.approx(float((up.double() @ down.double()).norm()))
    expected = float(
        ((up - other).double() @ down.double()).norm() / (up.double() @ down.double()).norm()
    )
    assert relative_difference((down, up), (down, other)) == pytest.approx(expected)


def test_a_difference_far_below_fp32_is_seen_and_equal_products_in_other_factors_have_none() -> (
    None
):
    down, up = drawn(4, 30), drawn(20, 4, seed=1)
    assert relative_difference((down, up), (down * 2, up / 2)) < 1e-15
    nudged = up.double() * (1 + 1e-11)
    assert relative_difference((down, up), (down, nudged)) == pytest.approx(1e-11, rel=1e-3)
    zero = torch.zeros_like(up)
    assert relative_difference((down, zero), (down, zero)) == 0
    assert math.isinf(relative_difference((down, zero), (down, up)))


@pytest.mark.parametrize("rank", [1, 3, 8, 20])
def test_a_shrunk_product_is_the_nearest(rank: int) -> None:
    down, up = drawn(8, 30), drawn(20, 8, seed=1)
    found = reduce_product(down, up, rank=rank)
    u, s, vh = torch.linalg.svd(up.double() @ down.double(), full_matrices=False)
    kept = min(rank, 8)
    torch.testing.assert_close(
        found.up.double() @ found.down.double(),
        u[:, :kept] * s[:kept] @ vh[:kept],
        rtol=1e-5,
        atol=1e-5,
    )
    assert found.down.shape == (kept, 30) and found.up.shape == (20, kept)
    assert found.energy_share == pytest.approx(float(s[:kept].square().sum() / s.square().sum()))
    torch.testing.assert_close(
        found.down.norm(dim=1), found.up.norm(dim=0), msg="factors are of equal size"
    )


def test_the_least_rank_keeps_the_share_and_one_less_does_not() -> None:
    down, up = drawn(8, 30), drawn(20, 8, seed=1)
    for energy in (0.1, 0.5, 0.9, 0.999, 1.0):
        found = reduce_product(down, up, energy=energy)
        assert found.energy_share >= energy - 1e-9
        if len(found.down) > 1:
            assert reduce_product(down, up, rank=len(found.down) - 1).energy_share < energy
    assert reduce_product(down, torch.zeros(20, 8), energy=0.9).energy_share == 1.0
    assert len(reduce_product(drawn(1, 30).expand(8, 30), up, energy=1.0).down) == 1, (
        "what has rank 1 is written at rank 1"
    )


def decaying(out: int, width: int) -> torch.Tensor:
    """A matrix whose singular values fall like those of a fine-tune: fast, then with a long
    tail."""
    u, v = torch.linalg.qr(drawn(out, out)).Q, torch.linalg.qr(drawn(width, width, seed=1)).Q
    s = torch.arange(1, min(out, width) + 1) ** -1.0
    return u[:, : len(s)] * s @ v[:, : len(s)].T


@pytest.mark.parametrize("shape", [(200, 120), (120, 200)])
def test_the_range_finder_keeps_what_a_whole_decomposition_keeps(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    matrix = decaying(*shape)
    whole = low_rank(matrix, 16, 1.0, "x")
    monkeypatch.setattr(products, "_FULL", 8)
    found, again = low_rank(matrix, 16, 1.0, "x"), low_rank(matrix, 16, 1.0, "x")
    assert torch.equal(found.down, again.down) and torch.equal(found.up, again.up)
    measured = 1 - float((matrix - found.up @ found.down).square().sum() / matrix.square().sum())
    assert found.energy_share == pytest.approx(measured, abs=1e-5), (
        "what it says it keeps is what it keeps"
    )
    assert whole.energy_share - found.energy_share < 1e-6 * whole.energy_share + 1e-6
    auto = low_rank(matrix, None, 0.9, "x")
    assert len(auto.down) == len(
        reduce_product(whole.down, whole.up, energy=0.9 / whole.energy_share).down
    )


def test_a_matrix_of_nothing_and_one_that_is_low_already() -> None:
    assert low_rank(torch.zeros(5, 7), 3, 1.0, "x").energy_share == 1.0
    matrix = drawn(50, 2) @ drawn(2, 40)
    found = low_rank(matrix, 2, 1.0, "x")
    assert found.energy_share == pytest.approx(1.0, abs=1e-9)
    torch.testing.assert_close(found.up @ found.down, matrix, rtol=1e-4, atol=1e-5)
    assert len(low_rank(matrix, None, 0.999999, "x").down) == 2
