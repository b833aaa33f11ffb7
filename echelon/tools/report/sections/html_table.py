"""Tables of the page, also those that say in figures what a chart shows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.tools.report.figures.curves import Chart, Curve, figure

#: Rows of a chart's table.
SAMPLES = 12


@dataclass(frozen=True)
class HtmlTable:
    """caption: what it is, for those who do not see it; right: columns of figures; marked: a row that stands out"""

    caption: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[int, ...] = ()
    marked: int | None = None


def sampled(chart: Chart) -> HtmlTable:
    """Some places of a chart, from its beginning to its end, and each curve's last value there, as far as it goes."""
    places = sorted({x for curve in chart.curves for x, _ in curve.points})
    last = len(places) - 1
    chosen = sorted({round(place * last / (SAMPLES - 1)) for place in range(SAMPLES)})
    rows = [
        (figure(places[each]), *(_value(curve, places[each]) for curve in chart.curves)) for each in chosen if last >= 0
    ]
    head = (chart.x, *(_heading(curve, chart) for curve in chart.curves))
    return HtmlTable(f"{chart.title}: some of the figures", head, rows, tuple(range(len(head))))


def _heading(curve: Curve, chart: Chart) -> str:
    """What is evaluated now and then stands beside steps in which it was not."""
    return f"{curve.series.name} last" if curve.series.dots and len(chart.curves) > 1 else curve.series.name


def _value(curve: Curve, x: float) -> str:
    at = bisect_right(curve.points, x, key=lambda point: point[0]) - 1
    if at < 0 or (x > curve.points[-1][0] and not curve.series.dots):
        return ""
    value = curve.points[at][1]
    return "nan" if value is None else figure(value)
