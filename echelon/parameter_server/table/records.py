"""Kernels that initialize, read, mark and copy the records of given slots.

A record is weights | state | shows and clicks, if they are counted | count and flags | last seen. ``slots`` come from
the index: a negative slot means that the id has no row; NEW marks a row that this push created and whose record is not
initialized yet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.table.compiled import inner, kernel, load32, prefetch, store32
from echelon.parameter_server.table.initial import begin

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Words = NDArray[np.uint32]

#: Indices of the description of a record and of a push.
DIM, STATE, WORDS, SEED, NOW = 0, 1, 2, 3, 4
#: Words of the count and the last-seen time, at the end of a record.
META = 2
#: Marks the slot of a row that this push created.
NEW = 1 << 62
SLOT = NEW - 1
#: Flags in the count word: changed since the last snapshot; not admitted yet (in files only); not to be evicted.
CHANGED, WAITING, PINNED = 1 << 31, 1 << 30, 1 << 29
COUNT = PINNED - 1
#: Distance, in rows, between the prefetch of a record's cache lines and their use.
AHEAD = 12

_LINE, _FETCHED = 64, 1024  # bytes of a cache line, and bytes of a record that are prefetched at most
_CHANGED, _COUNT, _ONE = np.uint32(CHANGED), np.uint32(COUNT), np.uint32(1)


@inner
def fetch(memory: int, slot: int, words: int, wanted: int) -> None:
    """Prefetch the first ``wanted`` words of a record; the processor itself prefetches the rest of a long record."""
    if slot >= 0:
        at = memory + (slot & SLOT) * words * 4
        for line in range(at & -_LINE, at + min(wanted * 4, _FETCHED), _LINE):
            prefetch(line)


@inner
def mark(memory: int, slot: int, words: int, now: int) -> None:
    """Mark a row as pushed at ``now``: increment its count and set its changed flag."""
    at = memory + ((slot & SLOT) + 1) * words * 4 - META * 4
    store32(at, min((load32(at) & _COUNT) + _ONE, _COUNT) | _CHANGED)
    store32(at + 4, np.uint32(now))


@kernel
def begin_new(ids: Int64s, slots: Int64s, floats: Float32s, shape: Int64s, first: Float64s) -> None:
    """Write the initial weights and state of the rows that this push created."""
    memory, words = floats.ctypes.data, shape[WORDS]
    for i in range(len(slots)):
        if slots[i] >= 0 and slots[i] & NEW:
            at = memory + (slots[i] & SLOT) * words * 4
            begin(at, shape[DIM], shape[STATE], ids[i], shape[SEED], first.ctypes.data)


@kernel
def gather(
    ids: Int64s, slots: Int64s, floats: Float32s, shape: Int64s, first: Float64s, width: int, out: Float32s
) -> None:
    """Write the first ``width`` floats of each record (weights, or weights and state) to ``out``.

    An id without a row reads its initial values.
    """
    memory, words, n = floats.ctypes.data, shape[WORDS], len(slots)
    fresh = np.empty(shape[DIM] + shape[STATE], np.float32)
    flat, size = out.reshape(-1), np.uint64(width)
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, width)
        to = np.uint64(i) * size
        if slots[i] >= 0:
            at = np.uint64(slots[i]) * np.uint64(words)
            for j in range(size):
                flat[to + j] = floats[at + j]
        else:
            begin(fresh.ctypes.data, shape[DIM], shape[STATE], ids[i], shape[SEED], first.ctypes.data)
            for j in range(size):
                flat[to + j] = fresh[j]


@kernel
def add(slots: Int64s, deltas: Float32s, floats: Float32s, shape: Int64s) -> None:
    """Add the deltas to weights and state, and mark the rows as pushed."""
    memory, words, now, n = floats.ctypes.data, shape[WORDS], shape[NOW], len(slots)
    flat, width = deltas.reshape(-1), np.uint64(shape[DIM] + shape[STATE])
    for i in range(n):
        if i + AHEAD < n:
            fetch(memory, slots[i + AHEAD], words, words)
        if slots[i] >= 0:
            mark(memory, slots[i], words, now)
            at, d = np.uint64((slots[i] & SLOT) * words), np.uint64(i) * width
            for j in range(width):
                floats[at + j] += flat[d + j]


@kernel
def copy_out(slots: Int64s, words32: Words, words: int, kept: Words) -> None:
    """Write each record into its row of ``kept``."""
    flat, size = kept.reshape(-1), np.uint64(words)
    for i in range(len(slots)):
        if slots[i] >= 0:
            at, to = np.uint64(slots[i]) * size, np.uint64(i) * size
            for j in range(size):
                flat[to + j] = words32[at + j]


@kernel
def copy_in(slots: Int64s, words32: Words, words: int, kept: Words) -> None:
    """Write each row of ``kept`` into its record."""
    flat, size = kept.reshape(-1), np.uint64(words)
    for i in range(len(slots)):
        at, to = np.uint64(slots[i] & SLOT) * size, np.uint64(i) * size
        for j in range(size):
            words32[at + j] = flat[to + j]


@kernel
def metas(slots: Int64s, words32: Words, words: int, which: int, out: Words) -> None:
    """Write one meta word of each record to ``out``: 0 is the count and flags, 1 the last-seen time."""
    for i in range(len(slots)):
        if slots[i] >= 0:
            out[i] = words32[np.uint64((slots[i] + 1) * words - META + which)]


@kernel
def set_flags(slots: Int64s, words32: Words, words: int, keep: int, put: int) -> None:
    """Clear all bits of each record's count word except those in ``keep``, then set the bits in ``put``."""
    for i in range(len(slots)):
        if slots[i] >= 0:
            at = np.uint64((slots[i] + 1) * words - META)
            words32[at] = (words32[at] & np.uint32(keep)) | np.uint32(put)
