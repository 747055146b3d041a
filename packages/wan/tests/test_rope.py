"""Rotary tables: geometry by formula, for every head size that models or tests use."""

import math

import pytest
import torch

from ditkit_wan.rope import axis_pairs, rotary_angles, rotate


@pytest.mark.parametrize(
    ("head_dim", "pairs"), [(12, (2, 2, 2)), (16, (4, 2, 2)), (24, (4, 4, 4)), (128, (22, 21, 21))]
)
def test_axes_share_the_pairs_of_a_head(head_dim, pairs):
    assert axis_pairs(head_dim) == pairs and 2 * sum(pairs) == head_dim


@pytest.mark.parametrize("head_dim", [12, 16, 24, 128])
def test_an_angle_is_position_times_frequency_of_its_axis(head_dim):
    grid = (3, 4, 5)
    angles = rotary_angles(grid, head_dim, torch.device("cpu"))
    assert angles.dtype == torch.float64 and angles.shape == (60, head_dim // 2)
    token = (2 * 4 + 3) * 5 + 1  # frame 2, row 3, column 1
    expected = [
        position * 10_000.0 ** (-2 * i / (2 * pairs))
        for position, pairs in zip((2, 3, 1), axis_pairs(head_dim), strict=True)
        for i in range(pairs)
    ]
    torch.testing.assert_close(angles[token], torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_a_quarter_turn_swaps_a_pair():
    x = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2)
    angle = torch.full((1, 1, 1, 1), math.pi / 2)
    torch.testing.assert_close(rotate(x, angle.cos(), angle.sin()).flatten(), torch.tensor([-2.0, 1.0]))


def test_scores_depend_on_relative_positions_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 24, dtype=torch.float64)
    angles = rotary_angles((9, 1, 1), 24, torch.device("cpu"))[None, :, None]

    def score(a: int, b: int) -> float:
        turned = [rotate(x, angles[:, [i]].cos(), angles[:, [i]].sin()) for x, i in ((q, a), (k, b))]
        return float((turned[0] * turned[1]).sum())

    assert score(2, 5) == pytest.approx(score(5, 8), abs=1e-12)
    assert score(2, 5) != pytest.approx(score(2, 6), abs=1e-6)
