"""Student's t, against tables."""

import pytest

from ditkit_core.intervals import half_width, t_quantile


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
