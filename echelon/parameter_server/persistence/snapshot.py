"""The snapshot file, with the state of one server: its facts, its tables by bucket, its dense blocks, and an index.

The same format serves for a base (all rows), a delta (changed rows, removed ids) and a server's part of a checkpoint.
Its records are ``about``, facts, buckets, dense arrays, and last the index. A bucket, or a few small ones, is copied
under the shard's lock and written after the lock is released: training waits only for that copy, and only that much is
in memory twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import CheckpointError
from echelon.checkpoint.os_errors import cannot_write, open_regular_handle
from echelon.parameter_server.persistence.file_record import MessageRecord, TornRecord, encode, read, write_all
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.dense import DenseShard
from echelon.parameter_server.table import BucketRows
from echelon.parameter_server.table.row_table import RowTable

FORMAT = 1
#: Small buckets are copied together up to this many bytes or seconds: taking a busy lock a thousand times would make a
#: snapshot slow.
_TOGETHER, _MOMENT = 1 << 20, 0.001
#: Flags of a new file, or a leftover in its place; a link that someone else has put there is an error.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW


class PersistableShard(Protocol):
    """Interface of a shard that can be stored. All of it is used under the shard's lock."""

    @property
    def lsn(self) -> int: ...

    @property
    def tables(self) -> Mapping[str, RowTable]: ...

    @property
    def dense(self) -> DenseShard: ...


@dataclass(frozen=True)
class SnapshotFileStats:
    """Statistics of a finished file: its bytes, the offset of its index, and the number of its rows and removed ids."""

    bytes: int
    index: int
    rows: int


@dataclass
class BucketLocation:
    """The offset of a bucket in the file, and the LSN up to which the bucket includes all changes."""

    lsn: int
    offset: int  # -1: nothing changed, so nothing was written
    rows: int


class RecordFileWriter:
    """A file of records under construction."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._handle = self._guarded(lambda: os.open(path, _NEW, 0o600))

    def add(self, lsn: int, frame: WireMessage) -> int:
        """Write a record and return its offset."""
        offset = self.size
        self.size += self._guarded(lambda: write_all(self._handle, encode(lsn, frame)))
        return offset

    def sync(self) -> None:
        self._guarded(lambda: os.fsync(self._handle))

    def close(self) -> None:
        os.close(self._handle)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OSError as error:
            raise CheckpointError(cannot_write(self.path, error)) from None


#: A shard and its lock: ``with held() as shard``.
Held = Callable[[], AbstractContextManager[PersistableShard]]


def write(
    held: Held, path: Path, about: dict[str, Any], facts: Sequence[WireMessage], *, lsn: int, delta: bool, clean: bool
) -> SnapshotFileStats:
    """Write the shard's state to ``path`` and sync it to disk.

    lsn:    LSN of ``facts``
    delta:  write only what changed since the last call with ``clean``
    clean:  mark the written rows as saved, so that the next delta begins here
    """
    file = RecordFileWriter(path)
    try:
        file.add(lsn, WireMessage({"format": FORMAT, **about}))
        index: dict[str, Any] = {"facts": [file.add(lsn, frame) for frame in facts]}
        with held() as shard:
            tables = {name: list(table.buckets) for name, table in shard.tables.items()}
        places = {name: _write_table(held, file, name, buckets, delta, clean) for name, buckets in tables.items()}
        index["dense_lsn"], index["dense"] = _write_dense(held, file)
        index["tables"] = {name: len(places[name]) for name in places}
        flat = [[bucket, p.lsn, p.offset, p.rows] for table in places.values() for bucket, p in table.items()]
        start = file.add(lsn, WireMessage(index, [np.array(flat, np.int64).reshape(-1, 4)]))
        file.sync()
        return SnapshotFileStats(file.size, start, sum(row[3] for row in flat))
    finally:
        file.close()


def _write_table(
    held: Held, file: RecordFileWriter, name: str, buckets: list[int], delta: bool, clean: bool
) -> dict[int, BucketLocation]:
    places, left = {}, buckets[::-1]
    while left:
        with held() as shard:
            lsn, taken = shard.lsn, _take(shard.tables[name], left, delta, clean)
        for bucket, rows in taken:
            count = len(rows.ids) + len(rows.removed)
            frame = WireMessage({"table": name, "bucket": bucket}, [rows.ids, rows.records, rows.removed])
            places[bucket] = BucketLocation(lsn, file.add(lsn, frame) if count else -1, count)
    return places


def _take(table: RowTable, left: list[int], delta: bool, clean: bool) -> list[tuple[int, BucketRows]]:
    """Copy the next bucket of ``left`` (from its end), and more buckets if they are small."""
    taken: list[tuple[int, BucketRows]] = []
    nbytes, until = 0, time.monotonic() + _MOMENT
    while left and not (taken and (nbytes >= _TOGETHER or time.monotonic() > until)):
        bucket = left.pop()
        rows = table.rows_of(bucket, changed_only=delta)
        if clean:
            table.mark_clean(bucket)
        taken.append((bucket, rows))
        nbytes += rows.records.nbytes
    return taken


def _write_dense(held: Held, file: RecordFileWriter) -> tuple[int, list[int]]:
    """Copy all dense blocks under the lock, so that they have one LSN, and write them after its release."""
    with held() as shard:
        lsn, arrays = shard.lsn, shard.dense.to_arrays()
    return lsn, [file.add(lsn, WireMessage({"dense": name}, [arrays.pop(name)])) for name in list(arrays)]


@dataclass
class SnapshotFile:
    """A snapshot file that is open for reading. Everything read from it is verified."""

    path: Path
    bytes: int
    index: int
    places: dict[str, dict[int, BucketLocation]] = field(default_factory=dict)

    def __enter__(self) -> SnapshotFile:
        self._handle = open_regular_handle(self.path)
        try:
            self._open()
        except BaseException:
            os.close(self._handle)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def _open(self) -> None:
        size = os.fstat(self._handle).st_size
        if size != self.bytes:
            change = "truncated" if size < self.bytes else "changed"
            raise CheckpointError(
                f"{self.path} is {change}: {size} bytes instead of {self.bytes}; restore the file from a copy"
            )
        self.about = self.at(0).frame.head
        if self.about.get("format") != FORMAT:
            raise CheckpointError(f"{self.path} is of format {self.about.get('format')}, this version reads {FORMAT}")
        frame = self.at(self.index).frame
        self._heads, flat, start = frame.head, frame.arrays[0], 0
        for name, count in self._heads["tables"].items():
            part = flat[start : start + count].tolist()
            self.places[name] = {bucket: BucketLocation(lsn, offset, rows) for bucket, lsn, offset, rows in part}
            start += count

    def at(self, offset: int) -> MessageRecord:
        """Return the record that begins at ``offset``."""
        try:
            return read(self._handle, self.path, offset, self.bytes)
        except TornRecord:
            raise CheckpointError(
                f"{self.path} is damaged at byte {offset}: a record runs over its end; restore the file from a copy"
            ) from None

    @property
    def dense_lsn(self) -> int:
        return int(self._heads["dense_lsn"])

    def facts(self) -> list[WireMessage]:
        return [self.at(offset).frame for offset in self._heads["facts"]]

    def dense(self) -> Iterator[tuple[str, NDArray[Any]]]:
        for offset in self._heads["dense"]:
            frame = self.at(offset).frame
            yield frame.head["dense"], frame.arrays[0]

    def rows(self, table: str, bucket: int) -> BucketRows | None:
        """Return the rows of a bucket; None if the file has none."""
        place = self.places.get(table, {}).get(bucket)
        if place is None or place.offset < 0:
            return None
        ids, records, removed = self.at(place.offset).frame.arrays
        return BucketRows(ids, records, removed)

    def verify(self) -> None:
        """Read and check the whole file. Raises ``CheckpointError`` if a record is damaged."""
        offset = 0
        while offset < self.bytes:
            offset = self.at(offset).end


def merge_delta_rows(older: BucketRows | None, newer: BucketRows | None) -> BucketRows | None:
    """Return a bucket's rows after a later delta is applied to them."""
    if older is None or newer is None:
        return newer if older is None else older
    kept = ~np.isin(older.ids, np.concatenate([newer.ids, newer.removed]))
    removed = older.removed[~np.isin(older.removed, newer.ids)]
    return BucketRows(
        np.concatenate([older.ids[kept], newer.ids]),
        np.concatenate([older.records[kept], newer.records]),
        np.unique(np.concatenate([removed, newer.removed])),
    )
