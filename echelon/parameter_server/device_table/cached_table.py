"""``CachedTable``: a table in host memory, or on disk, whose rows in use lie in the memory of a device.

The cache is a ``DeviceTable`` of ``cache_rows`` rows with the records of the host's table; it reads and updates. Before
a batch is read, the rows that it lacks are copied from the host, and rows that were not used lately leave it:
those that were updated are written back. Whatever looks at the whole table sees the host's, after all updated rows were
written back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.base.errors import EchelonError, UsageError
from echelon.parameter_server.device_table.device_table import DeviceTable
from echelon.parameter_server.device_table.operations import TableOperations
from echelon.parameter_server.device_table.row_fetch import FetchedRows, RowFetch
from echelon.parameter_server.device_table.second_chance import SecondChance
from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table.table import BucketRows, Table

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]

_NO_IDS = np.empty(0, np.int64)
#: Share of the cache that leaves it at once, so that most batches find room.
_GROUP = 16


class CachedTable:
    """The rows of ``host``, of which at most ``cache_rows`` lie on ``device``.

    capacity: None always
    """

    def __init__(
        self, host: Table, device: torch.device, cache_rows: int, operations: TableOperations | None = None
    ) -> None:
        check_cached(host.spec)
        self._host, self._size = host, cache_rows
        self.spec, self.buckets, self.device = host.spec, host.buckets, device
        self.dim, self.state, self.words = host.dim, host.state, host.words
        self.capacity: int | None = None
        self._operations = operations
        self._fetch = RowFetch(host)
        self._asked: list[Future[FetchedRows]] = []
        self._clear()

    def _clear(self) -> None:
        """Begin with an empty cache."""
        step = self._host.step
        self._rows = DeviceTable(
            dataclasses.replace(self.spec, disk=False), self.device,
            buckets=self.buckets, operations=self._operations, room=self._size,
        )  # fmt: skip
        self._rows.step, self._rows.passes = step, self._host.passes
        self._clock = SecondChance(self._size, self.device)
        self._is_dirty = False
        self._read: Tensor | None = None  # ids that are in the cache for sure

    # ---- the numbers that a restore sets ----

    @property
    def step(self) -> int:
        return self._rows.step

    @step.setter
    def step(self, step: int) -> None:
        self._rows.step = self._host.step = step

    @property
    def passes(self) -> int:
        return self._host.passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self._rows.passes = self._host.passes = passes

    def __len__(self) -> int:
        self.flush()
        return len(self._host)

    def memory(self) -> int:
        """Return the bytes on the host and on the device."""
        return self._host.memory() + self._rows.memory()

    # ---- on the device ----

    def prefetch(self, ids: Tensor) -> None:
        """Begin to read the rows that the next batch needs and the cache lacks; the next ``read`` waits for them."""
        self._asked.append(self._fetch.fetch(ids, self._rows.slots_of(ids) < 0))

    def read(self, ids: Tensor, *, state: bool = False) -> Tensor:
        """Return the weights of each id, [n, dim], with ``state`` also its state; ids may repeat."""
        if len(ids) <= self._size:
            self._bring(ids)
            return self._rows.read(ids, state=state)
        parts = torch.split(ids, max(1, self._size // 2))  # more than a step can use, such as an export
        return torch.cat([self.read(part, state=state) for part in parts])

    def update(
        self, ids: Tensor, grads: Tensor, *, lr: float | None = None, scale: float = 1.0, now: int = 0,
        valid: Tensor | None = None,
    ) -> Int64s:  # fmt: skip
        """Sum the gradients of each id and apply the rule to its row, like ``DeviceTable.update``."""
        self._fetch.check()
        if ids is not self._read:
            self._bring(ids)
        self._is_dirty = True
        evicted = self._rows.update(ids, grads, lr=lr, scale=scale, now=now, valid=valid)
        self._clock.note_used(self._rows.slots_of(ids))
        self._read = None
        return evicted

    def _bring(self, ids: Tensor) -> None:
        """Copy the rows of these ids to the device, and make room for those that no table has yet."""
        asked, self._asked = self._asked, []
        for fetched in asked:  # nothing has left the cache since it was asked for, so it is not out of date
            self._install(fetched.result(), ids)
        slots = self._rows.slots_of(ids)
        missing = slots < 0
        if bool(missing.any()):
            found = self._fetch.fetch(ids, missing).result()
            self._install(found, ids)
        self._clock.note_used(slots)
        self._read = ids

    def _install(self, fetched: FetchedRows, ids: Tensor) -> None:
        self._make_room(fetched.missing, ids)
        if not len(fetched.ids):
            return
        arrived = torch.from_numpy(fetched.ids).to(self.device)
        records = torch.from_numpy(fetched.records.view(np.int32)).to(self.device)
        new = self._rows.slots_of(arrived) < 0  # a row that was made since then is newer
        self._rows.put_records(arrived[new], records[new])

    def _make_room(self, number: int, ids: Tensor) -> None:
        """Let rows leave the cache until ``number`` more fit; those of ``ids`` stay."""
        rows = self._rows.in_use()
        over = rows + number - self._size
        if over <= 0:
            return
        keys, slots = self._rows.entries()
        may_go = torch.zeros(self._size, dtype=torch.bool, device=self.device)
        may_go[slots] = True
        needed = self._rows.slots_of(ids)
        may_go[needed[needed >= 0]] = False
        leaving = self._clock.select(may_go, max(over, self._size // _GROUP))
        if len(leaving) < over:
            raise EchelonError(
                f"table '{self.spec.name}': one batch needs {rows + number - len(leaving):,} rows in the cache, which "
                f"has cache_rows={self._size:,}; raise cache_rows, or use smaller batches"
            )
        by_slot = torch.zeros(self._size, dtype=torch.int64, device=self.device)
        by_slot[slots] = keys
        gone = by_slot[leaving]
        self._write_back(gone, leaving)
        self._rows.forget(gone)
        self._read = None

    def _write_back(self, ids: Tensor, slots: Tensor) -> None:
        """Write the rows back that were updated since they came."""
        records = self._rows.records_at(slots)
        dirty = records[:, -2] < 0  # the changed flag is the sign
        if bool(dirty.any()):
            self._fetch.write_back(ids[dirty], records[dirty])

    def flush(self) -> None:
        """Write all updated rows to the host's table."""
        self._fetch.settle()
        if not self._is_dirty:
            return
        keys, slots = self._rows.entries()
        self._write_back(keys, slots)
        self._fetch.settle()
        self._rows.mark_unchanged()
        self._host.step = self._rows.step
        self._is_dirty = False

    # ---- arrays of the host ----

    def pull(self, ids: Int64s, out: Float32s | None = None) -> Float32s:
        """Return the weights of each id, [n, dim], in ``out`` if given; ids may come in any order and may repeat."""
        found: Float32s = self.read(torch.tensor(ids, device=self.device)).cpu().numpy()
        if out is None:
            return found
        out[:] = found
        return out

    def pull_state(self, ids: Int64s) -> Float32s:
        """Return the weights and state of each id, [n, dim + state]."""
        self.flush()
        return self._host.pull_state(ids)

    def push(
        self, ids: Int64s, grads: Float32s, *, lr: float | None = None, now: int = 0, events: Float32s | None = None
    ) -> Int64s:
        """Apply the rule to the rows of ``ids``."""
        given = torch.tensor(ids, device=self.device), torch.tensor(grads, device=self.device)
        return self.update(*given, lr=lr, now=now)

    def add(self, ids: Int64s, deltas: Float32s, *, now: int = 0) -> Int64s:
        """Add ``deltas`` [n, dim + state] to weights and state of the distinct ``ids``."""
        evicted = self._on_host().add(ids, deltas, now=now)
        self._rows.step = self._host.step
        return evicted

    def make_room(self, ids: Int64s) -> Int64s:
        """Return no ids: the table has no capacity."""
        return _NO_IDS

    def remove(self, ids: Int64s) -> int:
        """Remove these ids and return the number of those that were present."""
        return self._on_host().remove(ids)

    def new_pass(self) -> int:
        """Begin a new pass over the data and return its number."""
        self.passes += 1
        return self.passes

    def expire(self, now: int, buckets: Iterable[int] | None = None) -> int:
        """Remove rows without a push in ``expire_passes`` whole passes or ``expire_seconds``; return their number."""
        return self._on_host().expire(now, buckets)

    def rows_of(self, bucket: int, *, changed_only: bool = False) -> BucketRows:
        """Return all rows of a bucket sorted by id, or only those that changed since ``mark_clean``."""
        self.flush()
        return self._host.rows_of(bucket, changed_only=changed_only)

    def mark_clean(self, bucket: int) -> None:
        """Mark all rows of a bucket as saved: ``rows_of`` counts later changes from here."""
        self.flush()
        self._host.mark_clean(bucket)

    def put_rows(self, bucket: int, rows: BucketRows) -> None:
        """Restore rows: remove ``rows.removed``, then insert or overwrite the records, which count as unchanged."""
        self._on_host().put_rows(bucket, rows)

    def drop_bucket(self, bucket: int) -> None:
        """Remove a bucket's rows and the record of its removals."""
        self._on_host().drop_bucket(bucket)

    def items(self) -> Iterator[tuple[Int64s, Float32s]]:
        """Yield the ids and weights of all existing rows, bucket by bucket."""
        self.flush()
        yield from self._host.items()

    def _on_host(self) -> Table:
        """Return the host's table with all updates, after the cache was emptied: it is about to change."""
        self.flush()
        asked, self._asked = self._asked, []
        for fetched in asked:
            fetched.result()
        if self._rows.in_use():
            self._clear()
        self._host.step = self._rows.step
        return self._host


def check_cached(spec: TableSpec) -> None:
    """Raise ``UsageError`` for what a table with a cache on the device cannot do."""
    given = {
        "capacity": spec.capacity is not None,
        "admit_after": spec.admit_after > 1,
        "admit_probability": spec.admit_probability < 1,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(
                f"table '{spec.name}': {option} and location='cached' do not go together, because new rows are made in "
                f"the cache, which does not see the host's; leave {option} out, or use location='device' or 'host'"
            )
