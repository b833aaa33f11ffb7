"""Operations on a batch of ids and rows around a table: deduplicate, merge, partition by server, expand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.hashing import mix
from echelon.parameter_server.protocol.job_spec import BUCKETS
from echelon.parameter_server.table.compiled import kernel, readable
from echelon.parameter_server.table.index import bucket

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


def dedupe(ids: Int64s) -> tuple[Int64s, Int64s]:
    """Return the distinct ids in the order of their first appearance, and the index of each id among them."""
    ids = readable(ids, np.int64)
    unique, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    return unique[: _dedupe(ids, unique, inverse)], inverse


@kernel
def _dedupe(ids: Int64s, unique: Int64s, inverse: Int64s) -> int:
    size = 16
    while size < 2 * len(ids):
        size *= 2
    mask = np.uint64(size - 1)
    places = np.full(size, -1, np.int32)
    found = 0
    for i in range(len(ids)):
        at = mix(ids[i]) & mask
        while places[at] >= 0 and unique[places[at]] != ids[i]:
            at = (at + np.uint64(1)) & mask
        if places[at] < 0:
            places[at] = found
            unique[found] = ids[i]
            found += 1
        inverse[i] = places[at]
    return found


def dedupe_by_server(ids: Int64s, servers: int) -> tuple[Int64s, Int64s]:
    """Return the distinct ids, those of each server together, and the index of each id among them."""
    if servers == 1:
        return dedupe(ids)
    ids = readable(ids, np.int64)
    unique, inverse = np.empty(servers * len(ids), np.int64), np.empty(len(ids), np.int64)
    return unique[: _dedupe_by_server(ids, servers, unique, inverse)], inverse


@kernel
def _dedupe_by_server(ids: Int64s, servers: int, unique: Int64s, inverse: Int64s) -> int:
    """Collect the ids of server s from ``unique[s * len(ids)]`` on, then close the gaps."""
    size, n = 16, len(ids)
    while size < 2 * n:
        size *= 2
    mask = np.uint64(size - 1)
    places = np.full(size, -1, np.int64)
    counts, shift = np.zeros(servers, np.int64), np.zeros(servers, np.int64)
    for i in range(n):
        hashed = mix(ids[i])
        at = hashed & mask
        while places[at] >= 0 and unique[places[at]] != ids[i]:
            at = (at + np.uint64(1)) & mask
        if places[at] < 0:
            owner = bucket(hashed) * servers // BUCKETS
            places[at] = owner * n + counts[owner]
            unique[places[at]] = ids[i]
            counts[owner] += 1
        inverse[i] = places[at]
    start = 0
    for owner in range(servers):
        shift[owner] = start - owner * n
        for i in range(counts[owner]):
            unique[start + i] = unique[owner * n + i]
        start += counts[owner]
    for i in range(n):
        inverse[i] += shift[inverse[i] // n]
    return start


def partition(ids: Int64s, servers: int) -> tuple[Int64s | None, Int64s]:
    """Return the stable order that groups the ids by server, and the number of ids of each server.

    The order is None if the ids are grouped already.
    """
    ids = readable(ids, np.int64)
    order, counts = np.empty(len(ids), np.int64), np.zeros(servers, np.int64)
    return None if _partition(ids, servers, order, counts) else order, counts


@kernel
def _partition(ids: Int64s, servers: int, order: Int64s, counts: Int64s) -> bool:
    owners = np.empty(len(ids), np.int32)
    grouped = True
    for i in range(len(ids)):
        owner = bucket(mix(ids[i])) * servers // BUCKETS
        owners[i] = owner
        counts[owner] += 1
        if i and owner < owners[i - 1]:
            grouped = False
    if grouped:
        return True
    place = np.zeros(servers, np.int64)
    for s in range(1, servers):
        place[s] = place[s - 1] + counts[s - 1]
    for i in range(len(ids)):
        order[place[owners[i]]] = i
        place[owners[i]] += 1
    return False


def expand(rows: Float32s, inverse: Int64s) -> Float32s:
    """Return row ``inverse[i]`` for each i: the rows of a batch, given the rows of its distinct ids."""
    out = np.empty((len(inverse), rows.shape[1]), np.float32)
    _expand(readable(rows, np.float32), readable(inverse, np.int64), out)
    return out


@kernel
def _expand(rows: Float32s, inverse: Int64s, out: Float32s) -> None:
    taken, given, dim = rows.reshape(-1), out.reshape(-1), np.uint64(rows.shape[1])
    for i in range(len(inverse)):
        at, to = np.uint64(inverse[i]) * dim, np.uint64(i) * dim
        for j in range(dim):
            given[to + j] = taken[at + j]


def add_rows(grads: Float32s, inverse: Int64s, u: int) -> Float32s:
    """Return, for each k below ``u``, the sum of grads[i] over all i with ``inverse[i] == k``, in the order of i."""
    out = np.zeros((u, grads.shape[1]), np.float32)
    _add_scaled(readable(grads, np.float32), readable(inverse, np.int64), np.float32(1), out)
    return out


@kernel
def _add_scaled(grads: Float32s, inverse: Int64s, weight: np.float32, out: Float32s) -> None:
    given, total, dim = grads.reshape(-1), out.reshape(-1), np.uint64(grads.shape[1])
    for i in range(len(inverse)):
        at, to = np.uint64(i) * dim, np.uint64(inverse[i]) * dim
        for j in range(dim):
            total[to + j] += weight * given[at + j]


def merge(ids: Sequence[Int64s], grads: Sequence[Float32s], weights: Sequence[float]) -> tuple[Int64s, Float32s]:
    """Return the distinct ids of several pushes, and each id's sum of weight * gradient, in the order of pushes."""
    unique, inverse = dedupe(np.concatenate(ids) if ids else np.empty(0, np.int64))
    out = np.zeros((len(unique), grads[0].shape[1] if grads else 0), np.float32)
    begin = 0
    for part, weight in zip(grads, weights, strict=True):
        end = begin + len(part)
        _add_scaled(readable(part, np.float32), inverse[begin:end], np.float32(weight), out)
        begin = end
    return unique, out
