"""Tables of the page, including those with sample values of a chart."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.tools.report.figures.curves import Chart, Curve, figure

#: Number of rows of a chart's table.
SAMPLES = 12


@dataclass(frozen=True)
class HtmlTable:
    """A table of the page.

    caption: description for screen readers
    right:   indices of right-aligned columns (numbers)
    marked:  index of the highlighted row; default None
    """

    caption: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[int, ...] = ()
    marked: int | None = None


def sampled(chart: Chart) -> HtmlTable:
    """Return a table of each curve's last value at some positions, from the beginning to the end of a chart.

    A cell is empty before a curve begins, and after it ends if the curve is a line.
    """
    places = sorted({x for curve in chart.curves for x, _ in curve.points})
    last = len(places) - 1
    chosen = sorted({round(place * last / (SAMPLES - 1)) for place in range(SAMPLES)})
    rows = [
        (figure(places[each]), *(_value(curve, places[each]) for curve in chart.curves)) for each in chosen if last >= 0
    ]
    head = (chart.x, *(_heading(curve, chart) for curve in chart.curves))
    return HtmlTable(f"{chart.title}: some of the figures", head, rows, tuple(range(len(head))))


def _heading(curve: Curve, chart: Chart) -> str:
    """Return a curve's column heading, with "last" for dots: these have no value in most steps of the other curves."""
    return f"{curve.series.name} last" if curve.series.dots and len(chart.curves) > 1 else curve.series.name


def _value(curve: Curve, x: float) -> str:
    at = bisect_right(curve.points, x, key=lambda point: point[0]) - 1
    if at < 0 or (x > curve.points[-1][0] and not curve.series.dots):
        return ""
    value = curve.points[at][1]
    return "nan" if value is None else figure(value)
