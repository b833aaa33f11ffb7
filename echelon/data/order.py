"""The global order of an epoch: permutation, shares of ranks, buckets of similar length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import DataError
from echelon.data.seeding import SeedPurpose, numpy_stream

Indices = NDArray[np.int64]


def permutation(size: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """Return the order of an epoch, which depends on ``seed`` and ``epoch`` only."""
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    return numpy_stream(seed, SeedPurpose.ORDER, epoch).permutation(size).astype(np.int64, copy=False)


def per_replica(global_batch: int, replicas: int) -> int:
    """Return the samples of each replica in a global batch; raise ``DataError`` if it is not divisible."""
    size, rest = divmod(global_batch, replicas)
    if rest or size < 1:
        near = [n * replicas for n in (size, size + 1) if n]
        raise DataError(
            f"global_batch={global_batch} cannot be divided over {replicas} replicas; {' or '.join(map(str, near))} can"
        )
    return size


def block(count: int, rank: int, world_size: int) -> slice:
    """Return the contiguous share of ``rank``; shares differ by at most one, and the first ranks have more."""
    base, extra = divmod(count, world_size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


def weighted(count: int, rank: int, weights: Sequence[float]) -> slice:
    """Return the contiguous share of ``rank`` in proportion to its weight; each rank gets one if there are enough."""
    world, total = len(weights), sum(weights)
    if count <= world:
        return block(count, rank, world)
    ends = [0]
    for i in range(world):
        fair = round(count * sum(weights[: i + 1]) / total)
        ends.append(min(max(fair, ends[-1] + 1), count - (world - i - 1)))
    return slice(ends[rank], ends[rank + 1])


def stride(count: int, rank: int, world_size: int) -> slice:
    """Return every ``world_size``-th sample, as many as ``block``: of a sorted batch, ranks get similar lengths."""
    return slice(rank, count, world_size)


def bucketed_places(lengths: Indices, cut: int, shuffler: np.random.RandomState | None) -> Indices:
    """Return the positions of one window in bucketed order: sorted by length, cut into batches, the batches shuffled.

    Samples that do not fill a batch stay at the end, unmixed: sorted with the rest, they would always be the longest
    samples, and ``uneven="drop"`` would drop the longest ones every time.
    """
    full = len(lengths) // cut * cut
    batches = np.argsort(lengths[:full], kind="stable").reshape(-1, cut)
    if shuffler is not None:
        batches = batches[shuffler.permutation(len(batches))]
    tail = full + np.argsort(lengths[full:], kind="stable")
    return np.concatenate([batches.reshape(-1), tail])


class EpochOrder:
    """The samples' indices in the order in which one epoch visits them."""

    def __init__(self, indices: Indices) -> None:
        self._indices = indices

    def end(self, start: int, batch: int) -> int:
        """Return the end of the batch of ``batch`` samples that begins at ``start``; ``start`` if none are left."""
        return max(start, min(start + batch, len(self._indices)))

    def take(self, start: int, stop: int) -> Indices:
        return self._indices[start:stop]


class BucketedOrder(EpochOrder):
    """An order whose windows are sorted into batches of similar length, each when it is first needed.

    ``cut`` is the global batch for which the buckets are made. It may differ from the current one if an epoch continues
    with another number of ranks than it was begun with.
    """

    def __init__(
        self,
        indices: Indices,
        measure: Callable[[Indices], Indices],
        cut: int,
        windows: int,
        shuffler: Callable[[int], np.random.RandomState | None],
    ) -> None:
        super().__init__(indices)
        self._measure = measure
        self._cut = cut
        self._span = windows * cut
        self._shuffler = shuffler
        self._arranged: set[int] = set()

    def take(self, start: int, stop: int) -> Indices:
        for window in range(start // self._span, (max(start, stop - 1)) // self._span + 1):
            if window not in self._arranged:
                self._arrange(window)
        return super().take(start, stop)

    def _arrange(self, window: int) -> None:
        inside = self._indices[window * self._span : (window + 1) * self._span]
        inside[:] = inside[bucketed_places(self._measure(inside), self._cut, self._shuffler(window))]
        self._arranged.add(window)
