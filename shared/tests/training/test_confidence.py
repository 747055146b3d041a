"""Student's t, against tables."""

import pytest

from ditkit_core.training.confidence import half_width, t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_printed_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-4)
    assert t_quantile(degrees, 0.5) < t_quantile(degrees) < t_quantile(degrees, 0.99)


def test_another_confidence_is_another_column_of_the_table() -> None:
    assert t_quantile(5, 0.99) == pytest.approx(4.032, abs=6e-4) and t_quantile(6, 0.9) == pytest.approx(
        1.943, abs=6e-4
    )


def test_the_interval_of_a_mean() -> None:
    """Mean 3, standard deviation 1.5811, five values: 2.776 * 1.5811 / sqrt(5)."""
    assert half_width([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.9632, abs=1e-3)
    assert half_width([2.0, 2.0, 2.0]) == 0
    assert half_width([1.0]) is None and half_width([]) is None


def test_values_of_one_unit_count_as_one() -> None:
    """Means of two units, 1 and 3: 12.706 * sqrt(2) / sqrt(2), however often each is seen."""
    assert half_width([1.0, 1.0, 3.0, 3.0], ["a", "a", "b", "b"]) == pytest.approx(12.706, abs=1e-3)
    assert half_width([1.0, 3.0], "ab") == half_width([1.0, 3.0]) == pytest.approx(12.706, abs=1e-3)
    assert half_width([1.0, 2.0, 3.0], "aaa") is None
    # by hand, of sizes 3 and 1 about the mean 1.75: sums -2.25 and 2.25, squares 10.125, times 2 / 1, its root over 4 values
    uneven = half_width([1.0, 1.0, 1.0, 4.0], "aaab")
    assert uneven == pytest.approx(12.706 * (2 * 2 * 2.25**2) ** 0.5 / 4, abs=1e-3)
