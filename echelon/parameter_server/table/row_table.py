"""``RowTable``: what a server or worker asks of a table, wherever its rows lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.parameter_server.protocol.job_spec import TableSpec
from echelon.parameter_server.table.table import BucketRows, Table

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


class RowTable(Protocol):
    """Interface of a table; ``Table`` describes each method."""

    spec: TableSpec
    buckets: range
    dim: int
    state: int
    words: int
    capacity: int | None
    step: int
    passes: int

    def __len__(self) -> int: ...
    def memory(self) -> int: ...
    def pull(self, ids: Int64s, out: Float32s | None = None) -> Float32s: ...
    def pull_state(self, ids: Int64s) -> Float32s: ...
    def push(
        self, ids: Int64s, grads: Float32s, *, lr: float | None = None, now: int = 0, events: Float32s | None = None
    ) -> Int64s: ...
    def add(self, ids: Int64s, deltas: Float32s, *, now: int = 0) -> Int64s: ...
    def make_room(self, ids: Int64s) -> Int64s: ...
    def remove(self, ids: Int64s) -> int: ...
    def new_pass(self) -> int: ...
    def expire(self, now: int, buckets: Iterable[int] | None = None) -> int: ...
    def rows_of(self, bucket: int, *, changed_only: bool = False) -> BucketRows: ...
    def mark_clean(self, bucket: int) -> None: ...
    def put_rows(self, bucket: int, rows: BucketRows) -> None: ...
    def drop_bucket(self, bucket: int) -> None: ...
    def items(self) -> Iterator[tuple[Int64s, Float32s]]: ...


#: Makes a table from its specification, the buckets of this process, a directory for its file, and its capacity.
TableMaker = Callable[[TableSpec, range, Path | None, int | None], RowTable]


def host_table(spec: TableSpec, buckets: range, directory: Path | None, capacity: int | None) -> RowTable:
    """Return a table in host memory."""
    return Table(spec, buckets=buckets, directory=directory, capacity=capacity)
