"""The index from ids to records: each bucket is an open-addressing hash region of [key, value] pairs that grows alone.

A value of 0 or more is the slot of a record, EMPTY marks a free place, and any other negative value belongs to an id
that was pushed but not yet admitted (see ``claims``). So every int64 is a legal key, and admission needs no structure
of its own. The bucket comes from the high half of the hash, the place in the region from the low half by
multiplication, so that a region can have any size: it grows by 1.4 to 1.6 at a load of 0.8, which keeps the memory per
id low.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.hashing import mix
from echelon.parameter_server.protocol.job_spec import BUCKETS
from echelon.parameter_server.table.compiled import inner, kernel, load, prefetch, store

Int64s = NDArray[np.int64]

EMPTY = -1
#: Columns of the description of a region: address, places, places in use, places in use at which it grows.
BASE, SIZE, USED, LIMIT = 0, 1, 2, 3
PAIR = 16  # bytes of a key and its value

#: Distance, in ids, between the prefetch of a cache line and its use.
AHEAD = 24
_SMALLEST = 8
#: Regions below the first size grow by 4, regions below the second by 1.6, larger ones by 1.4.
_YOUNG, _GROWN_UP = 16, 4096
#: A region of at least this many bytes has its own memory mapping, whose pages go back to the system when it grows.
_MAPPED = 1 << 16

_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@inner
def bucket(hashed: Any) -> Any:
    """Return the bucket of a hashed key, like ``hashing.bucket_of``."""
    return np.int64(((hashed >> _HALF) * np.uint64(BUCKETS)) >> _HALF)


@inner
def region(regions: int, which: int) -> int:
    """Return the address of the description of a bucket's region."""
    return regions + which * 32


@inner
def home(about: int, hashed: Any) -> Any:
    """Return the address at which the search for a key begins."""
    place = ((hashed & _LOW) * np.uint64(load(about + 8 * SIZE))) >> _HALF
    return load(about + 8 * BASE) + np.int64(place) * PAIR


@inner
def seek(about: int, hashed: Any, key: int) -> Any:
    """Return the address of the pair of ``key``, or of the free place where the pair would be."""
    at = home(about, hashed)
    first = load(about + 8 * BASE)
    end = first + load(about + 8 * SIZE) * PAIR
    while load(at + 8) != EMPTY and load(at) != key:
        at += PAIR
        if at == end:
            at = first
    return at


@inner
def fetch_ahead(regions: int, key: int) -> None:
    hashed = mix(key)
    at = home(region(regions, bucket(hashed)), hashed)
    prefetch(at)
    prefetch(at + 32)  # a search reads three pairs on average, often into the next cache line


@kernel
def find(ids: Int64s, regions: Int64s, slots: Int64s) -> int:
    """Write the slot of each id to ``slots``, negative for an id without a row.

    The result is the number of ids that belong to buckets of other servers.
    """
    foreign, n, described = 0, len(ids), regions.ctypes.data
    for i in range(n):
        if i + AHEAD < n:
            fetch_ahead(described, ids[i + AHEAD])
        hashed = mix(ids[i])
        about = region(described, bucket(hashed))
        if load(about + 8 * SIZE) == 0:
            foreign += 1
            slots[i] = EMPTY
        else:
            slots[i] = load(seek(about, hashed, ids[i]) + 8)
    return foreign


@kernel
def rehash(regions: Int64s, which: int, base: int, size: int) -> None:
    """Move a bucket's pairs from its region to the empty one at ``base``, which becomes its region."""
    about = region(regions.ctypes.data, which)
    first, end = load(about + 8 * BASE), load(about + 8 * BASE) + load(about + 8 * SIZE) * PAIR
    store(about + 8 * BASE, base)
    store(about + 8 * SIZE, size)
    for at in range(first, end, PAIR):
        value = load(at + 8)
        if value != EMPTY:
            key = load(at)
            to = seek(about, mix(key), key)
            store(to, key)
            store(to + 8, value)


@inner
def close_gap(about: int, gap: int) -> None:
    """Free the place at address ``gap``: later pairs of its cluster move back, so that searches still find them."""
    first, size = load(about + 8 * BASE), load(about + 8 * SIZE) * PAIR
    at = gap
    while True:
        at += PAIR
        if at == first + size:
            at = first
        if load(at + 8) == EMPTY:
            break
        # the pair may move back to the gap unless it would then lie before the place where its search begins
        if (at - home(about, mix(load(at)))) % size >= (at - gap) % size:
            store(gap, load(at))
            store(gap + 8, load(at + 8))
            gap = at
    store(gap + 8, EMPTY)
    store(about + 8 * USED, load(about + 8 * USED) - 1)


@kernel
def listed(regions: Int64s, which: int, keys: Int64s, values: Int64s) -> None:
    """Write all pairs of a bucket to ``keys`` and ``values``, in the order of the region."""
    n, base = 0, regions[which, BASE]
    for at in range(base, base + regions[which, SIZE] * PAIR, PAIR):
        if load(at + 8) != EMPTY:
            keys[n] = load(at)
            values[n] = load(at + 8)
            n += 1


class BucketIndex:
    """The regions of the buckets of this server; ``regions`` describes them to kernels."""

    def __init__(self, buckets: range) -> None:
        self.regions = np.zeros((BUCKETS, 4), np.int64)
        together = _free_pairs(_SMALLEST * len(buckets)).reshape(len(buckets), 2 * _SMALLEST)
        self._memory: dict[int, Int64s] = dict(zip(buckets, together, strict=True))
        self.regions[buckets.start : buckets.stop, SIZE] = _SMALLEST
        self.regions[buckets.start : buckets.stop, LIMIT] = _limit(_SMALLEST)
        bases = together.ctypes.data + np.arange(len(buckets)) * together.strides[0]
        self.regions[buckets.start : buckets.stop, BASE] = bases

    @property
    def nbytes(self) -> int:
        return self.regions.nbytes + sum(part.nbytes for part in self._memory.values())

    def clear(self, which: int) -> None:
        memory = _free_pairs(_SMALLEST)
        self._memory[which] = memory
        self.regions[which] = memory.ctypes.data, _SMALLEST, 0, _limit(_SMALLEST)

    def grow(self, which: int) -> None:
        self._resize(which, grown(int(self.regions[which, SIZE])))

    def reserve(self, which: int, used: int) -> None:
        """Make room for ``used`` pairs in one step."""
        if used > self.regions[which, LIMIT]:
            self._resize(which, used * 4 // 3 + 2)

    def shrink(self, which: int) -> None:
        """Shrink a region that is less than a third full, after many pairs were removed."""
        used, size = int(self.regions[which, USED]), int(self.regions[which, SIZE])
        if size > _SMALLEST and used < size // 3:
            self._resize(which, max(_SMALLEST, used * 4 // 3 + 2))

    def _resize(self, which: int, size: int) -> None:
        memory = _free_pairs(size)
        rehash(self.regions, which, memory.ctypes.data, size)
        self.regions[which, LIMIT] = _limit(size)
        self._memory[which] = memory

    def pairs(self, which: int) -> tuple[Int64s, Int64s]:
        """Return the keys and values of a bucket, sorted by key, so that the order of insertion does not matter."""
        used = int(self.regions[which, USED])
        keys, values = np.empty(used, np.int64), np.empty(used, np.int64)
        listed(self.regions, which, keys, values)
        order = np.argsort(keys)
        return keys[order], values[order]


def grown(size: int) -> int:
    """Return the next size of a full region. Small regions grow in large steps, large ones slowly to save memory."""
    if size < _YOUNG:
        return 4 * size
    return size * 8 // 5 if size < _GROWN_UP else size * 7 // 5


def _free_pairs(size: int) -> Int64s:
    nbytes = size * PAIR
    memory = np.empty(2 * size, np.int64) if nbytes < _MAPPED else np.frombuffer(mmap.mmap(-1, nbytes), np.int64)
    memory[1::2] = EMPTY
    return memory


def _limit(size: int) -> int:
    return size * 4 // 5
