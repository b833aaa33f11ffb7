"""A server's numbers: its rows of every table and its dense blocks, and what updates do to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.ps.dense import Dense, Floats
from echelon.ps.hashing import bucket_of, owned_by
from echelon.ps.spec import BUCKETS, JobSpec, TableSpec
from echelon.ps.table import Table

Ids = NDArray[np.int64]


class Store:
    """Changed under the shard's apply lock only; rows and blocks may be read at any time.

    During a replay parts of it are ahead of the journal: ``floors`` says, for each table and bucket, up to which LSN
    its rows already are what they should be, ``dense_floor`` the same for the blocks. Changes up to there pass by.
    """

    def __init__(self, job: JobSpec, server: int, directory: Path | None = None) -> None:
        self.buckets = owned_by(server, BUCKETS, job.servers)
        self.tables = {spec.name: self._table(spec, directory) for spec in job.tables}
        self.dense = Dense(job, server)
        self.begun = not self.dense.size
        self.passes = 0
        self._seconds = {spec.name: spec.expire_seconds for spec in job.tables if spec.expire_seconds is not None}
        self._expired: dict[str, int] = {}
        self._lsn = self._now = 0
        self.floors: dict[str, NDArray[np.int64]] = {}
        self.dense_floor = 0
        self.evicted: list[tuple[str, Ids]] = []  #: to make room, since somebody last looked

    def _table(self, spec: TableSpec, directory: Path | None) -> Table:
        return Table(spec, buckets=self.buckets, directory=directory, capacity=self._capacity(spec))

    def _capacity(self, spec: TableSpec) -> int | None:
        """This server's share of a table's rows."""
        return None if spec.capacity is None else max(1, -(-spec.capacity * len(self.buckets) // BUCKETS))

    def moment(self, lsn: int, now: int) -> None:
        """The change that is being applied: its number, and the time that its frame says it is."""
        self._lsn, self._now = lsn, now

    def set_floors(self, floors: Mapping[str, Mapping[int, int]], dense: int) -> None:
        """A replay begins; with no floors, it is over.

        Who is evicted from a full table depends on all of it, of which a part may be ahead. So evictions are written
        down, and during a replay nothing else makes room.
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

    def update(self, name: str, ids: Ids, gradients: Floats, rate: float | None) -> None:
        """One step of a table's rule."""
        ids, gradients = self._above_floor(name, ids, gradients)
        self._note_evicted(name, self.tables[name].push(ids, gradients, lr=rate, now=self._now))
        self._expire_by_time(name)

    def add(self, name: str, ids: Ids, changes: Floats) -> None:
        """Records plus a change: what geo workers send."""
        ids, changes = self._above_floor(name, ids, changes)
        self._note_evicted(name, self.tables[name].add(ids, changes, now=self._now))
        self._expire_by_time(name)

    def update_dense(self, gradient: Floats, groups: list[dict[str, Any]]) -> None:
        if self._lsn > self.dense_floor:
            self.dense.step(gradient, groups)

    def add_dense(self, change: Floats) -> None:
        if self._lsn > self.dense_floor:
            self.dense.add(change)

    def remove(self, name: str, ids: Ids) -> None:
        """What was evicted when the journal was written."""
        self.tables[name].remove(self._above_floor(name, ids, ids)[0])

    def check_room(self, name: str, ids: Ids) -> None:
        """An error if a table that must not let go of rows has no room for these."""
        if self.tables[name].spec.on_full == "error":
            self.tables[name].make_room(ids)

    def new_pass(self) -> None:
        """A pass over the data is over."""
        self.passes += 1
        for name, table in self.tables.items():
            table.new_pass()
            if table.spec.expire_passes is not None:
                self._expire(name)

    def _note_evicted(self, name: str, ids: Ids) -> None:
        if len(ids):
            self.evicted.append((name, ids))

    def _above_floor(self, name: str, ids: Ids, rows: NDArray[Any]) -> tuple[Ids, NDArray[Any]]:
        if name not in self.floors:
            return ids, rows
        keep = self.floors[name][bucket_of(ids, BUCKETS)] < self._lsn
        return ids[keep], rows[keep]

    def _expire_by_time(self, name: str) -> None:
        """Eight times in the life of a row: often enough to let go in time, seldom enough to cost nothing."""
        if name not in self._seconds:
            return
        since = self._expired.setdefault(name, self._now)
        if self._now - since >= max(1.0, self._seconds[name] / 8):
            self._expired[name] = self._now
            self._expire(name)

    def _expire(self, name: str) -> None:
        buckets: Iterable[int] = self.buckets
        if name in self.floors:
            buckets = [bucket for bucket in self.buckets if self.floors[name][bucket] < self._lsn]
        if buckets:
            self.tables[name].expire(self._now, buckets)

    def forget(self) -> None:
        """Drop all rows and blocks, as if the job had just opened."""
        for table in self.tables.values():
            for bucket in table.buckets:
                table.drop_bucket(bucket)
        self.dense.begin(np.zeros(self.dense.size, np.float32))
        self.begun = not self.dense.size

    # ---- keeping ----

    def facts(self) -> dict[str, Any]:
        steps = {name: table.step for name, table in self.tables.items()}
        return {"begun": self.begun, "passes": self.passes, "steps": steps, "expired": dict(self._expired)}

    def restore(self, facts: dict[str, Any]) -> None:
        self.begun, self.passes, self._expired = facts["begun"], facts["passes"], dict(facts["expired"])
        for name, step in facts["steps"].items():
            if name in self.tables:
                self.tables[name].step, self.tables[name].passes = step, self.passes
