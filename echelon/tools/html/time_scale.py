"""Horizontal time scale: converts seconds to percent of a figure's width, and omits the middle of long figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.base import formatting

#: Largest number of rectangles in all (more make a browser slow), and in a row (more are too thin to see).
MOST_EVENTS, MOST_IN_A_ROW = 2400, 160
#: Width of the gap in place of the omitted middle, in percent.
GAP = 4.0

Stretch = tuple[float, float]  #: begin and end, in seconds


@dataclass(frozen=True)
class TimeScale:
    """A scale that shows the first ``window`` and the last ``window`` of ``whole`` seconds."""

    whole: float
    window: float

    @property
    def gap(self) -> float | None:
        return 50.0 if 2 * self.window < 0.999 * self.whole else None

    def shows(self, begin: float, end: float) -> bool:
        return self.gap is None or end <= self.window or begin >= self.whole - self.window

    def at(self, seconds: float) -> float:
        if self.gap is None:
            return 100 * seconds / self.whole
        side = (100 - GAP) / 2
        if seconds <= self.window:
            return side * seconds / self.window
        return max(100 - side, 100 - side * (self.whole - seconds) / self.window)

    def ticks(self) -> list[tuple[float, str]]:
        if self.gap is None:
            return [(25.0 * part, formatting.duration(self.whole * part / 4)) for part in range(5)]
        moments = (0.0, self.window / 2, self.whole - self.window / 2, self.whole)
        return [(self.at(moment), formatting.duration(moment)) for moment in moments]


def make_time_scale(stretches: Sequence[Stretch], whole: float, rows: int) -> TimeScale:
    """Return a scale whose window holds as many intervals as may be drawn; it shows all if there are few intervals.

    stretches: intervals to draw, in seconds
    whole:     length of the figure in seconds
    rows:      number of rows
    """
    most = min(MOST_EVENTS, MOST_IN_A_ROW * rows)
    if len(stretches) <= most:
        return TimeScale(whole, whole / 2)
    distance = sorted(min(begin, max(0.0, whole - end)) for begin, end in stretches)
    return TimeScale(whole, min(whole / 2, distance[most - 1]))


def row_height(rows: int) -> float:
    """Return the height of a row in pixels, so that many ranks fit on a screen."""
    return max(9.0, min(26.0, 620 / rows))
