"""The rows of a servable: in this process, from files and deltas, or on read-only servers.

An update is atomic without a second copy of the tables: a delta first lies above the tables, as a layer that readers
see from one moment on. Its rows are then written into the tables, below the layer, where readers of the new version do
not see the change; readers of the old version are waited for before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import CheckpointError, EchelonError, UsageError, one_line
from echelon.base.security import Security
from echelon.checkpoint.os_errors import cannot_read
from echelon.parameter_server.protocol.hashing import bucket_of
from echelon.parameter_server.protocol.job_spec import BUCKETS, JobSpec
from echelon.parameter_server.servable.servable_head import ServedTable
from echelon.parameter_server.table import BucketRows, Table, records_of

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

#: Rows that are read from a file at once.
_CHUNK = 1 << 20


class RowReader(Protocol):
    """Interface of one version of the rows."""

    def pull(self, wanted: Mapping[str, Ids]) -> dict[str, Floats]:
        """Return the rows of distinct ids by table."""


class RowLayer:
    """The rows of one table that a delta changes; removed ids read as their initial values."""

    def __init__(self, spec: ServedTable, ids: Ids, weights: Floats, removed: Ids) -> None:
        self.changed, self.weights, self.removed = ids, weights, removed
        together = np.concatenate([ids, removed])
        order = np.argsort(together, kind="stable")
        self._ids = together[order]
        self._rows = np.concatenate([weights, Table(spec.spec).pull(removed)])[order]

    def cover(self, ids: Ids, rows: Floats) -> None:
        """Replace in ``rows`` the rows of those ``ids`` that the delta has changed."""
        if len(self._ids):
            at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
            hit = self._ids[at] == ids
            rows[hit] = self._rows[at[hit]]


class LocalRows:
    """One version of the rows in this process: the tables and, while a delta is written into them, its layers."""

    def __init__(self, tables: Mapping[str, Table], layers: Mapping[str, RowLayer] | None = None) -> None:
        self.tables, self.layers = tables, layers or {}

    def pull(self, wanted: Mapping[str, Ids]) -> dict[str, Floats]:
        found = {name: self.tables[name].pull(ids) for name, ids in wanted.items()}
        for name, layer in self.layers.items():
            if name in wanted:
                layer.cover(wanted[name], found[name])
        return found

    def fold(self) -> LocalRows:
        """Write the layers into the tables, after the last reader of the version before; return the version without."""
        for name, layer in self.layers.items():
            self.tables[name].remove(layer.removed)
            put_weights(self.tables[name], layer.changed, layer.weights)
        return LocalRows(self.tables)


class RemoteRows:
    """The rows of read-only servers."""

    def __init__(self, endpoints: Sequence[str], tables: Sequence[ServedTable], timeout: float) -> None:
        from echelon.parameter_server.protocol.channel import ServerChannel
        from echelon.parameter_server.worker.client import ParameterServerClient

        security = Security.from_environment().for_loopback(endpoints)
        links = [
            ServerChannel(endpoint, security=security, timeout=timeout, name=f"server {index}")
            for index, endpoint in enumerate(endpoints)
        ]
        specs = tuple(table.spec for table in tables)
        job = JobSpec(session="", mode="async", trainers=1, servers=len(links), tables=specs)
        self._client, self._order = ParameterServerClient(links, job, -1), threading.Lock()
        try:
            for table in tables:
                self.pull({table.name: np.zeros(1, np.int64)})
        except BaseException:
            self.close()
            raise

    def pull(self, wanted: Mapping[str, Ids]) -> dict[str, Floats]:
        with self._order:
            pulled = self._client.pull(wanted, step=0, peek=True)
        try:
            return pulled.rows()
        except ValueError as error:
            raise UsageError(
                f"the read-only servers give rows of another size than the servable's head says ({one_line(error)}); "
                "start them with the checkpoint of this servable"
            ) from None

    def close(self) -> None:
        self._client.close()


def load_tables(path: Path, tables: Sequence[ServedTable]) -> dict[str, Table]:
    """Return the tables of a whole servable."""
    return {table.name: _loaded(path, table) for table in tables}


def _loaded(path: Path, served: ServedTable) -> Table:
    table = Table(served.spec)
    for ids, weights, _ in read_rows(path / served.rows, served):
        put_weights(table, ids, weights)
    return table


def load_layers(path: Path, tables: Sequence[ServedTable]) -> dict[str, RowLayer]:
    """Return the changes of a delta by table."""
    layers = {}
    for table in tables:
        parts = list(read_rows(path / table.rows, table))
        joined = [np.concatenate(each) for each in zip(*parts, strict=True)] if parts else _nothing(table.dim)
        layers[table.name] = RowLayer(table, *joined)
    return layers


def _nothing(dim: int) -> list[NDArray[Any]]:
    return [np.empty(0, np.int64), np.empty((0, dim), np.float32), np.empty(0, np.int64)]


def put_weights(table: Table, ids: Ids, weights: Floats) -> None:
    """Insert or overwrite rows of a table that has no optimizer state."""
    if not len(ids):
        return
    where = bucket_of(ids, BUCKETS)
    order = np.argsort(where, kind="stable")
    records = records_of(np.ascontiguousarray(weights[order]), table.spec)
    buckets, begins = np.unique(where[order], return_index=True)
    sorted_ids = ids[order]
    ends = [*begins[1:], len(ids)]
    for bucket, begin, end in zip(buckets.tolist(), begins, ends, strict=True):
        table.put_rows(bucket, BucketRows(sorted_ids[begin:end], records[begin:end]))


def read_rows(path: Path, table: ServedTable) -> Iterator[tuple[Ids, Floats, Ids]]:
    """Yield ids, weights and removed ids of an exported table in chunks; ``CheckpointError`` if it is damaged."""
    parts = sorted(path.iterdir()) if path.is_dir() else [path]
    for part in parts:
        try:
            yield from _parquet(part) if part.suffix == ".parquet" else _safetensors(part)
        except OSError as error:
            raise cannot_read(part, error) from None
        except EchelonError:
            raise
        except Exception as error:
            raise CheckpointError(f"{part} is damaged: {one_line(error, typed=True)}; export it again") from None


def _safetensors(path: Path) -> Iterator[tuple[Ids, Floats, Ids]]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        ids, weights = file.get_slice("ids"), file.get_slice("weights")
        removed = file.get_tensor("removed") if "removed" in file.keys() else np.empty(0, np.int64)  # noqa: SIM118
        count, dim = weights.get_shape()
        yield np.empty(0, np.int64), np.empty((0, dim), np.float32), removed
        for begin in range(0, count, _CHUNK):
            end = min(begin + _CHUNK, count)
            yield ids[begin:end], weights[begin:end], removed[:0]


def _parquet(path: Path) -> Iterator[tuple[Ids, Floats, Ids]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_CHUNK):
            ids, lists = batch.column("id").to_numpy(), batch.column("weights")
            there = np.asarray(lists.is_valid())
            weights = lists.drop_null().flatten().to_numpy().reshape(int(there.sum()), lists.type.list_size)
            yield ids[there], weights, ids[~there]
