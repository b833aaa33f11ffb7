"""Curves as geometry: from points to a path of at most some thousand places, in which every spike is still there.

A picture is ``WIDTH`` wide, whatever the browser makes of that, and ``HEIGHT`` pixels high.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

#: Of a curve on the page: more are neither seen nor quick.
MOST_POINTS = 2000
WIDTH, HEIGHT = 1000.0, 220.0
#: Air above and below, so that a curve's ends are seen.
MARGIN = 8.0
#: Where the highest is so much more than the middle, a straight scale would show one spike and a flat line.
SPIKY = 50.0
#: Points of a curve that are still shown each.
MOST_DOTS = 100

Point = tuple[float, float | None]  #: None: there is no number here (nan), and the curve has a gap


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most ``most`` of them: of every stretch the lowest, the highest, and a gap where it has one."""
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
    """From ``low`` to ``high``, straight or logarithmic."""

    low: float
    high: float
    log: bool = False

    def part(self, value: float) -> float:
        """0 at its low end, 1 at its high end."""
        if self.log:
            return (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside of it."""
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
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def scale_for(values: Iterable[float], log: bool = False, zero: bool = False) -> Scale:
    """Around all of them; ``zero``: from zero on. What is all the same lies in the middle."""
    values = list(values)
    low, high = min(values), max(values)
    if log:
        return Scale(low / 1.1, high * 1.1, log=True)
    if zero and low >= 0:
        low = 0.0
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        reach = abs(high) / 2 or 1.0
        return Scale(low if zero and low == 0 else low - reach, high + reach)
    return Scale(low, high)


def is_spiky(values: Sequence[float]) -> bool:
    ordered = sorted(values)
    return bool(ordered) and ordered[0] > 0 and ordered[-1] > SPIKY * ordered[len(ordered) // 2]


# ---- charts ----


@dataclass(frozen=True)
class Series:
    """name: as its legend has it; kind: a CSS class; pale: it no longer counts; dots: each point is shown"""

    name: str
    kind: str
    points: Sequence[Point]
    pale: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Curve:
    """path: a line through its points; dots: each of them, where there are few enough to tell them apart"""

    series: Series
    points: list[Point]
    path: str
    dots: str = ""


@dataclass(frozen=True)
class Chart:
    """key: its name on the page, unique; x, y: what the axes are
    gaps: where there is no number, in percent, and what is said there; lines: vertical ones (restarts)
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
        """What the page's script draws from: nan is null, figures have as many digits as can be seen."""
        return {
            "x": self.x,
            "y": self.y,
            "log": self.up.log,
            "zero": self.zero,
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
    restarts: Sequence[float] = (),
) -> Chart | None:
    """None where there is nothing to draw."""
    kept = [(each, thin(each.points)) for each in series if any(value is not None for _, value in each.points)]
    if not kept:
        return None
    across = scale_for(place for _, points in kept for place, _ in points)
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


def _curve(series: Series, points: list[Point], across: Scale, up: Scale) -> Curve:
    apart = [each for point in points for each in (point, (point[0], None))] if len(points) <= MOST_DOTS else []
    alone = sum(value is not None for _, value in points) == 1  # no line leads to it: it would be a speck
    shown = path(apart, across, up) if series.dots or alone else ""
    return Curve(series, points, path(points, across, up), shown)


def path(points: Sequence[Point], across: Scale, up: Scale) -> str:
    """An SVG path: a line through all points, interrupted where there is no number. A point alone is a dot."""
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
    """Pixels from the top."""
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * up.part(value)


#: Marks of a chart; a run whose loss is nan from some step on has thousands.
MOST_GAPS = 60


def _gaps(kept: Sequence[tuple[Series, list[Point]]], across: Scale, x: str) -> Iterator[tuple[float, str]]:
    for series, points in kept:
        places = [place for place, value in points if value is None]
        for place in places[:: max(1, math.ceil(len(places) / MOST_GAPS))]:
            yield 100 * across.part(place), f"{series.name} is not a number at {x} {figure(place)}"


def figure(value: float) -> str:
    """Four digits, and all of those before the point: ``0.01695``, ``12,345``, ``1.2e-07``."""
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 9999.5 or value == int(value) else f"{value:.4g}"


def labelled(scale: Scale) -> list[tuple[float, str]]:
    """Its ticks, with as many digits as it takes to tell them apart, the same for all."""
    values = scale.ticks()
    least = min((after - before for before, after in itertools.pairwise(values)), default=0.0)
    most = max(map(abs, values), default=0.0)
    if scale.log or not least or not 1e-4 <= most < 1e9:
        return [(value, figure(value)) for value in values]
    digits = max(0, -math.floor(math.log10(least) + 1e-9))
    return [(value, f"{value:,.{digits}f}" if digits <= 6 else figure(value)) for value in values]


def _short(value: float) -> float:
    return float(f"{value:.6g}") if abs(value) < 1e6 else round(value)
