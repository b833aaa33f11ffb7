"""Warns in the first steps if a script feeds the same samples to several replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

#: Consecutive steps with equal batches before the warning, because a single batch may be equal by chance.
CONFIRMED = 2


class DuplicateBatchCheck:
    """Compares the batches that the script itself, not ``engine.loader()``, feeds to the ranks.

    Each rank sends its replica index, a checksum of its batch or None, and the result of ``LoaderWatch.undealt``.
    A rank whose batch comes from ``engine.loader()`` sends an empty list.
    """

    def __init__(self) -> None:
        self._times, self._has_told = 0, False

    def remark(self, fed: Sequence[Sequence[Any]]) -> str | None:
        """Return a warning, once, if replicas were fed the same data in ``CONFIRMED`` consecutive steps."""
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
    """Yield pairs of ranks of different replicas whose entries at index ``at`` are equal."""
    known = [(rank, one) for rank, one in enumerate(fed) if one and one[at] is not None]
    for (first, one), (second, other) in combinations(known, 2):
        if one[0] != other[0] and one[at] == other[at]:
            yield first, second
