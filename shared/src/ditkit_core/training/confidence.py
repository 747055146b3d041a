"""Confidence intervals of a mean, by Student's t."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

CONFIDENCE = 0.95


def half_width(values: Sequence[float], units: Sequence[Hashable] = (), confidence: float = CONFIDENCE) -> float | None:
    """Half the width of a mean's confidence interval; None for fewer than two independent units.

    Values of one unit may depend on each other in any way, because only the sum of a unit's deviations from the mean enters.

    Source: the cluster-robust variance of a mean, with G / (G - 1) for few units and Student's t with G - 1 degrees of freedom.

    Args:
        values: Values to average; their unit sums are assumed to be about normally distributed.
        units: The independent unit of each value; empty if each is one of its own.
        confidence: Share of such intervals that contain the true mean, in (0, 1).
    """
    mean = math.fsum(values) / max(len(values), 1)
    parts: dict[Hashable, list[float]] = defaultdict(list)
    for value, unit in zip(values, units or range(len(values)), strict=True):
        parts[unit].append(value - mean)
    count = len(parts)
    if count < 2:
        return None
    squares = math.fsum(math.fsum(part) ** 2 for part in parts.values())
    return t_quantile(count - 1, confidence) * math.sqrt(squares * count / (count - 1)) / len(values)


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t distribution: |t| stays below it with this probability.

    Args:
        degrees: Degrees of freedom, at least 1.
        confidence: Probability in (0, 1).
    """
    # By bisection, because the standard library has no inverse and scipy is not a dependency.
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
