"""Rotary tables: geometry by formula, for every head size that models or tests use."""

import pytest
import torch

from ditkit_wan.model.rope import axis_pairs, rotary_angles


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
    torch.testing.assert_close(
        angles[token], torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )
