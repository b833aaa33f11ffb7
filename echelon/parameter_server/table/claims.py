"""Assignment of slots to ids: find the slots of pushed ids, count pushes until admission, allocate and free slots.

An id that waits for admission has this value in the index: sign bit | changed | number of pushes (30 bits) | time of
the last push (32 bits).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.hashing import mix
from echelon.parameter_server.table.arena import AT, END, FREE, HEAD, NEXT, NONE, ROWS, SLOTS, STUCK, TAKEN
from echelon.parameter_server.table.compiled import inner, kernel, load, store, store32
from echelon.parameter_server.table.index import (
    AHEAD,
    EMPTY,
    LIMIT,
    SIZE,
    USED,
    Int64s,
    bucket,
    close_gap,
    fetch_ahead,
    region,
    seek,
)
from echelon.parameter_server.table.records import COUNT, META, NEW, NOW, SEED, WORDS, Words

#: Indices of the admission array: the pushes that are needed, and the probability of admission from that push on.
AFTER, CHANCE = 0, 1

#: Rows of the smallest extent, and words of the largest: it has many pages, and little of it stays unused.
_SMALLEST, _LARGEST = 4, 1 << 15

_SIGN = np.int64(np.iinfo(np.int64).min)
_CHANGED = np.int64(1 << 62)
_SEEN = np.int64(0xFFFFFFFF)
_SALT = np.uint64(0xD1B54A32D192ED03)


def waiting(counts: NDArray[np.uint32], seen: NDArray[np.uint32], changed: NDArray[np.bool_]) -> Int64s:
    """Return the index values of ids that wait for admission."""
    flags: Int64s = np.where(changed, _SIGN + _CHANGED, _SIGN)
    return flags + (counts.astype(np.int64) << 32) + seen.astype(np.int64)


def waited(values: Int64s) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.bool_]]:
    """Return the counts, last-seen times and changed flags in values that ``waiting`` made."""
    counts, seen = (values >> 32) & COUNT, values & _SEEN
    return counts.astype(np.uint32), seen.astype(np.uint32), (values & _CHANGED) != 0


@inner
def admits(seed: int, key: int, count: int, after: float, chance: float) -> bool:
    """Return True if an id is admitted at its ``count``-th push; the draw depends on (seed, id, count) alone."""
    if count < after:
        return False
    if chance >= 1.0:
        return True
    drawn = mix(mix(mix(np.uint64(seed) ^ _SALT) ^ np.uint64(key)) + np.uint64(count) * _SALT)
    return bool(np.float64(drawn >> np.uint64(11)) * 2.0**-53 < chance)


@inner
def pushes(value: int) -> int:
    """Return the number of earlier pushes of an id without a row."""
    return 0 if value == EMPTY else (value >> 32) & COUNT


@inner
def extent_of(extents: int, which: int) -> int:
    """Return the address of a bucket's extent; 0 if the table has none."""
    return extents + 32 * which if extents else 0


@inner
def take_slot(counters: int, extent: int, memory: int, words: int) -> int:
    """Allocate a free slot and return it; NONE if there is none."""
    free = extent + 8 * HEAD if extent else counters + 8 * FREE
    slot = load(free)
    if slot != NONE:
        store(free, load(memory + slot * words * 4))
    elif extent:
        slot = take_from_extent(counters, extent, words)
    elif load(counters + 8 * NEXT) < load(counters + 8 * SLOTS):
        slot = load(counters + 8 * NEXT)
        store(counters + 8 * NEXT, slot + 1)
    if slot != NONE:
        store(counters + 8 * ROWS, load(counters + 8 * ROWS) + 1)
    return slot


@inner
def take_from_extent(counters: int, extent: int, words: int) -> int:
    """Return the next slot of a bucket's extent, or of a new one that is a quarter of the bucket."""
    slot = load(extent + 8 * AT)
    if slot == load(extent + 8 * END):
        taken = load(extent + 8 * TAKEN)
        size = min(max(taken // 4, _SMALLEST), max(_LARGEST // words, 1))
        slot = load(counters + 8 * NEXT)
        if slot + size > load(counters + 8 * SLOTS):
            return NONE
        store(counters + 8 * NEXT, slot + size)
        store(extent + 8 * END, slot + size)
        store(extent + 8 * TAKEN, taken + size)
    store(extent + 8 * AT, slot + 1)
    return slot


@inner
def free_slot(slot: int, counters: int, extent: int, memory: int, words: int) -> None:
    free = extent + 8 * HEAD if extent else counters + 8 * FREE
    store(memory + slot * words * 4, load(free))
    store(free, slot)
    store(counters + 8 * ROWS, load(counters + 8 * ROWS) - 1)


@kernel
def claim(
    ids: Int64s, begin: int, regions: Int64s, counters: Int64s, extents: Int64s, words32: Words, shape: Int64s,
    admission: NDArray[np.float64], slots: Int64s,
) -> int:  # fmt: skip
    """Find the slots of ``ids[begin:]``; an id that this push admits gets a slot, marked NEW, with its previous count.

    The result is the position of the first id for which a bucket or the arena must grow, else the number of ids.
    """
    words, seed, now, n = shape[WORDS], shape[SEED], shape[NOW], len(ids)
    memory, described, counted = words32.ctypes.data, regions.ctypes.data, counters.ctypes.data
    grouped = extents.ctypes.data if extents.shape[0] else 0
    for i in range(begin, n):
        if i + AHEAD < n:
            fetch_ahead(described, ids[i + AHEAD])
        hashed = mix(ids[i])
        which = bucket(hashed)
        about = region(described, which)
        if load(about + 8 * SIZE) == 0:
            counters[STUCK] = which
            return i
        at = seek(about, hashed, ids[i])
        value = load(at + 8)
        slots[i] = value
        if value < 0:
            if value == EMPTY and load(about + 8 * USED) >= load(about + 8 * LIMIT):
                counters[STUCK] = which
                return i
            count = pushes(value) + 1
            made = _SIGN + _CHANGED + (min(count, COUNT - 1) << 32) + now
            slots[i] = EMPTY
            if admits(seed, ids[i], count, admission[AFTER], admission[CHANCE]):
                made = take_slot(counted, extent_of(grouped, which), memory, words)
                if made == NONE:
                    counters[STUCK] = which
                    return i
                store32(memory + (made + 1) * words * 4 - META * 4, np.uint32(count - 1))
                slots[i] = made | NEW
            if value == EMPTY:
                store(at, ids[i])
                store(about + 8 * USED, load(about + 8 * USED) + 1)
            store(at + 8, made)
    return n


@kernel
def newcomers(ids: Int64s, regions: Int64s, seed: int, admission: NDArray[np.float64]) -> int:
    """Return the number of ``ids`` for which a push would create a row."""
    made, n, described = 0, len(ids), regions.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            fetch_ahead(described, ids[i + AHEAD])
        hashed = mix(ids[i])
        about = region(described, bucket(hashed))
        if load(about + 8 * SIZE):
            value = load(seek(about, hashed, ids[i]) + 8)
            if value < 0 and admits(seed, ids[i], pushes(value) + 1, admission[AFTER], admission[CHANCE]):
                made += 1
    return made


@kernel
def release(
    ids: Int64s, regions: Int64s, counters: Int64s, extents: Int64s, words32: Words, words: int,
    present: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Remove ids, including ids that wait for admission; ``present[i]`` becomes True if ids[i] was present."""
    n, memory, described, counted = len(ids), words32.ctypes.data, regions.ctypes.data, counters.ctypes.data
    grouped = extents.ctypes.data if extents.shape[0] else 0
    for i in range(n):
        if i + AHEAD < n:
            fetch_ahead(described, ids[i + AHEAD])
        present[i] = False
        hashed = mix(ids[i])
        which = bucket(hashed)
        about = region(described, which)
        if load(about + 8 * SIZE):
            at = seek(about, hashed, ids[i])
            value = load(at + 8)
            if value != EMPTY:
                present[i] = True
                if value >= 0:
                    free_slot(value, counted, extent_of(grouped, which), memory, words)
                close_gap(about, at)


@kernel
def put_values(ids: Int64s, values: Int64s, regions: Int64s) -> None:
    """Set the values of ids that wait for admission, inserting new ones; their buckets must have room."""
    described = regions.ctypes.data
    for i in range(len(ids)):
        hashed = mix(ids[i])
        about = region(described, bucket(hashed))
        at = seek(about, hashed, ids[i])
        if load(at + 8) == EMPTY:
            store(at, ids[i])
            store(about + 8 * USED, load(about + 8 * USED) + 1)
        store(at + 8, values[i])
