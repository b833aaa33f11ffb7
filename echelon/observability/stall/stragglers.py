"""``Stragglers``: finds ranks whose own work in a step takes longer than that of other ranks, in several windows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from echelon.observability.stall.rank_status import RankStatus

#: Minimum steps of every rank and minimum seconds in a window.
STEPS, SECONDS = 20, 5.0
#: A rank is slow if it takes this many times the median in this many consecutive windows.
SLOW, WINDOWS = 1.3, 3
#: Seconds after which a slow rank is reported again.
AGAIN = 600.0
#: Minimum seconds per step; shorter ones (under 1 ms) are not reported.
LEAST = 1e-3
_WORK = ("data", "forward", "backward", "update")


class Stragglers:
    """Compares the work of ranks with each other, from the reports of all ranks."""

    def __init__(self) -> None:
        self._begin: dict[int, RankStatus] = {}
        self._since = 0.0
        self._streak: dict[int, int] = {}
        self._named: dict[int, float] = {}

    def compare(self, statuses: Mapping[int, RankStatus], now: float) -> list[str]:
        """Return log lines on the ranks that have become slow."""
        if not self._begin or set(statuses) != set(self._begin):
            self._begin, self._since = dict(statuses), now
            return []
        if now - self._since < SECONDS or any(s.steps - self._begin[r].steps < STEPS for r, s in statuses.items()):
            return []
        spent = {rank: _per_step(self._begin[rank], status) for rank, status in statuses.items()}
        self._begin, self._since = dict(statuses), now
        return [line for alike in _circles(statuses.values()) for line in self._judge(alike, spent, statuses, now)]

    def _judge(
        self,
        alike: list[int],
        spent: Mapping[int, Mapping[str, float]],
        statuses: Mapping[int, RankStatus],
        now: float,
    ) -> Iterable[str]:
        middle = _middle(sum(spent[rank].values()) for rank in alike)
        for rank in alike:
            slow = sum(spent[rank].values()) > max(SLOW * middle, LEAST)
            self._streak[rank] = self._streak.get(rank, 0) + 1 if slow else 0
            if self._streak[rank] >= WINDOWS and now - self._named.get(rank, -AGAIN) >= AGAIN:
                self._named[rank] = now
                yield _line(statuses[rank], spent, alike)


def _circles(statuses: Iterable[RankStatus]) -> list[list[int]]:
    """Return the groups of two or more ranks with equal work."""
    found: dict[str, list[int]] = {}
    for status in statuses:
        found.setdefault(status.alike, []).append(status.rank)
    return [ranks for ranks in found.values() if len(ranks) > 1]


def _per_step(begin: RankStatus, end: RankStatus) -> dict[str, float]:
    steps = end.steps - begin.steps
    return {phase: (end.busy.get(phase, 0.0) - begin.busy.get(phase, 0.0)) / steps for phase in _WORK}


def _middle(values: Iterable[float]) -> float:
    """Return the low median: of two values the smaller one, because the mean would hide half of the difference."""
    return statistics.median_low(list(values))


def _line(status: RankStatus, spent: Mapping[int, Mapping[str, float]], alike: list[int]) -> str:
    own = spent[status.rank]
    times = sum(own.values()) / max(_middle(sum(spent[rank].values()) for rank in alike), 1e-9)
    share = sum(own.values()) / 20  # very short phases have meaningless ratios
    ratios = {
        phase: own[phase] / max(_middle(spent[rank][phase] for rank in alike), 1e-9)
        for phase in _WORK
        if own[phase] > share
    }
    parts = ", ".join(f"{phase} {min(ratio, 99):.1f}" for phase, ratio in ratios.items())
    return (
        f"rank {status.rank} (host {status.host}) is slow: its own part of a step takes {times:.1f} times the median "
        f"({parts})"
    )
