"""Time from left to right: seconds to percents of a picture's width, the middle left out where there is too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.base import formatting

#: More rectangles than this make a browser slow, and more in a row are too thin to be seen.
MOST_EVENTS, MOST_IN_A_ROW = 2400, 160
#: The part of the width between the beginning and the end, where the middle is left out.
GAP = 4.0

Stretch = tuple[float, float]  #: begin and end, in seconds


@dataclass(frozen=True)
class TimeScale:
    """``window`` seconds from the beginning of ``whole``, and as many to its end."""

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
    """Beginning and end as long as what is in them may be drawn; all of it where there is little."""
    most = min(MOST_EVENTS, MOST_IN_A_ROW * rows)
    if len(stretches) <= most:
        return TimeScale(whole, whole / 2)
    distance = sorted(min(begin, max(0.0, whole - end)) for begin, end in stretches)
    return TimeScale(whole, min(whole / 2, distance[most - 1]))


def row_height(rows: int) -> float:
    """Pixels of a row, so that many ranks still fit on a screen."""
    return max(9.0, min(26.0, 620 / rows))
