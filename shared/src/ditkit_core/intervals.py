"""Confidence intervals of a mean, by Student's t."""

import math
from collections.abc import Sequence

CONFIDENCE = 0.95


def half_width(values: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """Half the confidence interval of the mean of independent values, about normally distributed; None for fewer than two.

    Args:
        values: One for each independent unit.
        confidence: Share of such intervals that hold the true mean, in (0, 1).
    """
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return t_quantile(count - 1, confidence) * math.sqrt(variance / count)


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t that a variable of Student's distribution stays within, on both sides of 0, with this probability.

    Args:
        degrees: Degrees of freedom, at least 1.
        confidence: Probability in (0, 1).
    """
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """Probability that |t| <= tan(angle) * sqrt(degrees).

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4: finite sums for whole degrees.
    """
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(degrees // 2):
        total += term
        term *= square * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
