"""Uneven shares for devices of different speed: by speed, under the memory limit (Jia et al. 2022, Whale)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def share_out(total: int, speeds: Sequence[float], most: Sequence[float] | None = None) -> tuple[int, ...] | None:
    """``total`` samples over parts of such ``speeds``: whole numbers, none above ``most``, with the part that takes
    longest as quick as can be. None where they cannot hold so many.

    What a full part cannot take goes to the others, again by speed.
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
    """The share of each by speed and limit, in whole samples and never too many; a few are left to give."""
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
