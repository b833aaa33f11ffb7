"""Selection of the rows to evict from a full table: those with the smallest (score, hash of the id).

The score is the time of a row's last push (LRU) or the number of its pushes (LFU). The hash breaks ties, so that the
choice depends neither on the order of insertion nor on the slots. Four counting passes find the limit without a list.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.hashing import mix
from echelon.parameter_server.table.compiled import inner, kernel, load, load32, prefetch
from echelon.parameter_server.table.index import BASE, PAIR, SIZE, Int64s
from echelon.parameter_server.table.records import COUNT, META, PINNED, Words

#: Index of the meta word that is the score.
RAREST, OLDEST = 0, 1

_PINNED, _COUNT = np.uint32(PINNED), np.uint32(COUNT)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_DIGIT = 16
_AHEAD = 8 * PAIR


@inner
def rank(slot: int, key: int, memory: int, words: int, score: int) -> Any:
    """Return the rank of a row in the order of eviction; 0 for a pinned row."""
    at = memory + ((slot + 1) * words - META) * 4
    if load32(at) & _PINNED:
        return np.uint64(0)
    seen = load32(at + 4) if score == OLDEST else load32(at) & _COUNT
    return ((np.uint64(seen) << _HALF) | (mix(key) & _LOW)) + np.uint64(1)


@inner
def fetch_ahead(at: int, end: int, memory: int, words: int) -> None:
    if at + _AHEAD < end:
        prefetch(memory + ((load(at + _AHEAD + 8) + 1) * words - META) * 4)


@kernel
def count_ranks(
    regions: Int64s, words32: Words, words: int, score: int, settled: int, known: int, counts: Int64s
) -> None:
    """Count the values of the next 16 bits of all ranks whose first ``settled`` bits are ``known``."""
    memory = words32.ctypes.data
    for which in range(regions.shape[0]):
        end = regions[which, BASE] + regions[which, SIZE] * PAIR
        for at in range(regions[which, BASE], end, PAIR):
            fetch_ahead(at, end, memory, words)
            if load(at + 8) >= 0:
                place = rank(load(at + 8), load(at), memory, words, score)
                if place and (settled == 0 or place >> np.uint64(64 - settled) == np.uint64(known)):
                    counts[np.int64((place >> np.uint64(48 - settled)) & np.uint64(0xFFFF))] += 1


@kernel
def lowest(regions: Int64s, words32: Words, words: int, score: int, limit: np.uint64, out: Int64s) -> int:
    """Write the ids of rows with a rank up to ``limit`` to ``out``, as many as fit, and return their number."""
    n, memory = 0, words32.ctypes.data
    for which in range(regions.shape[0]):
        end = regions[which, BASE] + regions[which, SIZE] * PAIR
        for at in range(regions[which, BASE], end, PAIR):
            fetch_ahead(at, end, memory, words)
            if load(at + 8) >= 0:
                place = rank(load(at + 8), load(at), memory, words, score)
                if place and place <= limit and n < out.shape[0]:
                    out[n] = load(at)
                    n += 1
    return n


def select_evictions(regions: Int64s, words32: Words, words: int, score: int, number: int) -> NDArray[np.int64]:
    """Return the ids of the ``number`` rows to evict; fewer if too many rows are pinned."""
    known, left = 0, number
    for settled in range(0, 64, _DIGIT):
        counts = np.zeros(1 << _DIGIT, np.int64)
        count_ranks(regions, words32, words, score, settled, known, counts)
        reached = np.cumsum(counts)
        digit = min(int(np.searchsorted(reached, left)), len(counts) - 1)
        left -= int(reached[digit] - counts[digit])
        known = known << _DIGIT | digit
    out = np.empty(number, np.int64)
    return out[: lowest(regions, words32, words, score, np.uint64(known), out)]
