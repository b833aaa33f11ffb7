"""Replicas that a script feeds the same samples: a warning in the first steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

#: steps in which it must be so: a batch may be the same by chance
CONFIRMED = 2


class DuplicateBatchCheck:
    """Compares what ranks were fed by the script itself, not by engine.loader().

    Each rank tells its replica, a checksum of its batch or None, and what ``LoaderWatch.undealt`` says; nothing where
    its batch came from engine.loader().
    """

    def __init__(self) -> None:
        self._times, self._has_told = 0, False

    def remark(self, fed: Sequence[Sequence[Any]]) -> str | None:
        """Return a line, once, where replicas were fed alike in ``CONFIRMED`` steps."""
        same = next(_pairs_alike(fed, 1), None)
        undealt = next(_pairs_alike(fed, 2), None)
        pair = same or undealt
        self._times = self._times + 1 if pair else 0
        if pair is None or self._has_told or self._times < CONFIRMED:
            return None
        self._has_told = True
        loader = fed[pair[0]][2]
        remedy = "engine.loader(loader)" if loader else "engine.loader(data)"
        if same is not None:
            return (
                f"loader: ranks {pair[0]} and {pair[1]} were given the same batches and work on the same samples; take "
                f"batches from {remedy}, which deals them out"
            )
        return (
            f"loader: ranks {pair[0]} and {pair[1]} each go through all {loader[1]:,} samples of a DataLoader, whose "
            f"sampler does not deal them out, and an epoch is as long as on one rank; take batches from {remedy} "
            "(unless each rank's data set is a part of its own)"
        )


def _pairs_alike(fed: Sequence[Sequence[Any]], at: int) -> Iterator[tuple[int, int]]:
    """Yield ranks of different replicas that tell the same."""
    known = [(rank, one) for rank, one in enumerate(fed) if one and one[at] is not None]
    for (first, one), (second, other) in combinations(known, 2):
        if one[0] != other[0] and one[at] == other[at]:
            yield first, second
