"""What is far from the rest of its kind."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

#: How far from the median, as a factor, is far.
FAR = 1.5


def slow(values: Mapping[K, float], *, more_is_better: bool) -> dict[K, float]:
    """Those that are more than ``FAR`` worse than the median, and by what factor."""
    if len(values) < 2:
        return {}
    middle = statistics.median(values.values())
    if middle <= 0:
        return {}
    factors = {
        key: (middle / value if value else float("inf")) if more_is_better else value / middle
        for key, value in values.items()
    }
    return {key: factor for key, factor in factors.items() if factor > FAR}
