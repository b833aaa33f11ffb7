"""Partition of a model into stages, so that the slowest stage takes the least time and every stage fits in memory.

Stages are runs of consecutive units. Time and memory of a stage grow with every unit, so for a given limit on the
slowest stage it is optimal to let every stage take as many units as possible; a bisection finds the smallest limit for
which all units are taken. Each guess takes stages x log(units) steps, where tables of all (stage, unit) pairs would
take stages x units^2. Only if a single unit is too much for some stage are all possible stage ends enumerated.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Sums = tuple[float, ...]  #: running sums: entry i is the sum over the first i units, from 0 to all


def sums(values: Sequence[float]) -> Sums:
    return tuple(itertools.accumulate(values, initial=0.0))


@dataclass(frozen=True)
class StageMemoryLimits:
    """Memory limits of stages: ``held[stage]`` are Sums of the units' bytes, ``limits[stage]`` the bytes allowed."""

    held: Sequence[Sums]
    limits: Sequence[float]


def cut(seconds: Sequence[Sums], room: StageMemoryLimits | None = None) -> tuple[int, ...] | None:
    """Return the first unit of every stage but the first; None if no cut is within ``room``.

    Among cuts with an equally fast slowest stage, one with nearly even other stages is chosen.

    seconds: for every stage, Sums of the units' time on the device of this stage
    room:    memory limits; default: none
    """
    fill = _Fill(seconds, room)
    slowest = fill.quickest()
    return None if slowest is None else fill.evenly(slowest)


def slowest(seconds: Sequence[Sums], cuts: Sequence[int]) -> float:
    """Return the time of the slowest stage."""
    ends = [*cuts, len(seconds[0]) - 1]
    return max(sums[end] - sums[first] for sums, first, end in zip(seconds, [0, *cuts], ends, strict=True))


class _Fill:
    def __init__(self, seconds: Sequence[Sums], room: StageMemoryLimits | None) -> None:
        self.seconds, self.room = seconds, room
        self.stages, self.units = len(seconds), len(seconds[0]) - 1
        alone = [[after - before for before, after in itertools.pairwise(row)] for row in _different(seconds)]
        self.hardest = max(map(max, alone))
        self.least = max(map(min, zip(*alone, strict=True)))  # some stage must run the slowest unit
        held = zip(room.held, room.limits, strict=True) if room else ()
        self.crammed = any(_largest(row) > limit for row, limit in held)

    def quickest(self) -> float | None:
        """Return the least possible time of the slowest stage, up to a relative error of 1e-9; None if none fits."""
        if self.units < self.stages:
            return None
        high = max(sums[-1] for sums in self.seconds)
        if self.ends(high) is None:
            return None
        low = 0.0
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            if self.ends(middle) is None:
                low = middle
                continue
            high = min(middle, slowest(self.seconds, self.evenly(middle)))
            if self.ends(high * (1 - 1e-9)) is None:  # ``high`` is the optimum
                break
        return high

    def ends(self, most: float) -> list[Sequence[int]] | None:
        """Return the units at which the first 0, 1, 2, ... stages can end if each takes at most ``most`` seconds.

        If every stage can take any single unit, a stage can end anywhere up to the end of the greedy partition. The
        result is None if the stages cannot take all units.
        """
        if most < self.least * (1 - 1e-12):
            return None
        one_by_one = self.crammed or self.hardest > most
        found: list[Sequence[int]] = [[0]]
        for stage in range(self.stages):
            after = self._one_by_one(stage, found[-1], most) if one_by_one else self._up_to(stage, found[-1], most)
            if not after:
                return None
            found.append(after)
        return found if found[-1][-1] == self.units else None

    def _up_to(self, stage: int, before: Sequence[int], most: float) -> Sequence[int]:
        last = min(self.furthest(stage, before[-1], most), self.units - (self.stages - stage - 1))
        return range(before[0] + 1, last + 1)

    def _one_by_one(self, stage: int, before: Sequence[int], most: float) -> Sequence[int]:
        found: set[int] = set()
        for first in before:
            found.update(range(first + 1, self.furthest(stage, first, most) + 1))
        return sorted(end for end in found if end <= self.units - (self.stages - stage - 1))

    def furthest(self, stage: int, first: int, most: float) -> int:
        sums = self.seconds[stage]
        end = bisect_right(sums, (sums[first] + most) * (1 + 1e-12)) - 1
        if self.room is None:
            return end
        held = self.room.held[stage]
        return min(end, bisect_right(held, (held[first] + self.room.limits[stage]) * (1 + 1e-12)) - 1)

    def evenly(self, most: float) -> tuple[int, ...]:
        """Return a cut with no stage above ``most`` and units distributed evenly, from the last stage back."""
        most *= 1 + 1e-9
        ends = self.ends(most)
        assert ends is not None
        cuts: list[int] = []
        end = self.units
        for stage in range(self.stages - 1, 0, -1):
            sums, places = self.seconds[stage], ends[stage]
            wanted = sums[end] * stage / (stage + 1)
            first = bisect_right(sums, wanted + 1e-9 * most) - 1  # round down: earlier stages hold more activations
            at = max(0, min(bisect_right(places, min(first, end - 1)) - 1, len(places) - 1))
            while self.furthest(stage, places[at], most) < end:
                at += 1
            end = places[at]
            cuts.append(end)
        return tuple(reversed(cuts))


def _different(rows: Sequence[Sums]) -> list[Sums]:
    return list({id(row): row for row in rows}.values())


def _largest(row: Sums) -> float:
    return max(after - before for before, after in itertools.pairwise(row))


def divides_evenly(count: int, stages: int) -> bool:
    """Return True if cutting ``count`` equal units into ``stages`` stages is better than into one stage less."""
    return stages == 1 or math.ceil(count / stages) < math.ceil(count / (stages - 1))
