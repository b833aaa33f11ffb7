"""Line charts as geometry: converts points to SVG paths of limited length that keep every spike.

A chart is ``WIDTH`` units wide, which the browser scales to the page, and ``HEIGHT`` pixels high.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

#: Largest number of points of a curve on the page: more would not be visible, and would be slow.
MOST_POINTS = 2000
WIDTH, HEIGHT = 1000.0, 220.0
#: Space above and below the curve in pixels, so that its extremes are visible.
MARGIN = 8.0
#: Space left and right of the curve, as a share of its width, so that the first and the last point are not cut.
SIDE = 0.012
#: Ratio of maximum to median above which the scale is logarithmic: a linear one would show one spike and a flat line.
SPIKY = 50.0
#: Largest number of points of a curve that are drawn as dots.
MOST_DOTS = 100

Point = tuple[float, float | None]  #: (x, y); y is None for NaN: the curve has a gap there


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Reduce the points to at most ``most``: of every interval the lowest, the highest, and a gap if there is one."""
    if len(points) <= most:
        return list(points)
    each = 3 if any(y is None for _, y in points) else 2
    stretches = (most - 2) // each
    inner = points[1:-1]
    found = [points[0]]
    for place in range(stretches):
        begin, end = place * len(inner) // stretches, (place + 1) * len(inner) // stretches
        found += _extremes(inner[begin:end])
    return [*found, points[-1]]


def _extremes(stretch: Sequence[Point]) -> list[Point]:
    numbers = [(y, place) for place, (_, y) in enumerate(stretch) if y is not None]
    chosen = {min(numbers)[1], max(numbers)[1]} if numbers else set()
    chosen |= set([place for place, (_, y) in enumerate(stretch) if y is None][:1])
    return [stretch[place] for place in sorted(chosen)]


# ---- scales ----


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic scale from ``low`` to ``high``."""

    low: float
    high: float
    log: bool = False

    def part(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if self.log:
            return (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round values within the scale."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            found = [10.0**power for power in powers]
            if len(found) >= 2:
                return found[:: math.ceil(len(found) / count)]
            return [self.low * (self.high / self.low) ** (place / 4) for place in range(5)]
        step = _round((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        return [step * place + 0.0 for place in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round(step: float) -> float:
    """Round to the nearest of 1, 2, 5 and 10 times a power of ten, by ratio."""
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(
        factor for factor, most in ((1, 2**0.5), (2, 10**0.5), (5, 50**0.5), (10, 11)) if step < most * power
    )


def scale_for(values: Iterable[float], log: bool = False, zero: bool = False) -> Scale:
    """Return a scale for all values. Equal values lie in the middle, or below 1 if they may be shares.

    log:  True for a logarithmic scale; default False
    zero: True to begin at zero, if no value is negative; default False
    """
    values = list(values)
    low, high = min(values), max(values)
    if log:
        return Scale(low / 1.1, high * 1.1, log=True)
    if zero and low >= 0:
        low = 0.0
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        reach = abs(high) / 20 or 1.0
        top = 1.0 if 0 < high <= 1 < high + reach else high + reach
        return Scale(low if zero and low == 0 else low - reach, top)
    return Scale(low, high)


def is_spiky(values: Sequence[float]) -> bool:
    ordered = sorted(values)
    return bool(ordered) and ordered[0] > 0 and ordered[-1] > SPIKY * ordered[len(ordered) // 2]


# ---- charts ----


@dataclass(frozen=True)
class Series:
    """The data of one curve.

    name: name in the legend
    kind: CSS class
    pale: True for a curve that is no longer valid; default False
    dots: True to draw a dot for each point; default False
    """

    name: str
    kind: str
    points: Sequence[Point]
    pale: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Curve:
    """A curve as geometry.

    path: SVG path of the line
    dots: SVG path of the dots; "" if there are none, or too many points
    """

    series: Series
    points: list[Point]
    path: str
    dots: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart as geometry.

    key:        unique name on the page
    x, y:       names of the axes
    across, up: horizontal and vertical scale
    gaps:       (position in percent, text) of points that are not a number
    lines:      (position in percent, text) of vertical lines (restarts)
    zero:       True if the vertical scale begins at zero; default False
    """

    key: str
    title: str
    x: str
    y: str
    curves: list[Curve]
    across: Scale
    up: Scale
    gaps: list[tuple[float, str]] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    zero: bool = False
    height: float = HEIGHT

    @property
    def ticks_across(self) -> list[tuple[float, str]]:
        return [(100 * self.across.part(value), text) for value, text in labelled(self.across)]

    @property
    def ticks_up(self) -> list[tuple[float, str]]:
        return [(_down(self.up, value), text) for value, text in labelled(self.up)]

    @property
    def data(self) -> dict[str, object]:
        """The data for the page's script: NaN is null, and numbers have six significant digits."""
        return {
            "x": self.x,
            "y": self.y,
            "log": self.up.log,
            "zero": self.zero,
            "across": [_short(self.across.low), _short(self.across.high)],
            "size": [WIDTH, HEIGHT, MARGIN],
            "series": [
                {
                    "name": curve.series.name,
                    "pale": curve.series.pale,
                    "x": [_short(x) for x, _ in curve.points],
                    "y": [None if y is None else _short(y) for _, y in curve.points],
                }
                for curve in self.curves
            ],
        }


def chart(
    key: str,
    title: str,
    y: str,
    series: Iterable[Series],
    *,
    x: str = "step",
    zero: bool = False,
    reach: Sequence[float] = (),
    restarts: Sequence[float] = (),
) -> Chart | None:
    """Return the chart of some series; None if they have no values.

    key:      unique name on the page
    y:        name of the vertical axis
    x:        name of the horizontal axis; default "step"
    zero:     True to begin the vertical scale at zero; default False
    reach:    positions that the horizontal scale contains besides those of the series
    restarts: positions of vertical lines
    """
    kept = [(each, thin(each.points)) for each in series if any(value is not None for _, value in each.points)]
    if not kept:
        return None
    across = _sideways([*reach, *(place for _, points in kept for place, _ in points)])
    values = [value for _, points in kept for _, value in points if value is not None]
    up = scale_for(values, log=is_spiky(values), zero=zero)
    return Chart(
        key,
        title,
        x,
        y,
        [_curve(each, points, across, up) for each, points in kept],
        across,
        up,
        list(_gaps(kept, across, x)),
        [(100 * across.part(place), f"restarted at {x} {figure(place)}") for place in restarts],
        zero,
    )


def _sideways(places: Sequence[float]) -> Scale:
    low, high = min(places), max(places)
    space = SIDE * (high - low) or 1.0
    return Scale(low - space, high + space)


def _curve(series: Series, points: list[Point], across: Scale, up: Scale) -> Curve:
    apart = [each for point in points for each in (point, (point[0], None))] if len(points) <= MOST_DOTS else []
    alone = sum(value is not None for _, value in points) == 1  # without a line, the single point is hardly visible
    shown = path(apart, across, up) if series.dots or alone else ""
    return Curve(series, points, path(points, across, up), shown)


def path(points: Sequence[Point], across: Scale, up: Scale) -> str:
    """Return the SVG path of a line through all points, interrupted at None. A single point becomes a dot."""
    found, pen = [], False
    for x, y in points:
        if y is None:
            pen = False
            continue
        place = f"{WIDTH * across.part(x):.2f} {_down(up, y):.2f}"
        found.append(f"L{place}" if pen else f"M{place}L{place}")
        pen = True
    return "".join(found)


def _down(up: Scale, value: float) -> float:
    """Return the position of a value in pixels from the top."""
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * up.part(value)


#: Largest number of gap marks per series: a run whose loss becomes NaN has thousands of gaps.
MOST_GAPS = 60


def _gaps(kept: Sequence[tuple[Series, list[Point]]], across: Scale, x: str) -> Iterator[tuple[float, str]]:
    for series, points in kept:
        places = [place for place, value in points if value is None]
        for place in places[:: max(1, math.ceil(len(places) / MOST_GAPS))]:
            yield 100 * across.part(place), f"{series.name} is not a number at {x} {figure(place)}"


def figure(value: float) -> str:
    """Format a number with four significant digits, and all digits before the point: ``0.01695``, ``12,345``."""
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 9999.5 or value == int(value) else f"{value:.4g}"


def labelled(scale: Scale) -> list[tuple[float, str]]:
    """Return the ticks of a scale with labels, which have the number of digits needed to distinguish them."""
    values = scale.ticks()
    least = min((after - before for before, after in itertools.pairwise(values)), default=0.0)
    most = max(map(abs, values), default=0.0)
    if scale.log or not least or not 1e-4 <= most < 1e9:
        return [(value, figure(value)) for value in values]
    digits = max(0, -math.floor(math.log10(least) + 1e-9))
    return [(value, f"{value:,.{digits}f}" if digits <= 6 else figure(value)) for value in values]


def _short(value: float) -> float:
    return float(f"{value:.6g}") if abs(value) < 1e6 else round(value)
