"""Detection of values that are far worse than the median."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

#: Factor from the median beyond which a value is an outlier.
FAR = 1.5


def slow(values: Mapping[K, float], *, more_is_better: bool) -> dict[K, float]:
    """Return the factor from the median for each value that is worse than the median by more than ``FAR``."""
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
