"""Which bucket an id lies in, and which server a bucket: the same everywhere and for ever, since files depend on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

U64 = np.uint64


def _mix(key: Any) -> Any:
    """A 64-bit hash of an int64, every bit of which depends on every bit of the key (the finalizer of splitmix64)."""
    h = U64(key)
    h = (h ^ (h >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> U64(27))) * U64(0x94D049BB133111EB)
    return h ^ (h >> U64(31))


#: For use inside other kernels.
mix: Callable[[Any], Any] = numba.njit(inline="always")(_mix)


def mix_all(keys: NDArray[Any]) -> NDArray[np.uint64]:
    """``mix`` of an array, without a compiler: for tests and for small numbers of keys."""
    h = np.ascontiguousarray(keys).view(np.uint64)
    with np.errstate(over="ignore"):
        h = (h ^ (h >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> U64(27))) * U64(0x94D049BB133111EB)
    return h ^ (h >> U64(31))


def bucket_of(ids: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """The bucket of each id: the high half of its hash, scaled to the number of buckets."""
    return ((mix_all(ids) >> U64(32)) * U64(buckets) >> U64(32)).astype(np.int64)


def owner_of(bucket: int, buckets: int, servers: int) -> int:
    """The server that holds a bucket: each holds one run of neighbours."""
    return bucket * servers // buckets


def owned_by(server: int, buckets: int, servers: int) -> range:
    """The buckets that a server holds."""
    first = -(-server * buckets // servers)
    return range(first, -(-(server + 1) * buckets // servers))


def stable_hash(text: str) -> int:
    """63 bits of a text, the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
