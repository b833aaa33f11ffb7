"""Mapping of ids to buckets and of buckets to servers. It must never change, because files depend on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

U64 = np.uint64


def _mix(key: Any) -> Any:
    """Return a 64-bit hash of an int64; each bit depends on every bit of the key (the finalizer of splitmix64)."""
    h = U64(key)
    h = (h ^ (h >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> U64(27))) * U64(0x94D049BB133111EB)
    return h ^ (h >> U64(31))


#: For use inside other kernels.
mix: Callable[[Any], Any] = numba.njit(inline="always")(_mix)


def mix_all(keys: NDArray[Any]) -> NDArray[np.uint64]:
    """Return ``mix`` of every key without numba: for tests and small numbers of keys."""
    h = np.ascontiguousarray(keys).view(np.uint64)
    with np.errstate(over="ignore"):
        h = (h ^ (h >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> U64(27))) * U64(0x94D049BB133111EB)
    return h ^ (h >> U64(31))


def bucket_of(ids: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """Return the bucket of each id: the high half of its hash, scaled to the number of buckets."""
    return ((mix_all(ids) >> U64(32)) * U64(buckets) >> U64(32)).astype(np.int64)


def owner_of(bucket: int, buckets: int, servers: int) -> int:
    """Return the server that holds a bucket; each server holds one contiguous range of buckets."""
    return bucket * servers // buckets


def owned_by(server: int, buckets: int, servers: int) -> range:
    """Return the buckets that a server holds."""
    first = -(-server * buckets // servers)
    return range(first, -(-(server + 1) * buckets // servers))


def stable_hash(text: str) -> int:
    """Return a 63-bit hash of a text that is the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
