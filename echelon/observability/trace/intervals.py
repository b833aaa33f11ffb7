"""Set operations on time intervals, given as sorted lists of disjoint (begin, end)."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as a sorted list of disjoint intervals."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def without(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return the parts of ``first`` outside ``second``; both must be results of ``union``."""
    taken, found = list(second), []
    at = 0
    for since, end in first:
        begin = since
        while at < len(taken) and taken[at][1] <= begin:
            at += 1
        here = at
        while here < len(taken) and taken[here][0] < end:
            if taken[here][0] > begin:
                found.append((begin, taken[here][0]))
            begin = max(begin, taken[here][1])
            here += 1
        if begin < end:
            found.append((begin, end))
    return found


def within(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return the intersection."""
    kept = list(first)
    return without(kept, without(kept, second))


def clipped(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(a, begin), min(b, end)) for a, b in intervals if min(b, end) > max(a, begin)]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
