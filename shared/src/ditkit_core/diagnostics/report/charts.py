"""Curves as SVG. Colours come from the style sheet, so that they follow light and dark mode."""

import math
import re
from dataclasses import dataclass

from ditkit_core.diagnostics.rendering import Html, element
from ditkit_core.diagnostics.report.data import Series
from ditkit_core.diagnostics.report.words import format_number

WIDTH, HEIGHT = 420, 230
"""Size of a chart in SVG units: about a phone's screen."""
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 26
_MOST_PATH_POINTS = 600
"""Largest number of points of a curve. A chart of this size has no room for more."""
_DIGIT = 8.0
"""Largest width of a digit at the axes."""
_LEAST = 1e-300
"""Smallest value of a logarithmic axis, and smallest range of any: a file may contain numbers whose logarithms or steps are none."""
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


def chart_figure(chart: Chart, *, section: int) -> Html:
    """Build a chart with its caption, and an element in which the script shows the numbers under the pointer.

    Args:
        section: Index of its run on the page.
    """
    scale = _Scale.of(chart)
    about = _described(chart)
    names = re.sub(r"[^\w.]+", "-", f"{section}-{chart.name}")
    parts = [
        element("title", chart.title, id=f"title-{names}"),
        element("desc", about, id=f"about-{names}"),
        *_axes(scale),
        *([_area(scale, *chart.band)] if chart.band else []),
        *([_across(scale, chart.level)] if chart.level is not None else []),
        *([_path(scale, chart.raw, "faint")] if chart.raw else []),
        _path(scale, chart.series, "main"),
        *_dots(scale, chart.series),
        element("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, visibility="hidden"),
    ]
    # The script converts the position of the pointer into a step with these numbers.
    read_off = {"section": section, "name": chart.name, "first": scale.first, "last": scale.last}
    read_off |= {"left": LEFT, "right": WIDTH - RIGHT, "unit": chart.unit}
    attributes = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "tabindex": 0}
    attributes |= {"aria_labelledby": f"title-{names} about-{names}"}
    svg = element("svg", *parts, **attributes, **{f"data_{name}": value for name, value in read_off.items()})
    newest = element("span", format_number(chart.series.last / chart.unit), class_="newest")
    note = [element("small", chart.note)] if chart.note else []
    return element(
        "figure", element("figcaption", element("strong", chart.title), newest, *note), svg, element("output", about)
    )


def _described(chart: Chart) -> str:
    """A sentence about the main curve: first, last and lowest value. Screen readers read it in place of the chart."""
    series = chart.series

    def at(index: int) -> str:
        return f"{format_number(series.values[index] / chart.unit)} at step {series.steps[index]}"

    if len(series.values) == 1:
        return at(0)
    return f"{at(0)}, {at(-1)}; lowest {at(min(range(len(series.values)), key=series.values.__getitem__))}"


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Converts steps and values into positions in the chart."""

    first: int
    last: int
    low: float
    high: float
    logarithmic: bool
    unit: float

    @classmethod
    def of(cls, chart: Chart) -> "_Scale":
        curves = [chart.series, *([chart.raw] if chart.raw else []), *(chart.band or ())]
        values = [value for series in curves for value in series.values]
        values += [chart.level] if chart.level is not None else []
        steps = [step for series in curves for step in (series.steps[0], series.steps[-1])]
        logarithmic = chart.logarithmic and min(values) > _LEAST  # the power of ten below has to be a number too
        positions = [math.log10(value) for value in values] if logarithmic else values
        low, high = min(positions), max(positions)
        # A flat curve has no range: its margin is a tenth of its value, or 1.
        room = (high - low) * 0.06 or abs(high) * 0.1
        room = room if room > _LEAST else 1.0
        # No negative axis for values that are never negative.
        floor = 0.0 if low >= 0 and not logarithmic else -math.inf
        return cls(
            first=min(steps),
            last=max(*steps, min(steps) + 1),
            low=max(low - room, floor),
            high=high + room,
            logarithmic=logarithmic,
            unit=chart.unit,
        )

    def x(self, step: float) -> float:
        return round(LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        position = math.log10(value) if self.logarithmic else value
        return round(HEIGHT - BOTTOM - (position - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM), 1)

    def ticks(self) -> list[float]:
        """Values with a grid line."""
        if self.logarithmic and self.high - self.low >= 1:
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1)]
        if self.logarithmic:
            return [tick for tick in _round_ticks(10**self.low, 10**self.high) if tick > 0]
        return [tick * self.unit for tick in _round_ticks(self.low / self.unit, self.high / self.unit)]


def _round_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """About this many round numbers in a range."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [
        round(i * step, 12 - math.floor(math.log10(step)))
        for i in range(math.ceil(low / step), math.floor(high / step) + 1)
    ]


def _axes(scale: _Scale) -> list[Html]:
    parts = []
    for tick in scale.ticks():
        y = scale.y(tick)
        parts.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        parts.append(element("text", _short(tick / scale.unit), x=LEFT - 6, y=y + 4, text_anchor="end"))
    for tick in _round_ticks(float(scale.first), float(scale.last)):
        if tick == round(tick):
            text = f"{round(tick)}"
            inside = min(scale.x(tick), WIDTH - len(text) * _DIGIT / 2)  # the text would be cut off at the edge
            parts.append(element("text", text, x=inside, y=HEIGHT - 8, text_anchor="middle"))
    parts.append(element("text", "step", x=LEFT - 18, y=HEIGHT - 8, text_anchor="end"))
    return parts


def _short(value: float) -> str:
    """A tick's value in at most eight characters, which fit the margin."""
    if 1e-3 <= abs(value) < 1e7 or not value:
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    return f"{value:.2e}".replace(".00e", "e")


def _points(scale: _Scale, series: Series) -> list[str]:
    return [f"{scale.x(float(s))} {scale.y(v)}" for s, v in zip(series.steps, series.values, strict=True)]


def _path(scale: _Scale, series: Series, look: str) -> Html:
    return element("path", class_=look, d="M" + "L".join(_points(scale, series.downsampled(_MOST_PATH_POINTS))))


def _dots(scale: _Scale, series: Series) -> list[Html]:
    if len(series.steps) > _MOST_DOTS:
        return []
    points = (point.split() for point in _points(scale, series))
    return [element("circle", class_="dot", cx=x, cy=y, r=2.5) for x, y in points]


def _area(scale: _Scale, low: Series, high: Series) -> Html:
    lower, upper = _points(scale, low), _points(scale, high)[::-1]  # one closed outline: there and back
    return element("path", class_="band", d="M" + "L".join([*lower, *upper]) + "Z")


def _across(scale: _Scale, level: float) -> Html:
    return element("line", class_="level", x1=LEFT, x2=WIDTH - RIGHT, y1=scale.y(level), y2=scale.y(level))
