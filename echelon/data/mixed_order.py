"""The order in which corpora are mixed by weight: computed where it is needed, from seed, epoch and position alone.

Sample m of corpus c has its place at time (m + 1) / w_c, so that after n samples each corpus has given n * w_c of them,
within one. Time is cut into blocks of ``BLOCK`` samples; how many samples each corpus has given before a block is one
multiplication, so that any position of an epoch is found without the ones before it. With shuffling, each block is
shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from echelon.data.order import EpochOrder, Indices, SequentialOrder
from echelon.data.seeding import SeedPurpose, numpy_stream

#: Samples of a block, among which the order of the corpora is random.
BLOCK = 1024
#: Weights are whole numbers of this sum, so that counts are exact at any position.
UNIT = 2**40

#: Returns the order of a corpus in one pass over it, from the corpus and the number of the pass.
PassOrder = Callable[[int, int], EpochOrder]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to the weights, whose sum is ``UNIT``; each is 1 at least."""
    total = float(sum(weights))
    result = [max(1, int(weight / total * UNIT)) for weight in weights]
    result[int(np.argmax(result))] += UNIT - sum(result)
    return result


class MixingOrder:
    """The corpora in the order in which they give samples, without shuffling."""

    def __init__(self, weights: Sequence[int]) -> None:
        """weights: from ``whole_weights``"""
        self.weights = list(weights)

    def before(self, block: int) -> list[int]:
        """Return how many samples each corpus has given before a block."""
        return [weight * block * BLOCK // UNIT for weight in self.weights]

    def start(self, block: int) -> int:
        """Return the position of the first sample of a block."""
        return sum(self.before(block))

    def block_of(self, position: int) -> int:
        """Return the block of a position. Blocks begin up to one position a corpus early, never late."""
        block = position // BLOCK
        while self.start(block + 1) <= position:
            block += 1
        return block

    def corpora(self, block: int) -> Indices:
        """Return the corpus of each sample of a block."""
        first, last = self.before(block), self.before(block + 1)
        counts = np.subtract(last, first)
        corpora = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([np.arange(begin, end) for begin, end in zip(first, last, strict=True)])
        times = (numbers + 1) / np.array(self.weights, np.float64)[corpora]
        result: Indices = corpora[np.argsort(times, kind="stable")]
        return result

    def place_of(self, corpus: int, number: int) -> int:
        """Return the position at which a corpus gives its sample ``number``, counted from 0."""
        block = -(-(number + 1) * UNIT // self.weights[corpus]) - 1
        block //= BLOCK
        inside = np.flatnonzero(self.corpora(block) == corpus)[number - self.before(block)[corpus]]
        return self.start(block) + int(inside)

    def counts(self, position: int) -> list[int]:
        """Return how many samples each corpus has given before a position."""
        block = self.block_of(position)
        inside = self.corpora(block)[: position - self.start(block)]
        return np.add(self.before(block), np.bincount(inside, minlength=len(self.weights))).tolist()  # type: ignore[no-any-return]


class MixedEpoch(SequentialOrder):
    """One epoch of a mixture: indices into all corpora one after another.

    Each corpus goes on where it was left in the epoch before, so that none of its samples comes a second time before
    all of them have come once.

    size:  samples of an epoch
    sizes: samples of each corpus
    seed:  None without shuffling
    """

    def __init__(
        self,
        mixing: MixingOrder,
        size: int,
        sizes: Sequence[int],
        *,
        epoch: int,
        seed: int | None,
        pass_order: PassOrder,
    ) -> None:
        super().__init__(size)
        self._mixing, self._seed, self._epoch = mixing, seed, epoch
        self._sizes, self._pass_order = sizes, pass_order
        self._offsets = np.cumsum([0, *sizes])
        self._given = [epoch * count for count in mixing.counts(size)]  # in earlier epochs
        self._passes: dict[int, tuple[int, EpochOrder]] = {}
        self._block: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def take(self, start: int, stop: int) -> Indices:
        stop, parts = min(stop, self._size), [np.empty(0, np.int64)]
        while start < stop:
            block = self._mixing.block_of(start)
            begin = self._mixing.start(block)
            parts.append(self._of_block(block)[start - begin : stop - begin])
            start += len(parts[-1])
        return np.concatenate(parts)

    def counts(self, position: int) -> list[int]:
        """Return how many samples each corpus has given before a position of this epoch, earlier epochs included."""
        position = min(position, self._size)
        block = self._mixing.block_of(position)
        inside = self._corpora(block)[: position - self._mixing.start(block)]
        counts = np.bincount(inside, minlength=len(self._sizes))
        earlier = zip(self._given, self._mixing.before(block), strict=True)
        return [sum(given) + count for given, count in zip(earlier, counts.tolist(), strict=True)]

    def _corpora(self, block: int) -> Indices:
        """Return the corpus of each sample of a block in this epoch's order; the last block ends with the epoch."""
        corpora = self._mixing.corpora(block)[: self._size - self._mixing.start(block)]
        if self._seed is None:
            return corpora
        return corpora[numpy_stream(self._seed, SeedPurpose.MIXTURE, self._epoch, block).permutation(len(corpora))]

    def _of_block(self, block: int) -> Indices:
        """Return the indices of a block; those of the last one that was asked for are kept."""
        if self._block[0] != block:
            corpora, before = self._corpora(block), self._mixing.before(block)
            result = np.empty(len(corpora), np.int64)
            for corpus in np.unique(corpora).tolist():
                inside = corpora == corpus
                first = self._given[corpus] + before[corpus]
                rows = self._rows(corpus, first, first + int(inside.sum()))
                result[inside] = rows + self._offsets[corpus]
            self._block = block, result
        return self._block[1]

    def _rows(self, corpus: int, first: int, last: int) -> Indices:
        """Return the rows of a corpus that its samples ``first`` to ``last`` are, over all passes."""
        size, parts = self._sizes[corpus], []
        while first < last:
            number, inside = divmod(first, size)
            found = self._order(corpus, number).take(inside, min(inside + last - first, size))
            parts.append(found)
            first += len(found)
        return np.concatenate(parts)

    def _order(self, corpus: int, number: int) -> EpochOrder:
        kept = self._passes.get(corpus)
        if kept is None or kept[0] != number:
            kept = self._passes[corpus] = number, self._pass_order(corpus, number)
        return kept[1]
