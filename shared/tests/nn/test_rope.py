"""Angles by formula, and the rotation by them."""

import math

import pytest
import torch

from ditkit_core.nn.rope import axis_angles, rotate, timestep_features


def test_an_angle_is_position_times_frequency():
    angles = axis_angles(torch.tensor([0, 3, 7]), 4, 2000.0)
    expected = [[position * 2000.0 ** (-i / 4) for i in range(4)] for position in (0, 3, 7)]
    assert angles.dtype == torch.float64
    torch.testing.assert_close(
        angles, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_timestep_features_are_cosines_then_sines_in_fp64():
    features = timestep_features(torch.tensor([993.7], dtype=torch.float64), 8)
    angles = [993.7 * 10_000.0 ** (-i / 4) for i in range(4)]
    expected = [[math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]]
    torch.testing.assert_close(
        features, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_a_quarter_turn_swaps_a_pair():
    x = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2)
    angle = torch.full((1, 1, 1, 1), math.pi / 2)
    torch.testing.assert_close(
        rotate(x, angle.cos(), angle.sin()).flatten(), torch.tensor([-2.0, 1.0])
    )


def test_scores_depend_on_relative_positions_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 24, dtype=torch.float64)
    angles = axis_angles(torch.arange(9), 12, 10_000.0)[None, :, None]

    def score(a: int, b: int) -> float:
        turned = [
            rotate(x, angles[:, [i]].cos(), angles[:, [i]].sin()) for x, i in ((q, a), (k, b))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(2, 5) == pytest.approx(score(5, 8), abs=1e-12)
    assert score(2, 5) != pytest.approx(score(2, 6), abs=1e-6)
