"""The format of a table's records: weights as float32, or narrow, as bf16 or int8.

The rules compute in float32 alone. Rows of a narrow table are widened for them, a part of a push at a time, and rounded
back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from echelon.base.errors import MismatchError
from echelon.parameter_server.protocol.job_spec import EVENTS, TableSpec
from echelon.parameter_server.table import initial, records
from echelon.parameter_server.table.arena import Arena
from echelon.parameter_server.table.compiled import readable
from echelon.parameter_server.table.narrow_weights import (
    BF16,
    FLOAT32,
    INT8,
    WIDE,
    gather_narrow,
    narrow_rows,
    weight_words,
    widen_rows,
)
from echelon.parameter_server.table.records import META
from echelon.strategy.sparse_update_rules import state_width

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Words = NDArray[np.uint32]

#: Changes rows: the arguments are slots, a value for each row, records, and the description of the records.
RowChange = Callable[[Int64s, Float32s, Float32s, Int64s], None]

_KINDS = {"float32": FLOAT32, "bf16": BF16, "int8": INT8}
#: Rows that are widened at once: few enough to stay in the cache.
_TOGETHER = 2048


def described_record(spec: TableSpec) -> Int64s:
    """Return the description of a table's records that kernels take."""
    kind, state = _KINDS[spec.dtype], state_width(spec.rule, spec.dim)
    rest = state + (EVENTS if spec.score is not None else 0) + META
    seed = np.array([spec.seed % 2**64], np.uint64).view(np.int64)[0]
    return np.array([spec.dim, state, weight_words(kind, spec.dim) + rest, seed, 0, kind, spec.dim + rest], np.int64)


class FloatRecords:
    """Records whose weights are float32.

    shape:  description of the records, of which the table sets the time of a push
    """

    def __init__(self, spec: TableSpec) -> None:
        self.shape = described_record(spec)
        self._first = initial.described(spec.initializer, spec.rule, spec.dim)

    def gather(self, ids: Int64s, slots: Int64s, arena: Arena, width: int, out: Float32s) -> None:
        """Write the first ``width`` floats of each row to ``out``; an id without a row reads its initial values."""
        records.gather(ids, slots, arena.floats, self.shape, self._first, width, out)

    def begin_new(self, ids: Int64s, slots: Int64s, arena: Arena) -> None:
        """Write the initial values of the rows that this push created."""
        records.begin_new(ids, slots, arena.floats, self.shape, self._first)

    def change(self, ids: Int64s, slots: Int64s, values: Float32s, arena: Arena, change: RowChange) -> None:
        """Change the rows in ``slots`` by ``change``."""
        change(slots, values, arena.floats, self.shape)


class NarrowRecords(FloatRecords):
    """Records whose weights are bf16 or int8; the rest of a record is as in ``FloatRecords``."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        self._wide_shape = described_record(_in_float32(spec))

    def gather(self, ids: Int64s, slots: Int64s, arena: Arena, width: int, out: Float32s) -> None:
        gather_narrow(ids, slots, arena.words32, self.shape, self._first, width, out)

    def begin_new(self, ids: Int64s, slots: Int64s, arena: Arena) -> None:
        """Do nothing: ``change`` begins with the initial values in full precision."""

    def change(self, ids: Int64s, slots: Int64s, values: Float32s, arena: Arena, change: RowChange) -> None:
        self._wide_shape[records.NOW] = self.shape[records.NOW]
        words = int(self._wide_shape[records.WORDS])
        wide, places = np.empty((min(len(ids), _TOGETHER), words), np.uint32), np.empty(len(ids), np.int64)
        for begin in range(0, len(ids), _TOGETHER):
            part = slice(begin, begin + _TOGETHER)
            widen_rows(ids[part], slots[part], arena.words32, self.shape, self._first, wide, places[part])
            change(places[part], values[part], wide.reshape(-1).view(np.float32), self._wide_shape)
            narrow_rows(ids[part], slots[part], arena.words32, self.shape, wide, False)


def record_format(spec: TableSpec) -> FloatRecords:
    return FloatRecords(spec) if spec.dtype == "float32" else NarrowRecords(spec)


def weights_of(kept: Words, spec: TableSpec) -> Float32s:
    """Return the weights in records of a file as float32, [n, dim]."""
    return _widened(kept, spec)[:, : spec.dim].view(np.float32)


def records_of(weights: Float32s, spec: TableSpec) -> Words:
    """Return records with these weights, rounded to the nearest, and nothing else."""
    wide = np.zeros((len(weights), int(described_record(spec)[WIDE])), np.uint32)
    wide[:, : spec.dim] = weights.view(np.uint32)
    return _narrowed(wide, spec)


def converted(kept: Words, was: TableSpec, now: TableSpec) -> Words:
    """Return records of a file in the format of another table that differs in dtype alone.

    Weights are rounded to the nearest.
    """
    if was.dtype == now.dtype:
        return kept
    words = int(described_record(was)[records.WORDS])
    if kept.ndim != 2 or kept.shape[1] != words:
        raise MismatchError(f"table '{was.name}': records of {words} words expected, got an array {kept.shape}")
    return _narrowed(_widened(kept, was), now)


def _narrowed(wide: Words, spec: TableSpec) -> Words:
    """Return float32 records in the format of the table, rounded to the nearest."""
    if spec.dtype == "float32":
        return wide
    shape, slots = described_record(spec), np.arange(len(wide))
    kept = np.empty((len(wide), int(shape[records.WORDS])), np.uint32)
    narrow_rows(slots, slots, kept.reshape(-1), shape, wide, True)
    return kept


def _widened(kept: Words, spec: TableSpec) -> Words:
    if spec.dtype == "float32":
        return np.ascontiguousarray(kept)
    shape, slots = described_record(spec), np.arange(len(kept))
    wide = np.empty((len(kept), int(shape[WIDE])), np.uint32)
    first = initial.described(spec.initializer, spec.rule, spec.dim)
    widen_rows(slots, slots, readable(kept, np.uint32).reshape(-1), shape, first, wide, np.empty(len(kept), np.int64))
    return wide


def _in_float32(spec: TableSpec) -> TableSpec:
    return dataclasses.replace(spec, dtype="float32")
