"""``BucketFiles``: rows of a device table in the form of files, which is that of the CPU table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.base.errors import MismatchError
from echelon.parameter_server.device_table.device_index import DeviceIndex
from echelon.parameter_server.device_table.device_rows import DeviceRows
from echelon.parameter_server.protocol.hashing import bucket_of
from echelon.parameter_server.protocol.job_spec import BUCKETS
from echelon.parameter_server.table import claims
from echelon.parameter_server.table.records import CHANGED, META, WAITING
from echelon.parameter_server.table.table import BucketRows

Int64s = NDArray[np.int64]
Uint32s = NDArray[np.uint32]

_LOW = 0xFFFFFFFF
_NO_IDS = np.empty(0, np.int64)


class BucketFiles:
    """The files of the buckets of one table, and the ids that were removed since the last snapshot."""

    def __init__(self, name: str, buckets: range) -> None:
        self._name, self._buckets = name, buckets
        self._removed: dict[int, list[Int64s]] = {}  # for buckets that have a snapshot

    # ---- removals ----

    def note_removed(self, ids: Int64s) -> None:
        if not (self._removed and len(ids)):
            return
        where = bucket_of(ids, BUCKETS)
        for bucket in np.unique(where).tolist():
            if bucket in self._removed:
                self._removed[bucket].append(ids[where == bucket])

    @contextlib.contextmanager
    def unrecorded(self, bucket: int) -> Iterator[None]:
        """Record no removals of this bucket: a removal by a restore is not a change."""
        news = self._removed.pop(bucket, [])
        yield
        self._removed[bucket] = news

    def forget(self, bucket: int) -> None:
        self._removed.pop(bucket, None)

    # ---- rows ----

    def seen(self, rows: DeviceRows, values: Tensor) -> Tensor:
        """Return the last-seen times of rows and of ids that wait for admission."""
        if not len(rows.meta):
            return values & _LOW
        return torch.where(values >= 0, rows.meta[values.clamp(min=0), 1].long() & _LOW, values & _LOW)

    def rows_of(self, index: DeviceIndex, rows: DeviceRows, bucket: int, changed_only: bool) -> BucketRows:
        keys, values = index.pairs(bucket)
        ids: Int64s = keys.cpu().numpy()
        held: Int64s = values.cpu().numpy()
        records = self._records_of(rows, values, held)
        removed = _NO_IDS
        if changed_only:
            gone = self._removed.get(bucket, [])
            removed = np.setdiff1d(np.concatenate(gone), ids) if gone else _NO_IDS
            changed = records[:, -2] >= CHANGED
            ids, records = ids[changed], records[changed]
        records[:, -2] &= np.uint32(_LOW ^ CHANGED)
        return BucketRows(ids, records, removed)

    def _records_of(self, rows: DeviceRows, values: Tensor, held: Int64s) -> Uint32s:
        out = np.zeros((len(held), rows.width + META), np.uint32)
        slots = values[values >= 0]
        out[held >= 0, :-META] = rows.rows[slots].cpu().numpy().view(np.uint32)
        out[held >= 0, -META:] = rows.meta[slots].cpu().numpy().view(np.uint32)
        waits = held < 0
        if waits.any():
            counts, seen, changed = claims.waited(held[waits])
            out[waits, -2] = counts | np.where(changed, WAITING | CHANGED, WAITING).astype(np.uint32)
            out[waits, -1] = seen
        return out

    def mark_clean(self, index: DeviceIndex, rows: DeviceRows, bucket: int, places: Tensor) -> None:
        """Clear the changed flags of a bucket, whose ids lie at ``places``."""
        values = index.values[places]
        slots = values[values >= 0]
        rows.meta[slots, 0] &= CHANGED - 1
        waits = values < 0
        index.values[places[waits]] = values[waits] & ~(1 << 62)
        self._removed[bucket] = []

    def restorable(self, bucket: int, rows: BucketRows, words: int) -> tuple[Int64s, Uint32s]:
        """Return ids and records of rows from a file. Raises ``MismatchError`` if they do not fit table and bucket."""
        ids, kept = np.ascontiguousarray(rows.ids, np.int64), np.ascontiguousarray(rows.records, np.uint32)
        where = f"table '{self._name}', bucket {bucket}"
        if kept.shape != (len(ids), words):
            raise MismatchError(
                f"{where}: {len(ids)} records of {words} words expected, got an array of shape {kept.shape}; "
                "the rows were written with another dim or rule"
            )
        if bucket not in self._buckets:
            raise MismatchError(
                f"{where}: this worker holds buckets {self._buckets.start} to {self._buckets.stop - 1}; load the "
                "checkpoint with all workers"
            )
        for named in (ids, rows.removed):
            if (bucket_of(named, BUCKETS) != bucket).any():
                raise MismatchError(f"{where}: the rows have ids of other buckets; the file is damaged or misnamed")
        return ids, kept
