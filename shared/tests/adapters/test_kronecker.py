"""The Kronecker product nearest to a matrix."""

import pytest
import torch

from ditkit_core.adapters.kronecker import nearest_kronecker


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lost(matrix: torch.Tensor, parts: dict[str, torch.Tensor]) -> float:
    second = parts["lokr_w2"] if "lokr_w2" in parts else parts["lokr_w2_a"] @ parts["lokr_w2_b"]
    difference = matrix.double() - torch.kron(parts["lokr_w1"].double(), second.double())
    return float(difference.square().sum() / matrix.double().square().sum())


def test_whole_factors_are_the_nearest_of_all() -> None:
    """The share that is kept is that of the leading singular value of the blocks as rows, which bounds every Kronecker product."""
    matrix = random(12, 20)
    parts, kept = nearest_kronecker(matrix, {"lokr_w1": (3, 4), "lokr_w2": (4, 5)}, "x")
    blocks = torch.stack([block.flatten() for rows in matrix.split(4) for block in rows.split(5, 1)])
    squares = torch.linalg.svdvals(blocks.double()).square()
    assert kept == pytest.approx(float(squares[0] / squares.sum()), rel=1e-6)
    assert lost(matrix, parts) == pytest.approx(1 - kept, rel=1e-5)
    for seed in range(20):
        other = {part: tensor + 0.05 * random(*tensor.shape, seed=seed) for part, tensor in parts.items()}
        assert lost(matrix, other) > lost(matrix, parts)


@pytest.mark.parametrize("rank", [1, 2, 4, 9])
def test_a_second_factor_of_a_low_rank_is_fitted_with_the_first(rank: int) -> None:
    matrix = random(12, 20)
    shapes = {"lokr_w1": (3, 4), "lokr_w2_a": (4, rank), "lokr_w2_b": (rank, 5)}
    parts, kept = nearest_kronecker(matrix, shapes, "x")
    assert {part: tuple(tensor.shape) for part, tensor in parts.items()} == shapes
    assert lost(matrix, parts) == pytest.approx(1 - kept, rel=1e-4)
    whole, most = nearest_kronecker(matrix, {"lokr_w1": (3, 4), "lokr_w2": (4, 5)}, "x")
    u, s, vh = torch.linalg.svd(whole["lokr_w2"].double(), full_matrices=False)
    cut = {"lokr_w1": whole["lokr_w1"], "lokr_w2": (u[:, :rank] * s[:rank] @ vh[:rank]).float()}
    assert lost(matrix, parts) <= lost(matrix, cut) + 1e-6 and kept <= most + 1e-6
    for seed in range(20 if rank < 4 else 0):
        other = {part: tensor + 0.02 * random(*tensor.shape, seed=seed) for part, tensor in parts.items()}
        assert lost(matrix, other) > lost(matrix, parts)
