"""A server's values: its rows of every table and its dense blocks, and the updates of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.hashing import bucket_of, owned_by
from echelon.parameter_server.protocol.job_spec import BUCKETS, JobSpec, TableSpec
from echelon.parameter_server.server.dense import DenseShard, Floats
from echelon.parameter_server.table.row_table import RowTable, TableMaker, host_table

Ids = NDArray[np.int64]


def even_share(capacity: int, buckets: range) -> int:
    """Return the number of rows of a table in ``buckets`` if ids are evenly distributed."""
    return max(1, -(-capacity * len(buckets) // BUCKETS))


class ServerStore:
    """The tables and dense blocks of one server.

    They are changed under the shard's apply lock only; rows and blocks may be read at any time.

    During a replay parts of the store are ahead of the journal: ``floors`` is, for each table and bucket, the LSN up to
    which its rows already include all changes, and ``dense_floor`` is the same for the blocks. Changes up to that LSN
    are skipped.
    """

    def __init__(
        self, job: JobSpec, server: int, directory: Path | None = None, make_table: TableMaker = host_table
    ) -> None:
        self.buckets = owned_by(server, BUCKETS, job.servers)
        self.tables: dict[str, RowTable] = {
            spec.name: make_table(spec, self.buckets, directory, self._capacity(spec)) for spec in job.tables
        }
        self.dense = DenseShard(job, server)
        self.begun = not self.dense.size
        self.passes = 0
        self._seconds = {spec.name: spec.expire_seconds for spec in job.tables if spec.expire_seconds is not None}
        self._expired: dict[str, int] = {}
        self._lsn = self.now = 0
        self.floors: dict[str, NDArray[np.int64]] = {}
        self.dense_floor = 0
        self.evicted: list[tuple[str, Ids]] = []  #: evicted ids that are not journaled yet

    def _capacity(self, spec: TableSpec) -> int | None:
        """Return the row limit of this server until a worker sends the limit that the other servers leave.

        With on_full="error" the limit is the whole capacity: workers count rows over all servers and raise the error.
        """
        if spec.capacity is None or spec.on_full == "error":
            return spec.capacity
        return even_share(spec.capacity, self.buckets)

    def capped_rows(self) -> dict[str, int]:
        """Return this server's rows of each table that has a capacity; workers add them up over all servers."""
        return {name: len(table) for name, table in self.tables.items() if table.spec.capacity is not None}

    def moment(self, lsn: int, now: int) -> None:
        """Set the LSN of the change that is being applied, and the time in its message."""
        self._lsn, self.now = lsn, max(now, self.now)

    def set_floors(self, floors: Mapping[str, Mapping[int, int]], dense: int) -> None:
        """Begin a replay; empty floors end it.

        The rows that a full table evicts depend on the whole table, parts of which may be ahead of the journal during a
        replay. So evictions are journaled, and a replay makes only the journaled ones.
        """
        self.dense_floor = dense
        self.floors = {name: np.zeros(BUCKETS, np.int64) for name in floors}
        for name, of_table in floors.items():
            for bucket, lsn in of_table.items():
                self.floors[name][bucket] = lsn
        for table in self.tables.values():
            table.capacity = None if floors else self._capacity(table.spec)

    # ---- changes ----

    def begin(self, values: Floats) -> None:
        if self._lsn > self.dense_floor:
            self.dense.begin(values)
        self.begun = True

    def update(self, name: str, ids: Ids, gradients: Floats, rate: float | None, limit: int | None = None) -> None:
        """Apply one step of a table's rule.

        gradients:  with shows and clicks beside them, if the table counts them
        limit:      most rows that this server may hold
        """
        self._set_limit(name, limit)
        ids, gradients = self._above_floor(name, ids, gradients)
        table = self.tables[name]
        if table.spec.score is None:
            evicted = table.push(ids, gradients, lr=rate, now=self.now)
        else:
            grads, events = gradients[:, : table.dim], gradients[:, table.dim :]
            evicted = table.push(ids, grads, lr=rate, now=self.now, events=events)
        self.note_evicted(name, evicted)
        self.expire_by_time(name)

    def add(self, name: str, ids: Ids, changes: Floats, limit: int | None = None) -> None:
        """Add the changes that a geo worker sent to the records."""
        self._set_limit(name, limit)
        ids, changes = self._above_floor(name, ids, changes)
        self.note_evicted(name, self.tables[name].add(ids, changes, now=self.now))
        self.expire_by_time(name)

    def update_dense(self, gradient: Floats, groups: list[dict[str, Any]]) -> None:
        if self._lsn > self.dense_floor:
            self.dense.step(gradient, groups)

    def add_dense(self, change: Floats) -> None:
        if self._lsn > self.dense_floor:
            self.dense.add(change)

    def remove(self, name: str, ids: Ids) -> None:
        """Remove rows whose eviction the journal records."""
        self.tables[name].remove(self._above_floor(name, ids, ids)[0])

    def check_room(self, name: str, ids: Ids) -> None:
        """Raise ``EchelonError`` if a table with on_full="error" has no room for these ids."""
        if self.tables[name].spec.on_full == "error":
            self.tables[name].make_room(ids)

    def new_pass(self) -> None:
        """End a pass over the data: remove the rows that expire by passes or have a low score."""
        self.passes += 1
        for name, table in self.tables.items():
            table.new_pass()
            if table.spec.expire_passes is not None or table.spec.score is not None:
                self._expire(name)

    def _set_limit(self, name: str, limit: int | None) -> None:
        table = self.tables[name]
        if limit is not None and table.capacity is not None:  # None: a replay, which evicts only what was journaled
            table.capacity = limit

    def note_evicted(self, name: str, ids: Ids) -> None:
        if len(ids):
            self.evicted.append((name, ids))

    def _above_floor(self, name: str, ids: Ids, rows: NDArray[Any]) -> tuple[Ids, NDArray[Any]]:
        if name not in self.floors:
            return ids, rows
        keep = self.floors[name][bucket_of(ids, BUCKETS)] < self._lsn
        return ids[keep], rows[keep]

    def expire_by_time(self, name: str) -> None:
        """Remove rows that expire by time, if an eighth of ``expire_seconds`` has passed since the last removal.

        An eighth is often enough to free memory in time, and rare enough to cost nothing.
        """
        if name not in self._seconds:
            return
        since = self._expired.setdefault(name, self.now)
        if self.now - since >= max(1.0, self._seconds[name] / 8):
            self._expired[name] = self.now
            self._expire(name)

    def shortest_expiry(self) -> float | None:
        """Return the shortest time in seconds after which rows of a table expire; None if none do."""
        return min(self._seconds.values(), default=None)

    def _expire(self, name: str) -> None:
        buckets: Iterable[int] = self.buckets
        if name in self.floors:
            buckets = [bucket for bucket in self.buckets if self.floors[name][bucket] < self._lsn]
        if buckets:
            self.tables[name].expire(self.now, buckets)

    def forget(self) -> None:
        """Drop all rows and blocks, as if the job had just opened."""
        for table in self.tables.values():
            for bucket in table.buckets:
                table.drop_bucket(bucket)
        self.dense.begin(np.zeros(self.dense.size, np.float32))
        self.begun = not self.dense.size

    # ---- persistence ----

    def facts(self) -> dict[str, Any]:
        steps = {name: table.step for name, table in self.tables.items()}
        facts = {"begun": self.begun, "passes": self.passes, "now": self.now}
        return {**facts, "steps": steps, "expired": dict(self._expired)}

    def restore(self, facts: dict[str, Any]) -> None:
        self.begun, self.passes, self._expired = facts["begun"], facts["passes"], dict(facts["expired"])
        self.now = max(self.now, facts.get("now", 0))
        for name, step in facts["steps"].items():
            if name in self.tables:
                self.tables[name].step, self.tables[name].passes = step, self.passes
