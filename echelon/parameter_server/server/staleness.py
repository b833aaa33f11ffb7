"""Statistics of staleness: the versions applied between a worker's pull and its push."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: All staleness from this value on shares one cell, so that the histogram stays small however long a job runs.
MANY = 64


@dataclass
class Staleness:
    """Mean, largest and histogram of the staleness of all applied pushes."""

    count: int = 0
    total: int = 0
    largest: int = 0
    histogram: dict[int, int] = field(default_factory=dict)

    def record(self, staleness: int) -> None:
        self.count += 1
        self.total += staleness
        self.largest = max(self.largest, staleness)
        cell = min(staleness, MANY)
        self.histogram[cell] = self.histogram.get(cell, 0) + 1

    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def report(self) -> dict[str, Any]:
        """Return the statistics for display; the last cell of the histogram is "64+"."""
        cells = {f"{MANY}+" if cell == MANY else str(cell): n for cell, n in sorted(self.histogram.items())}
        return {"pushes": self.count, "mean": self.mean(), "max": self.largest, "histogram": cells}

    def facts(self) -> list[Any]:
        return [self.count, self.total, self.largest, sorted(self.histogram.items())]

    @classmethod
    def of(cls, facts: list[Any]) -> Staleness:
        count, total, largest, cells = facts
        return cls(count, total, largest, {int(cell): int(n) for cell, n in cells})
