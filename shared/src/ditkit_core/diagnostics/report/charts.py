"""Curves in the coordinates of an SVG, which `macros.html` draws. Colours come from the style
sheet, so that they follow light and dark mode."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ditkit_core.diagnostics.report.data import Series
from ditkit_core.diagnostics.report.words import format_number

WIDTH, HEIGHT = 420, 230
"""Size of a chart in SVG units: about a phone's screen."""
LEFT, RIGHT, TOP, BOTTOM = 58, WIDTH - 12, 12, HEIGHT - 26
"""Edges of the area of the curves."""
_MOST_PATH_POINTS = 600
"""Largest number of points of a curve. A chart of this size has no room for more."""
_DIGIT = 8.0
"""Largest width of a digit at the axes."""
_LEAST = 1e-300
"""Smallest value of a logarithmic axis, and smallest range of any: a file may contain numbers whose
logarithms or steps are none."""
_MOST_DOTS = 60
"""Largest number of points with which a curve has a dot at each."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A curve, and what belongs to it."""

    name: str
    """Name in the metrics file of the series whose values the pointer shows."""
    title: str
    series: Series
    """At least one point."""
    raw: Series | None = None
    """The values that `series` is an average of, shown faintly behind it."""
    band: tuple[Series, Series] | None = None
    """Lower and upper ends of an interval, at the same steps."""
    level: float | None = None
    """A value to compare with, shown as a horizontal line."""
    note: str = ""
    """A note to the reader, shown in the caption."""
    logarithmic: bool = False
    unit: float = 1.0
    """Divisor of the shown values: 2**30 shows bytes in GiB."""
    size: ClassVar = (WIDTH, HEIGHT)
    edges: ClassVar = (LEFT, RIGHT, TOP, BOTTOM)

    @property
    def id(self) -> str:
        """The name as part of an element's id."""
        return re.sub(r"[^\w.]+", "-", self.name)

    @property
    def newest(self) -> str:
        """The newest value, rounded."""
        return format_number(self.series.last / self.unit)

    @property
    def description(self) -> str:
        """A sentence about the main curve: first, last and lowest value. Screen readers read it in
        place of the chart."""
        series = self.series

        def at(index: int) -> str:
            return (
                f"{format_number(series.values[index] / self.unit)} at step {series.steps[index]}"
            )

        if len(series.values) == 1:
            return at(0)
        return f"{at(0)}, {at(-1)}; lowest {at(min(range(len(series.values)), key=series.values.__getitem__))}"

    @cached_property
    def steps(self) -> tuple[int, int]:
        """The first and last step of the axis."""
        ends = [step for curve in self._curves for step in (curve.steps[0], curve.steps[-1])]
        return min(ends), max(*ends, min(ends) + 1)

    @property
    def _curves(self) -> list[Series]:
        return [self.series, *([self.raw] if self.raw else []), *(self.band or ())]

    @cached_property
    def _axis(self) -> tuple[float, float, bool]:
        """The lowest and highest position of the axis of values, and whether positions are
        logarithms."""
        values = [value for curve in self._curves for value in curve.values]
        values += [self.level] if self.level is not None else []
        # the power of ten below has to be a number too
        logarithmic = self.logarithmic and min(values) > _LEAST
        positions = [math.log10(value) for value in values] if logarithmic else values
        low, high = min(positions), max(positions)
        # A flat curve has no range: its margin is a tenth of its value, or 1.
        margin = (high - low) * 0.06 or abs(high) * 0.1
        margin = margin if margin > _LEAST else 1.0
        # No negative axis for values that are never negative.
        floor = 0.0 if low >= 0 and not logarithmic else -math.inf
        return max(low - margin, floor), high + margin, logarithmic

    def x(self, step: float) -> float:
        """The position of a step."""
        first, last = self.steps
        return round(LEFT + (step - first) / (last - first) * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        """The position of a value."""
        low, high, logarithmic = self._axis
        position = math.log10(value) if logarithmic else value
        return round(BOTTOM - (position - low) / (high - low) * (BOTTOM - TOP), 1)

    @property
    def value_ticks(self) -> list[tuple[float, str]]:
        """The positions of horizontal grid lines, with their labels."""
        low, high, logarithmic = self._axis
        if logarithmic and high - low >= 1:
            ticks = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
        elif logarithmic:
            ticks = [tick for tick in _round_ticks(10**low, 10**high) if tick > 0]
        else:
            ticks = [tick * self.unit for tick in _round_ticks(low / self.unit, high / self.unit)]
        return [(self.y(tick), _short(tick / self.unit)) for tick in ticks]

    @property
    def step_ticks(self) -> Iterator[tuple[float, str]]:
        """The positions of labels below the chart."""
        for tick in _round_ticks(*self.steps):
            if tick == round(tick):
                text = f"{round(tick)}"
                # the text would be cut off at the edge
                yield (min(self.x(tick), WIDTH - len(text) * _DIGIT / 2), text)

    def points(self, series: Series) -> list[tuple[float, float]]:
        """The positions of a curve's points."""
        return [
            (self.x(float(s)), self.y(v)) for s, v in zip(series.steps, series.values, strict=True)
        ]

    def path(self, series: Series) -> str:
        """A curve as the outline of an SVG path."""
        return "M" + "L".join(
            f"{x} {y}" for x, y in self.points(series.downsampled(_MOST_PATH_POINTS))
        )

    @property
    def dots(self) -> list[tuple[float, float]]:
        """The positions of the points of a curve that has few."""
        return self.points(self.series) if len(self.series.steps) <= _MOST_DOTS else []

    @property
    def area(self) -> str:
        """The band as one closed outline: there and back."""
        assert self.band is not None
        low, high = map(self.points, self.band)
        return "M" + "L".join(f"{x} {y}" for x, y in [*low, *high[::-1]]) + "Z"


def _round_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """About this many round numbers in a range."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [
        round(i * step, 12 - math.floor(math.log10(step)))
        for i in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


def _short(value: float) -> str:
    """A tick's value in at most eight characters, which fit the margin."""
    if 1e-3 <= abs(value) < 1e7 or not value:
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    return f"{value:.2e}".replace(".00e", "e")
