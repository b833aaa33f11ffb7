"""Geo mode: a worker steps on local copies, and every k steps exchanges changes with the servers.

A change is the effect of the worker's own steps since the last exchange, divided by the number of workers:
(w - w_old) / N, for the dense parameters and for the rows that the worker touched (weights and optimizer state). The
worker then continues from the servers' values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table import Table
from echelon.parameter_server.worker.client import (
    Floats,
    IdPartition,
    Ids,
    ParameterServerClient,
    PullFuture,
    WorkerUpdate,
)
from echelon.parameter_server.worker.dense_blocks import DenseBlockBuffers


@dataclass
class LocalRowCache:
    """Copies of one table's rows that were touched since the last exchange, and their values when they were fetched."""

    table: Table
    ids: list[Ids] = field(default_factory=list)
    old: list[Floats] = field(default_factory=list)

    def missing(self, ids: Ids) -> Ids:
        return ids[~np.isin(ids, np.concatenate(self.ids))] if self.ids else ids

    def take(self, ids: Ids, values: Floats) -> None:
        """Add copies of rows with the servers' weights and state."""
        self.table.add(ids, values - self.table.pull_state(ids))
        self.table.step = 0
        self.ids.append(ids)
        self.old.append(self.table.pull_state(ids))

    def changes(self, workers: int) -> tuple[Ids, Floats]:
        ids = np.concatenate(self.ids) if self.ids else np.empty(0, np.int64)
        old = np.concatenate(self.old) if self.old else np.empty((0, self.table.dim + self.table.state), np.float32)
        return ids, (self.table.pull_state(ids) - old) / np.float32(workers)


class LocalPull(PullFuture):
    """A pull from local copies, which is complete at once."""

    def __init__(self, shares: dict[str, IdPartition], rows: dict[str, Floats]) -> None:
        super().__init__(shares, {}, [])
        self._rows = rows

    def rows(self) -> dict[str, Floats]:
        return self._rows


class GeoWorker:
    """The local copies of a worker in geo mode, and their exchange with the servers."""

    def __init__(self, client: ParameterServerClient, blocks: DenseBlockBuffers, workers: int, every: int) -> None:
        self._client = client
        self._blocks = blocks
        self._workers = workers
        self._every = every
        self._specs = {spec.name: spec for spec in client.job.tables}
        self.steps = 0  #: since the last exchange
        self._clock: dict[str, int] = dict.fromkeys(self._specs, 0)  # updates of each table, for rules that use it
        self._begin_round()

    def begin(self) -> None:
        """Record the current dense parameters, which are the servers' values; changes are relative to them."""
        self._old = [values.copy() for values in self._blocks.values()]

    def _begin_round(self) -> None:
        self._near = {name: LocalRowCache(Table(_in_memory(spec))) for name, spec in self._specs.items()}
        self.steps = 0

    def pull(self, wanted: Mapping[str, Ids], *, step: int, dense: bool = False) -> PullFuture:
        """Return the rows for a step; rows without a local copy are fetched, with their state."""
        missing = {name: self._near[name].missing(ids) for name, ids in wanted.items()}
        if any(len(ids) for ids in missing.values()):
            fetched = self._client.pull(missing, step=step, peek=True, state=True).rows()
            for name, values in fetched.items():
                self._near[name].take(missing[name], values)
        shares = {name: IdPartition(ids, None, [len(ids)]) for name, ids in wanted.items()}
        return LocalPull(shares, {name: self._near[name].table.pull(ids) for name, ids in wanted.items()})

    def update(self, tables: Mapping[str, tuple[IdPartition, Floats]], rates: Mapping[str, float]) -> None:
        """Update the local rows by one step; the optimizer of the dense parameters has stepped already."""
        for name, near in self._near.items():
            share, grads = tables.get(name, (_NO_ROWS, np.empty((0, near.table.dim), np.float32)))
            near.table.step = self._clock[name]
            near.table.push(share.ids, grads, lr=rates[name])
            self._clock[name] += 1
        self.steps += 1

    @property
    def due(self) -> bool:
        return self.steps >= self._every

    def exchange(self, blob: np.ndarray[tuple[int], np.dtype[np.uint8]] | None) -> None:
        """Send the changes of this worker's steps, and install the servers' new values from the answer."""
        tables = {}
        for name, near in self._near.items():
            ids, changes = near.changes(self._workers)
            share = IdPartition.of(ids, len(self._client.links))
            tables[name] = share, changes if share.order is None else changes[share.order]
        now = self._blocks.values()
        dense = [(new - old) / np.float32(self._workers) for new, old in zip(now, self._old, strict=True)]
        update = WorkerUpdate(weight=1.0, tables=tables, dense=dense, kind="delta", values=True, blob=blob)
        self._client.push(update)
        self.install(self._client.collect())
        self._begin_round()

    def install(self, values: Sequence[Floats]) -> None:
        if values:
            self._blocks.install(values)
            self.begin()


_NO_ROWS = IdPartition(np.empty(0, np.int64), None, [0])


def _in_memory(spec: TableSpec) -> TableSpec:
    """Return a table spec for local copies: they are few and last one round, so limits, expiry and disk are off."""
    return TableSpec(name=spec.name, dim=spec.dim, seed=spec.seed, rule=spec.rule, initializer=spec.initializer)
