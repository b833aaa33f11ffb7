"""A sparse table: rows for any int64 id, created by pushes, updated by a rule, removed by eviction or expiry.

A pull changes nothing: an id without a row reads its initial value. One mutex guards the table; kernels run without the
GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import EchelonError, MismatchError, UsageError
from echelon.parameter_server.protocol.hashing import bucket_of
from echelon.parameter_server.protocol.job_spec import BUCKETS, EVENTS, TableSpec
from echelon.parameter_server.table import claims, records
from echelon.parameter_server.table.arena import ROWS, STUCK, Arena
from echelon.parameter_server.table.compiled import readable
from echelon.parameter_server.table.eviction import OLDEST, RAREST, select_evictions
from echelon.parameter_server.table.fullness import check_evicted, rows_to_evict
from echelon.parameter_server.table.index import EMPTY, USED, BucketIndex, Int64s, find
from echelon.parameter_server.table.record_format import record_format
from echelon.parameter_server.table.records import (
    CHANGED,
    COUNT,
    DIM,
    NEW,
    NOW,
    PINNED,
    SLOT,
    STATE,
    WAITING,
    WORDS,
)
from echelon.parameter_server.table.show_click import count_events, decay_powers, read_events, scores_of
from echelon.parameter_server.table.updates import settings_of, update_of

Float32s = NDArray[np.float32]

_ALL = 0xFFFFFFFF
_EVERYONE = np.array([1.0, 1.0])
_NO_IDS = np.empty(0, np.int64)


class BucketRows(NamedTuple):
    """Rows of one bucket in the form of files: record i belongs to ids[i]; ``removed`` are ids that were removed.

    An id that waits for admission has a record too, flagged WAITING, whose weights are undefined.
    """

    ids: Int64s
    records: NDArray[np.uint32]
    removed: Int64s = _NO_IDS


class Table:
    """The rows of ``spec`` that lie in ``buckets``.

    directory:  directory of the memory-mapped file of a table with ``spec.disk``
    capacity:   most rows in this server's part of the table; default ``spec.capacity``
    step:       number of updates so far; this attribute and ``passes`` are set when a table is restored
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        buckets: range = range(BUCKETS),
        directory: Path | None = None,
        capacity: int | None = None,
    ) -> None:
        if spec.disk and directory is None:
            raise UsageError(f"table '{spec.name}': disk=True needs a directory for its file; give the server one")
        if spec.expire_passes is not None and spec.expire_seconds is not None:
            raise UsageError(f"table '{spec.name}': rows expire by passes or by seconds, not both; set one of the two")
        self.spec, self.buckets = spec, buckets
        self._format = record_format(spec)
        self._shape = self._format.shape
        self.dim, self.state, self.words = (int(self._shape[at]) for at in (DIM, STATE, WORDS))
        self.capacity = capacity if capacity is not None else spec.capacity
        self.step = 0
        self.passes = 0
        self._lock = threading.Lock()
        self._index = BucketIndex(buckets)
        self._arena = Arena(self.words, directory if spec.disk else None)
        self._admission = np.array([spec.admit_after, spec.admit_probability], np.float64)
        self._removed: dict[int, list[Int64s]] = {}  #: since the last snapshot, for buckets that have one
        self._update = update_of(spec.rule)

    def __len__(self) -> int:
        return int(self._arena.counters[ROWS])

    def memory(self) -> int:
        """Return the bytes of the index and of the records."""
        return self.index_bytes() + self._arena.nbytes

    def index_bytes(self) -> int:
        """Return the bytes of the index, which is in memory even if the records are on disk."""
        return self._index.nbytes

    # reading

    def pull(self, ids: Int64s, out: Float32s | None = None) -> Float32s:
        """Return the weights of each id, [n, dim], in ``out`` if given; ids may come in any order and may repeat."""
        return self._read(ids, self.dim, out)

    def pull_state(self, ids: Int64s) -> Float32s:
        """Return the weights and state of each id, [n, dim + state]."""
        return self._read(ids, self.dim + self.state)

    def _read(self, ids: Int64s, width: int, out: Float32s | None = None) -> Float32s:
        ids = readable(ids, np.int64)
        out = np.empty((len(ids), width), np.float32) if out is None else out
        with self._lock:
            slots = self._found(ids)
            self._format.gather(ids, slots, self._arena, width, out)
        return out

    def _found(self, ids: Int64s) -> Int64s:
        slots = np.empty(len(ids), np.int64)
        if find(ids, self._index.regions, slots):
            raise self._foreign(ids)
        return slots

    def _foreign(self, ids: Int64s) -> EchelonError:
        where = bucket_of(ids, BUCKETS)
        first = int(np.flatnonzero(~np.isin(where, self.buckets))[0])
        return MismatchError(
            f"table '{self.spec.name}': id {ids[first]} lies in bucket {where[first]}, but this server holds buckets "
            f"{self.buckets.start} to {self.buckets.stop - 1}; workers and servers must agree on the number of servers"
        )

    # writing

    def push(
        self, ids: Int64s, grads: Float32s, *, lr: float | None = None, now: int = 0, events: Float32s | None = None
    ) -> Int64s:
        """Apply the rule to the rows of ``ids``, which must be distinct, and return the ids that were evicted for them.

        lr:      learning rate; default: the rule's own
        now:     Unix time in seconds, for a table whose rows expire by time
        events:  shows and clicks of each id, [n, 2], for a table with a score; default: none
        """
        ids, grads = self._checked(ids, grads, self.dim)
        with self._lock:
            settings = settings_of(self.spec.rule, self.spec.rule.lr if lr is None else lr, self.step + 1)
            evicted = self._make_room(ids)
            slots = self._claimed(ids, now)
            self.step += 1
            self._count(slots, events)
            rule = self._update
            self._format.change(
                ids,
                slots,
                grads,
                self._arena,
                lambda slots, grads, rows, shape: rule(slots, grads, rows, shape, settings),
            )
        return evicted

    def _count(self, slots: Int64s, events: Float32s | None) -> None:
        """Add shows and clicks to the rows of a push, whose last-seen time is still that of the push before."""
        if self.spec.score is not None:
            events = np.zeros((len(slots), EVENTS), np.float32) if events is None else readable(events, np.float32)
            count_events(slots, events, self._arena.words32, self._shape, decay_powers(self.spec.score, self.passes))

    def add(self, ids: Int64s, deltas: Float32s, *, now: int = 0) -> Int64s:
        """Add ``deltas`` [n, dim + state] to weights and state of the distinct ``ids``; return the evicted ids."""
        ids, deltas = self._checked(ids, deltas, self.dim + self.state)
        with self._lock:
            evicted = self._make_room(ids)
            slots = self._claimed(ids, now)
            self.step += 1
            self._count(slots, None)
            self._format.change(ids, slots, deltas, self._arena, records.add)
        return evicted

    def make_room(self, ids: Int64s) -> Int64s:
        """Evict now what a push of ``ids`` would evict, and return the evicted ids.

        This lets a caller journal or check evictions before it pushes. Raises ``EchelonError`` if the table is full and
        its rows must not be evicted.
        """
        with self._lock:
            return self._make_room(readable(ids, np.int64))

    def remove(self, ids: Int64s) -> int:
        """Remove these ids and return the number of those that were present."""
        with self._lock:
            return len(self._release(readable(ids, np.int64)))

    def _checked(self, ids: Int64s, values: Float32s, width: int) -> tuple[Int64s, Float32s]:
        if values.shape != (len(ids), width):
            raise UsageError(
                f"table '{self.spec.name}': {len(ids)} ids need values ({len(ids)}, {width}), got {values.shape}"
            )
        return readable(ids, np.int64), readable(values, np.float32)

    def _seen(self, now: int) -> int:
        """Return the current last-seen time: in passes or seconds if rows expire by them, else in updates."""
        if self.spec.expire_passes is not None or self.spec.score is not None:
            return self.passes
        return int(now) if self.spec.expire_seconds is not None else self.step + 1

    def _claimed(self, ids: Int64s, now: int) -> Int64s:
        self._shape[NOW] = self._seen(now) & _ALL
        slots, before = np.empty(len(ids), np.int64), len(self)
        self._claim(ids, slots, self._admission)
        if len(self) > before:
            self._format.begin_new(ids, slots, self._arena)
        return slots

    def _claim(self, ids: Int64s, slots: Int64s, admission: NDArray[np.float64]) -> None:
        index, arena, done = self._index, self._arena, 0
        place = arena.counters, arena.extents, arena.words32
        while True:
            done = claims.claim(ids, done, index.regions, *place, self._shape, admission, slots)
            if done == len(ids):
                return
            try:
                self._grow(int(arena.counters[STUCK]), ids[done : done + 1])
            except EchelonError:
                self._release(ids[:done][(slots[:done] >= 0) & (slots[:done] & NEW != 0)])  # not initialized
                raise

    def _grow(self, bucket: int, stuck: Int64s) -> None:
        """Make room for an id: in its bucket if the bucket is full, else in the arena."""
        _, size, used, limit = self._index.regions[bucket].tolist()
        if not size:
            raise self._foreign(stuck)
        if used >= limit:
            self._index.grow(bucket)
        else:
            self._arena.more()

    # eviction and expiry

    def _make_room(self, ids: Int64s) -> Int64s:
        """Evict enough rows for a push of ``ids``, and some more so that the next pushes need no eviction."""
        if self.capacity is None or len(self) + len(ids) <= self.capacity:
            return _NO_IDS
        made = claims.newcomers(ids, self._index.regions, self._shape[records.SEED], self._admission)
        over = rows_to_evict(self.spec, self.capacity, len(self), made)
        return self._evict(ids, over) if over else _NO_IDS

    def _evict(self, ids: Int64s, over: int) -> Int64s:
        arena, capacity = self._arena, self.capacity or 0
        score = OLDEST if self.spec.on_full == "lru" else RAREST
        own = self._found(ids)
        records.set_flags(own, arena.words32, self.words, _ALL, PINNED)
        evicted = select_evictions(self._index.regions, arena.words32, self.words, score, max(over, capacity // 16))
        records.set_flags(own, arena.words32, self.words, _ALL ^ PINNED, 0)
        check_evicted(self.spec, capacity, len(evicted), over)
        return self._release(evicted)

    def _release(self, ids: Int64s) -> Int64s:
        """Remove ids and return those that were present; removals from buckets with a snapshot are recorded."""
        arena, present = self._arena, np.empty(len(ids), np.bool_)
        place = arena.counters, arena.extents, arena.words32
        claims.release(ids, self._index.regions, *place, self.words, present)
        removed = ids[present]
        if self._removed and len(removed):
            where = bucket_of(removed, BUCKETS)
            order = np.argsort(where, kind="stable")
            buckets, begins = np.unique(where[order], return_index=True)
            for bucket, part in zip(buckets.tolist(), np.split(removed[order], begins[1:]), strict=True):
                if bucket in self._removed:
                    self._removed[bucket].append(part)
        return removed

    def new_pass(self) -> int:
        """Begin a new pass over the data and return its number."""
        with self._lock:
            self.passes += 1
            return self.passes

    def expire(self, now: int, buckets: Iterable[int] | None = None) -> int:
        """Remove rows without a push in ``expire_passes`` whole passes or ``expire_seconds``, or with a low score.

        The result is the number of removed rows.
        """
        oldest = self._oldest(now)
        if oldest is None and self.spec.score is None:
            return 0
        return sum(self._expire(which, oldest) for which in (self.buckets if buckets is None else buckets))

    def _oldest(self, now: int) -> int | None:
        """Return the earliest last-seen time of a row that stays; None if rows do not expire."""
        if self.spec.expire_passes is not None:
            return self.passes - self.spec.expire_passes
        return None if self.spec.expire_seconds is None else int(np.ceil(now - self.spec.expire_seconds))

    def _expire(self, which: int, oldest: int | None) -> int:
        with self._lock:
            ids, values = self._index.pairs(which)
            before, gone = len(self), np.zeros(len(ids), np.bool_)
            self._arena.fetch(values)
            if oldest is not None:
                gone |= self._meta(values, 1).astype(np.int64) < oldest
            if self.spec.score is not None:
                gone |= scores_of(self.spec.score, self._events(values)) < np.float32(self.spec.score.threshold)
            self._release(ids[gone])
            self._index.shrink(which)
            return before - len(self)

    def events(self, ids: Int64s) -> Float32s:
        """Return the shows and clicks of each id as they are now, [n, 2]; an id without a row has none."""
        with self._lock:
            return self._events(self._found(readable(ids, np.int64)))

    def _events(self, values: Int64s) -> Float32s:
        """Return the shows and clicks of index values; of an id that waits for admission each push is a show."""
        assert self.spec.score is not None
        powers, out = decay_powers(self.spec.score, self.passes), np.zeros((len(values), EVENTS), np.float32)
        self._shape[NOW] = self.passes
        read_events(values, self._arena.words32, self._shape, powers, out)
        waits = values < EMPTY
        if waits.any():
            counts, seen, _ = claims.waited(values[waits])
            out[waits, 0] = counts * powers[np.maximum(self.passes - seen.astype(np.int64), 0)]
        return out

    def _meta(self, values: Int64s, word: int) -> NDArray[np.uint32]:
        """Return the count with its flags (0) or the last-seen time (1) of rows and of ids that wait for admission."""
        out = np.empty(len(values), np.uint32)
        records.metas(values, self._arena.words32, self.words, word, out)
        waits = values < 0
        if waits.any():
            counts, seen, changed = claims.waited(values[waits])
            out[waits] = seen if word else counts | np.where(changed, WAITING | CHANGED, WAITING).astype(np.uint32)
        return out

    # files

    def rows_of(self, bucket: int, *, changed_only: bool = False) -> BucketRows:
        """Return all rows of a bucket sorted by id, or only those that changed since ``mark_clean``.

        The result does not depend on the order in which rows were inserted.
        """
        with self._lock:
            ids, values = self._index.pairs(bucket)
            removed = self._removed_since_clean(bucket, ids) if changed_only else _NO_IDS
            self._arena.fetch(values)
            if changed_only:
                changed = self._meta(values, 0) >= CHANGED
                ids, values = ids[changed], values[changed]
            return BucketRows(ids, self._copied(values), removed)

    def _removed_since_clean(self, bucket: int, present: Int64s) -> Int64s:
        parts = self._removed.get(bucket, [])
        return np.setdiff1d(np.concatenate(parts), present) if parts else _NO_IDS

    def _copied(self, values: Int64s) -> NDArray[np.uint32]:
        out = np.zeros((len(values), self.words), np.uint32)
        records.copy_out(values, self._arena.words32, self.words, out)
        waits = values < 0
        if waits.any():
            out[waits, -2] = self._meta(values[waits], 0)
            out[waits, -1] = self._meta(values[waits], 1)
        out[:, -2] &= np.uint32(_ALL ^ CHANGED)
        return out

    def mark_clean(self, bucket: int) -> None:
        """Mark all rows of a bucket as saved: ``rows_of`` counts later changes from here."""
        with self._lock:
            ids, values = self._index.pairs(bucket)
            records.set_flags(values, self._arena.words32, self.words, _ALL ^ CHANGED, 0)
            self._put_waiting(ids[values < 0], self._meta(values[values < 0], 0), self._meta(values[values < 0], 1))
            self._removed[bucket] = []

    def _put_waiting(self, ids: Int64s, counts: NDArray[np.uint32], seen: NDArray[np.uint32]) -> None:
        if len(ids):
            values = claims.waiting(counts & np.uint32(COUNT), seen, np.zeros(len(ids), np.bool_))
            claims.put_values(ids, values, self._index.regions)

    def put_rows(self, bucket: int, rows: BucketRows) -> None:
        """Restore rows: remove ``rows.removed``, then insert or overwrite the records, which count as unchanged."""
        ids, kept = self._restorable(bucket, rows)
        waits = (kept[:, -2] & np.uint32(WAITING)) != 0
        with self._lock:
            news = self._removed.pop(bucket, [])  # a removal by a restore is not a change
            self._release(readable(rows.removed, np.int64))
            self._release(np.ascontiguousarray(ids[waits]))
            self._index.reserve(bucket, int(self._index.regions[bucket, USED]) + len(ids))
            slots, present = np.empty(len(ids) - int(waits.sum()), np.int64), np.ascontiguousarray(ids[~waits])
            self._claim(present, slots, _EVERYONE)
            records.copy_in(slots, self._arena.words32, self.words, np.ascontiguousarray(kept[~waits]))
            records.set_flags(slots & SLOT, self._arena.words32, self.words, COUNT, 0)
            self._put_waiting(np.ascontiguousarray(ids[waits]), kept[waits, -2], kept[waits, -1])
            self._removed[bucket] = news

    def _restorable(self, bucket: int, rows: BucketRows) -> tuple[Int64s, NDArray[np.uint32]]:
        """Return ids and records of rows from a file. Raises ``MismatchError`` if they do not fit table and bucket."""
        ids, kept = readable(rows.ids, np.int64), readable(rows.records, np.uint32)
        where = f"table '{self.spec.name}', bucket {bucket}"
        if kept.shape != (len(ids), self.words):
            raise MismatchError(
                f"{where}: {len(ids)} records of {self.words} words expected, got an array of shape {kept.shape}; "
                "the rows were written with another dim or rule"
            )
        if bucket not in self.buckets:
            raise MismatchError(f"{where}: this server holds buckets {self.buckets.start} to {self.buckets.stop - 1}")
        for named in (ids, readable(rows.removed, np.int64)):
            if (bucket_of(named, BUCKETS) != bucket).any():
                raise MismatchError(f"{where}: the rows have ids of other buckets; the file is damaged or misnamed")
        return ids, kept

    def records_of(self, ids: Int64s) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
        """Return which of these ids have a row, and their records with all flags."""
        ids = readable(ids, np.int64)
        with self._lock:
            slots = self._found(ids)
            self._arena.fetch(slots)
            out = np.zeros((len(ids), self.words), np.uint32)
            records.copy_out(slots, self._arena.words32, self.words, out)
        return slots >= 0, out

    def put_records(self, ids: Int64s, kept: NDArray[np.uint32]) -> None:
        """Insert or overwrite the records of distinct ids, with all flags: rows that were updated elsewhere."""
        slots = np.empty(len(ids), np.int64)
        with self._lock:
            self._claim(readable(ids, np.int64), slots, _EVERYONE)
            records.copy_in(slots, self._arena.words32, self.words, np.ascontiguousarray(kept))

    def drop_bucket(self, bucket: int) -> None:
        """Remove a bucket's rows and the record of its removals."""
        with self._lock:
            ids, _ = self._index.pairs(bucket)
            self._release(ids)
            self._removed.pop(bucket, None)
            if bucket in self.buckets:
                self._index.clear(bucket)
            if not len(self):
                self._arena.clear()

    def items(self) -> Iterator[tuple[Int64s, Float32s]]:
        """Yield the ids and weights of all existing rows, bucket by bucket."""
        for bucket in self.buckets:
            with self._lock:
                ids, slots = self._index.pairs(bucket)
                ids, slots = ids[slots >= 0], slots[slots >= 0]
                out = np.empty((len(ids), self.dim), np.float32)
                self._format.gather(ids, slots, self._arena, self.dim, out)
            yield ids, out
