"""``DeviceTable``: a sparse table whose rows lie in the memory of a device, with the numbers of ``Table``.

``read`` and ``update`` work on tensors of the device and do not wait for it. The methods that ``Table`` has too take
and return arrays of the host: for checkpoints, and for workers that exchange rows through the host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.base.errors import MismatchError, UsageError
from echelon.parameter_server.device_table import signed_hash
from echelon.parameter_server.device_table.bucket_files import BucketFiles
from echelon.parameter_server.device_table.device_index import DeviceIndex
from echelon.parameter_server.device_table.device_rows import ROWS, USED, DeviceRows
from echelon.parameter_server.device_table.first_rows import FirstRows
from echelon.parameter_server.device_table.operations import TableOperations, operations_of
from echelon.parameter_server.device_table.row_admission import admits, pushes, waiting
from echelon.parameter_server.device_table.row_eviction import select_evictions
from echelon.parameter_server.device_table.row_update import RowsToUpdate
from echelon.parameter_server.device_table.segments import Segments
from echelon.parameter_server.device_table.torch_operations import begin_and_mark
from echelon.parameter_server.protocol.hashing import bucket_of
from echelon.parameter_server.protocol.job_spec import BUCKETS, TableSpec
from echelon.parameter_server.table import claims
from echelon.parameter_server.table.fullness import check_evicted, rows_to_evict
from echelon.parameter_server.table.index import EMPTY
from echelon.parameter_server.table.records import CHANGED, COUNT, META, WAITING
from echelon.parameter_server.table.table import BucketRows
from echelon.parameter_server.table.updates import settings_of
from echelon.strategy.sparse_update_rules import state_width

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

_NO_IDS = np.empty(0, np.int64)
#: Share of the places of a new index that may be in use after the next batches.
_LOAD_AFTER = 0.4


class DeviceTable:
    """The rows of ``spec`` that lie in ``buckets``, on ``device``.

    capacity:   most rows here; default ``spec.capacity``
    room:       number of rows on the device, for a caller that lets no more in; default: as many as are needed
    operations: kernels; default: Triton's where it is there and the device is a GPU, else torch's
    step:       number of updates so far; this attribute and ``passes`` are set when a table is restored
    """

    def __init__(
        self,
        spec: TableSpec,
        device: torch.device,
        *,
        buckets: range = range(BUCKETS),
        capacity: int | None = None,
        operations: TableOperations | None = None,
        room: int = 0,
    ) -> None:
        check_spec(spec)
        self.spec, self.buckets, self.device = spec, buckets, device
        self.dim, self.state = spec.dim, state_width(spec.rule, spec.dim)
        self.words = self.dim + self.state + META
        self.capacity = capacity if capacity is not None else spec.capacity
        self.step = self.passes = 0
        self._lock = threading.RLock()
        self._index = DeviceIndex(buckets, device)
        self._rows = DeviceRows(self.dim + self.state, device, room)
        self._files = BucketFiles(spec.name, buckets)
        self._first = FirstRows.of(spec)
        self._ops = operations or operations_of(device, self._first, spec.rule)

    def __len__(self) -> int:
        return len(self._rows)

    def memory(self) -> int:
        """Return the bytes of the index and of the rows, with the room that they have to grow."""
        return self.index_bytes() + self._rows.nbytes

    def index_bytes(self) -> int:
        return self._index.nbytes

    @property
    def kernels(self) -> str:
        """The name of the operations: torch or triton."""
        return self._ops.name

    # ---- on the device ----

    def read(self, ids: Tensor, *, state: bool = False) -> Tensor:
        """Return the weights of each id, [n, dim], with ``state`` also its state; ids may repeat."""
        with self._lock:
            slots = self._ops.find(self._index, ids)
            return self._ops.gather(self._rows, ids, slots, self.dim + self.state if state else self.dim)

    def update(
        self, ids: Tensor, grads: Tensor, *, lr: float | None = None, scale: float = 1.0, now: int = 0,
        valid: Tensor | None = None,
    ) -> Int64s:  # fmt: skip
        """Sum the gradients of each id and apply the rule to its row; return the ids that were evicted for them.

        ids:    ids, which may repeat; those of other buckets are not checked
        grads:  gradients [n, dim], added for each id in the order of positions
        lr:     learning rate; default: the rule's own
        scale:  factor of the summed gradients
        now:    Unix time in seconds, for a table whose rows expire by time
        valid:  on the device, False if nothing is to change; default: True
        """
        with self._lock:
            settings = settings_of(self.spec.rule, self.spec.rule.lr if lr is None else lr, self.step + 1).tolist()
            evicted = self._make_room(ids)
            if len(ids):
                seen = self._seen(now)
                segments, slots, new, before = self._claimed(ids, seen, valid=valid)
                self._ops.update(
                    self._rows,
                    RowsToUpdate(ids, grads, segments, slots, new, before, settings, scale, seen),
                )
            self.step += 1
            return evicted

    def _seen(self, now: int) -> int:
        """Return the last-seen time of this push as signed 32 bits."""
        seen = self.step + 1
        if self.spec.expire_passes is not None:
            seen = self.passes
        elif self.spec.expire_seconds is not None:
            seen = int(now)
        return (seen + 2**31) % 2**32 - 2**31

    def _claimed(
        self, ids: Tensor, seen: int, everyone: bool = False, valid: Tensor | None = None
    ) -> tuple[Segments, Tensor, Tensor, Tensor]:
        """Return the runs of equal ids, the row of each, which of the rows are new, and their earlier pushes."""
        self._reserve(len(ids))
        index, rows = self._index, self._rows
        segments = Segments.of(self._ops.claim(index, rows, ids), index.nowhere)
        values = index.values[segments.places]
        is_run = segments.is_run if valid is None else segments.is_run & valid
        absent, before = (values < 0) & is_run, pushes(values)
        wanted = absent if everyone else absent & admits(self.spec, ids[segments.first], before + 1)
        dealt = rows.deal(wanted, segments.first)
        values = torch.where(wanted, dealt, torch.where(absent, waiting(before + 1, seen), values))
        index.values[torch.where(absent, segments.places, index.nowhere)] = torch.where(absent, values, EMPTY)
        return segments, torch.where(is_run, values, EMPTY), wanted, before

    def _reserve(self, count: int) -> None:
        """Make room for ``count`` new ids in the rows and in the index."""
        self._rows.reserve(count)
        index = self._index
        if self._rows.most(USED) <= index.limit:
            return
        self._rows.exact()
        if self._rows.most(USED) + count > index.limit:
            places, size = index.live(), index.size
            while len(places) + 2 * count > size * _LOAD_AFTER:
                size *= 2
            self._rehash(DeviceIndex(self.buckets, self.device, size), places)
        self._rows.reserve(count)

    def _rehash(self, index: DeviceIndex, places: Tensor) -> None:
        """Move the ids at these places into an empty index; rows stay where they are."""
        keys, values = self._index.keys[places], self._index.values[places]
        self._rows.counters[USED] = 0
        index.values[self._ops.claim(index, self._rows, keys)] = values
        self._index = index
        self._rows.exact()

    # ---- eviction and expiry ----

    def _make_room(self, ids: Tensor) -> Int64s:
        if self.capacity is None or self._rows.most(ROWS) + len(ids) <= self.capacity:
            return _NO_IDS
        present = len(self)
        if present + len(ids) <= self.capacity:
            return _NO_IDS
        distinct = torch.unique(ids)
        values = self._ops.find(self._index, distinct)
        made = int(((values < 0) & admits(self.spec, distinct, pushes(values) + 1)).sum())
        over = rows_to_evict(self.spec, self.capacity, present, made)
        if not over:
            return _NO_IDS
        number = max(over, self.capacity // 16)
        evicted = select_evictions(self._index, self._rows, values[values >= 0], self.spec.on_full == "lru", number)
        check_evicted(self.spec, self.capacity, len(evicted), over)
        return self._release(evicted)

    def _release(self, ids: Tensor) -> Int64s:
        """Remove distinct ids and return those that were present."""
        index = self._index
        places = self._ops.locate(index, ids)
        values = index.values[places]
        present = (places != index.nowhere) & (values != EMPTY)
        index.values[places[present]] = EMPTY  # the key keeps its place until the index is built anew
        self._rows.release(values[present & (values >= 0)])
        removed: Int64s = ids[present].cpu().numpy()
        self._files.note_removed(removed)
        return removed

    def new_pass(self) -> int:
        """Begin a new pass over the data and return its number."""
        with self._lock:
            self.passes += 1
            return self.passes

    def expire(self, now: int, buckets: Iterable[int] | None = None) -> int:
        """Remove rows without a push in ``expire_passes`` whole passes or ``expire_seconds``; return their number."""
        oldest = self._oldest(now)
        if oldest is None:
            return 0
        with self._lock:
            before = len(self)
            places = self._index.live()
            keys, values = self._index.keys[places], self._index.values[places]
            old = self._files.seen(self._rows, values) < oldest
            if buckets is not None and set(buckets) != set(self.buckets):
                of_device = torch.tensor(sorted(buckets), device=self.device)
                old &= torch.isin(signed_hash.bucket_of(keys), of_device)
            self._release(keys[old])
            return before - len(self)

    def _oldest(self, now: int) -> int | None:
        """Return the earliest last-seen time of a row that stays; None if rows do not expire."""
        if self.spec.expire_passes is not None:
            return self.passes - self.spec.expire_passes
        return None if self.spec.expire_seconds is None else int(np.ceil(now - self.spec.expire_seconds))

    # ---- for a cache ----

    def in_use(self) -> int:
        """Wait for the device and return the number of rows."""
        return self._rows.exact()[ROWS]

    def slots_of(self, ids: Tensor) -> Tensor:
        """Return the number of each id's row, negative for an id without one."""
        return self._ops.find(self._index, ids)

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return the ids that have a row, and the numbers of their rows."""
        places = self._index.live()
        keys, slots = self._index.keys[places], self._index.values[places]
        return keys[slots >= 0], slots[slots >= 0]

    def records_at(self, slots: Tensor) -> Tensor:
        """Return the records of rows as 32-bit words: weights, state, count and flags, last-seen time."""
        return torch.cat([self._rows.rows[slots].view(torch.int32), self._rows.meta[slots]], 1)

    def put_records(self, ids: Tensor, records: Tensor) -> None:
        """Insert or overwrite the records of distinct ids; their flags are cleared."""
        if not len(ids):
            return
        segments, slots, _, _ = self._claimed(ids, 0, everyone=True)
        is_run, records = segments.is_run, records[segments.first]
        slots, records = slots[is_run], records[is_run]
        self._rows.rows[slots] = records[:, :-META].contiguous().view(torch.float32)
        self._rows.meta[slots, 0] = records[:, -2] & COUNT
        self._rows.meta[slots, 1] = records[:, -1]

    def mark_unchanged(self) -> None:
        """Clear the changed flag of all rows."""
        self._rows.meta[:, 0] &= CHANGED - 1

    def forget(self, ids: Tensor) -> None:
        """Remove distinct ids."""
        self._release(ids)

    # ---- arrays of the host ----

    def pull(self, ids: Int64s, out: Float32s | None = None) -> Float32s:
        """Return the weights of each id, [n, dim], in ``out`` if given; ids may come in any order and may repeat."""
        found: Float32s = self.read(self._checked_ids(ids)).cpu().numpy()
        if out is None:
            return found
        out[:] = found
        return out

    def pull_state(self, ids: Int64s) -> Float32s:
        """Return the weights and state of each id, [n, dim + state]."""
        found: Float32s = self.read(self._checked_ids(ids), state=True).cpu().numpy()
        return found

    def push(
        self, ids: Int64s, grads: Float32s, *, lr: float | None = None, now: int = 0, events: Float32s | None = None
    ) -> Int64s:
        """Apply the rule to the rows of ``ids`` and return the ids that were evicted for them."""
        self._check(ids, grads, self.dim)
        return self.update(self._checked_ids(ids), self._sent(grads), lr=lr, now=now)

    def add(self, ids: Int64s, deltas: Float32s, *, now: int = 0) -> Int64s:
        """Add ``deltas`` [n, dim + state] to weights and state of the distinct ``ids``; return the evicted ids."""
        self._check(ids, deltas, self.dim + self.state)
        with self._lock:
            on_device, seen = self._checked_ids(ids), self._seen(now)
            evicted = self._make_room(on_device)
            if len(ids):
                segments, slots, new, before = self._claimed(on_device, seen)
                grads = torch.empty(0, self.dim, device=self.device)
                work = RowsToUpdate(on_device, grads, segments, slots, new, before, [], 1.0, seen)
                begin_and_mark(self._rows, work, self._first)
                held = slots >= 0
                self._rows.rows[slots[held]] += self._sent(deltas)[segments.first[held]]
            self.step += 1
            return evicted

    def make_room(self, ids: Int64s) -> Int64s:
        """Evict now what a push of ``ids`` would evict, and return the evicted ids."""
        with self._lock:
            return self._make_room(self._checked_ids(ids))

    def remove(self, ids: Int64s) -> int:
        """Remove these ids and return the number of those that were present."""
        with self._lock:
            return len(self._release(torch.unique(self._checked_ids(ids))))

    def _checked_ids(self, ids: Int64s) -> Tensor:
        """Return ids on the device. Raises ``MismatchError`` if some lie in buckets of others."""
        if len(self.buckets) < BUCKETS:
            where = bucket_of(ids, BUCKETS)
            foreign = np.flatnonzero((where < self.buckets.start) | (where >= self.buckets.stop))
            if len(foreign):
                first = int(foreign[0])
                raise MismatchError(
                    f"table '{self.spec.name}': id {ids[first]} lies in bucket {where[first]}, but this worker holds "
                    f"buckets {self.buckets.start} to {self.buckets.stop - 1}; all must agree on the number of workers"
                )
        return self._sent(np.ascontiguousarray(ids, np.int64))

    def _sent(self, values: NDArray[np.generic]) -> Tensor:
        """Return an array's values on the device, in memory of their own."""
        return torch.tensor(values, device=self.device)

    def _check(self, ids: Int64s, values: Float32s, width: int) -> None:
        if values.shape != (len(ids), width):
            raise UsageError(
                f"table '{self.spec.name}': {len(ids)} ids need values ({len(ids)}, {width}), got {values.shape}"
            )

    # ---- files ----

    def rows_of(self, bucket: int, *, changed_only: bool = False) -> BucketRows:
        """Return all rows of a bucket sorted by id, or only those that changed since ``mark_clean``."""
        with self._lock:
            return self._files.rows_of(self._index, self._rows, bucket, changed_only)

    def mark_clean(self, bucket: int) -> None:
        """Mark all rows of a bucket as saved: ``rows_of`` counts later changes from here."""
        with self._lock:
            keys, _ = self._index.pairs(bucket)
            self._files.mark_clean(self._index, self._rows, bucket, self._ops.locate(self._index, keys))

    def put_rows(self, bucket: int, rows: BucketRows) -> None:
        """Restore rows: remove ``rows.removed``, then insert or overwrite the records, which count as unchanged."""
        ids, kept = self._files.restorable(bucket, rows, self.words)
        waits = (kept[:, -2] & np.uint32(WAITING)) != 0
        with self._lock, self._files.unrecorded(bucket):
            if len(rows.removed) or waits.any():
                self._release(self._sent(np.unique(np.concatenate([rows.removed, ids[waits]]))))
            self.put_records(self._sent(ids[~waits]), self._sent(kept[~waits].view(np.int32)))
            if waits.any():
                self._put_waiting(ids[waits], kept[waits])

    def _put_waiting(self, ids: Int64s, kept: NDArray[np.uint32]) -> None:
        self._reserve(len(ids))
        places = self._ops.claim(self._index, self._rows, self._sent(ids))
        counts, seen = kept[:, -2] & np.uint32(COUNT), kept[:, -1]
        self._index.values[places] = self._sent(claims.waiting(counts, seen, np.zeros(len(ids), np.bool_)))

    def drop_bucket(self, bucket: int) -> None:
        """Remove a bucket's rows and the record of its removals."""
        with self._lock:
            if bucket in self.buckets:
                self._release(self._index.pairs(bucket)[0])
            self._files.forget(bucket)
            if not len(self):
                self._index = DeviceIndex(self.buckets, self.device)
                self._rows.clear()

    def items(self) -> Iterator[tuple[Int64s, Float32s]]:
        """Yield the ids and weights of all existing rows, bucket by bucket."""
        for bucket in self.buckets:
            with self._lock:
                ids, slots = self._index.pairs(bucket)
                weights = self._rows.rows[slots[slots >= 0], : self.dim]
                yield ids[slots >= 0].cpu().numpy(), weights.cpu().numpy()


def check_spec(spec: TableSpec) -> None:
    """Raise ``UsageError`` for what a table on a device cannot do."""
    where = f"table '{spec.name}'"
    if spec.disk:
        raise UsageError(
            f"{where}: disk=True keeps rows in a file, location='device' in the memory of a device; choose one, or "
            "location='cached', whose rows may lie on disk"
        )
    if spec.expire_passes is not None and spec.expire_seconds is not None:
        raise UsageError(f"{where}: rows expire by passes or by seconds, not both; set one of the two")
    if spec.dtype != "float32":
        raise UsageError(f"{where}: rows on a device are float32, not {spec.dtype}; leave dtype or location out")
    if spec.score is not None:
        raise UsageError(f"{where}: rows on a device have no shows and clicks; leave score or location out")
