"""Uneven batch shares for devices of different speeds, within memory limits (Jia et al. 2022, Whale)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def share_out(total: int, speeds: Sequence[float], most: Sequence[float] | None = None) -> tuple[int, ...] | None:
    """Distribute ``total`` samples over parts in whole numbers so that the slowest part takes the least time.

    Samples that a full part cannot take go to the others, in proportion to their speeds. The result is None if the
    parts cannot hold ``total`` samples.

    speeds: samples per second of each part
    most:   largest number of samples of each part; default: no limit
    """
    limits = [math.inf] * len(speeds) if most is None else [math.floor(limit + 1e-9) for limit in most]
    if sum(limits) < total:
        return None
    counts = _below(total, speeds, limits)
    waiting = [((count + 1) / speed, -speed, part) for part, (count, speed) in enumerate(zip(counts, speeds))]  # noqa: B905
    waiting = [entry for entry in waiting if counts[entry[2]] < limits[entry[2]]]
    heapq.heapify(waiting)
    for _ in range(total - sum(counts)):
        _, negative, part = heapq.heappop(waiting)
        counts[part] += 1
        if counts[part] < limits[part]:
            heapq.heappush(waiting, ((counts[part] + 1) / speeds[part], negative, part))
    return tuple(counts)


def _below(total: int, speeds: Sequence[float], limits: Sequence[float]) -> list[int]:
    """Return shares by speed and limit, rounded down so that a few samples remain to be distributed."""
    open_parts, left = set(range(len(speeds))), float(total)
    counts = [0] * len(speeds)
    while open_parts:
        pace = left / sum(speeds[part] for part in open_parts)
        full = {part for part in open_parts if speeds[part] * pace >= limits[part]}
        if not full:
            for part in open_parts:
                counts[part] = max(0, math.floor(speeds[part] * pace) - 1)
            break
        for part in full:
            counts[part] = int(limits[part])
        left -= sum(limits[part] for part in full)
        open_parts -= full
    return counts
