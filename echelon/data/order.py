"""The global order of an epoch: permutation, shares of ranks, buckets of similar length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import DataError
from echelon.data.seeding import SeedPurpose, chain_each, mix, numpy_stream

Indices = NDArray[np.int64]
#: Number of samples from which the order of an epoch is computed on demand; below it is a shuffled array.
COMPUTED_FROM = 2**24
_ROUNDS = 8  #: rounds of the Feistel network
_AT_ONCE = 2**14  #: indices that are computed at once: 0.2 microseconds each, and 0.3 ms for a single one


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
    """The samples' indices in the order in which one epoch visits them, held as an array."""

    def __init__(self, indices: Indices) -> None:
        self._indices = indices

    def end(self, start: int, batch: int) -> int:
        """Return the end of the batch of ``batch`` samples that begins at ``start``; ``start`` if none are left."""
        return max(start, min(start + batch, len(self._indices)))

    def take(self, start: int, stop: int) -> Indices:
        return self._indices[start:stop]


class SequentialOrder(EpochOrder):
    """The data's own order. No array of indices is made, whatever the size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def end(self, start: int, batch: int) -> int:
        return max(start, min(start + batch, self._size))

    def take(self, start: int, stop: int) -> Indices:
        return np.arange(start, min(stop, self._size), dtype=np.int64)


class ComputedOrder(SequentialOrder):
    """A random order whose indices are computed where they are needed, so that 10 ** 12 samples take no memory.

    It is a Feistel network on pairs (left, right) that number the cells of a nearly square table; a cell beyond the
    last sample is passed through the network again, until it is one of a sample (Black & Rogaway 2002).
    """

    def __init__(self, size: int, *key: int) -> None:
        super().__init__(size)
        self._left = math.isqrt(size - 1) + 1 if size else 1
        self._right = -(-size // self._left)
        self._rounds = [mix(*key, number) for number in range(_ROUNDS)]
        self._begin, self._computed = 0, np.empty(0, dtype=np.int64)

    def take(self, start: int, stop: int) -> Indices:
        stop = min(stop, self._size)
        if start < self._begin or stop > self._begin + len(self._computed):
            self._begin = start
            self._computed = self._permuted(super().take(start, max(stop, start + _AT_ONCE)))
        return self._computed[start - self._begin : stop - self._begin].copy()

    def _permuted(self, places: Indices) -> Indices:
        result = self._pass(places)
        while len(outside := np.flatnonzero(result >= self._size)):
            result[outside] = self._pass(result[outside])
        return result

    def _pass(self, cells: Indices) -> Indices:
        left, right = np.divmod(cells, self._right)
        for number, key in enumerate(self._rounds):
            if number % 2:
                right = (right + (chain_each(key, left) % np.uint64(self._right)).astype(np.int64)) % self._right
            else:
                left = (left + (chain_each(key, right) % np.uint64(self._left)).astype(np.int64)) % self._left
        result: Indices = left * self._right + right
        return result


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


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> EpochOrder:
    """Return the order of an epoch, which depends on ``seed`` and ``epoch`` only."""
    if not shuffle:
        return SequentialOrder(size)
    if size >= COMPUTED_FROM:
        return ComputedOrder(size, seed, SeedPurpose.ORDER, epoch)
    return EpochOrder(numpy_stream(seed, SeedPurpose.ORDER, epoch).permutation(size).astype(np.int64, copy=False))
