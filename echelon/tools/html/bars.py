"""Stacked bars, in percent of a figure's width."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BarSegment:
    """One part of a bar; ``left`` and ``width`` are in percent."""

    name: str
    value: float
    left: float
    width: float

    @property
    def kind(self) -> str:
        """The CSS class of the segment."""
        return self.name.replace(" ", "-")


def stacked(parts: Sequence[tuple[str, float]], whole: float | None = None) -> list[BarSegment]:
    """Return the parts one after another.

    whole: value of the figure's full width; default: the sum of all parts
    """
    whole = whole or sum(value for _, value in parts) or 1.0
    ends = itertools.accumulate((value for _, value in parts), initial=0.0)
    return [
        BarSegment(name, value, 100 * begin / whole, 100 * value / whole)
        for (name, value), begin in zip(parts, ends, strict=False)
    ]
